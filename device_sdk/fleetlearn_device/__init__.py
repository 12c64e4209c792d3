"""fleetlearn's device room."""
