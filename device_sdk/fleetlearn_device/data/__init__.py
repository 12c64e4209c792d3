"""Reads a device's own data, wherever they are kept, as arrays by name."""
