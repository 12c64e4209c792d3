"""The functions that write ATen operators as ONNX operators, by kind. ``table.py`` collects
them."""
