"""Secure aggregation's helper: a process at another operator's, and the coordinator's questions."""
