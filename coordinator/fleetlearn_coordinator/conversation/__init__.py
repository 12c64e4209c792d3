"""What is said between a device and the coordinator."""
