"""``make demo``: a fleet trains a digits model while devices, and once the coordinator, are killed
under it."""
