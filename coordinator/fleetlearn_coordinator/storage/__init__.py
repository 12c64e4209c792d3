"""What survives the coordinator's death."""
