"""The commands of fleetlearn-coordinator, one group to a file. table.py lists them all."""
