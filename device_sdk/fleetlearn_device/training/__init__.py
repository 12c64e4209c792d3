"""Training one task on the device's own data."""
