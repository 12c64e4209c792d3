"""Runs without a model: what the sums of all devices' rows make of a computation's state."""
