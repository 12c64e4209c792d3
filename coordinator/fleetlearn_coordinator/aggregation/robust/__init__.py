"""Aggregators that bound what a few hostile devices can do to the model. They need every update of
a round."""
