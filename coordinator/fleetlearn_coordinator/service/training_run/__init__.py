"""A training run without sockets and clocks: what its data directory remembers, and its background
work."""
