"""The plan: what a training run is to do."""
