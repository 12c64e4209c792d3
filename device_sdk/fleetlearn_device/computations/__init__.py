"""What a device computes of its rows where a bundle has no graphs: NumPy alone."""
