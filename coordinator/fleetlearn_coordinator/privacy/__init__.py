"""What differential privacy costs: the accounting of a run's releases."""
