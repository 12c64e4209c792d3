"""The commands of fleetlearn-device: a file for each."""
