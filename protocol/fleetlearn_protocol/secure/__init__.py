"""Secure aggregation: what devices, coordinator and helper compute alike."""
