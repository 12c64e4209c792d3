"""Comparison of the exported graphs with the same computation in PyTorch, before a bundle is
published."""
