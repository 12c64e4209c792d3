"""Own algorithms for fleetlearn: one of each kind."""
