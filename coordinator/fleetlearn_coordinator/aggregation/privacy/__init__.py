"""Differential privacy of a round: one noisy mean, on the exact sum. No I/O and no clock."""
