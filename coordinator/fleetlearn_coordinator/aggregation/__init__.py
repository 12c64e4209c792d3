"""What the updates of a round become: the mean, the next model, the round's summary."""
