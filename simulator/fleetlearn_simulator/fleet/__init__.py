"""The simulated fleet: the coordinator's round engine, driven by events in virtual time."""
