"""What survives the device's death."""
