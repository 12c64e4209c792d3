"""fleetlearn's export room."""
