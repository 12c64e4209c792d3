"""How rows of float32 become bytes: the formats that the encodings of encodings.py are made of."""
