"""What a bundle holds and what a training step costs, for ``fleetlearn-export inspect``."""
