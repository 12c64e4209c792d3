"""Peers in virtual time: training without a coordinator, over a mixing matrix."""
