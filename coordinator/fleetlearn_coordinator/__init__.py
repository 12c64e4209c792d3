"""fleetlearn's coordinator room."""
