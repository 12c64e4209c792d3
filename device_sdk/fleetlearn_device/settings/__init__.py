"""What a device can be told: one table, and its values from flags, environment and a file."""
