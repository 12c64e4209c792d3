"""What runs the bundle's graphs."""
