"""What an update is multiplied by beside its weight and its staleness, and what the mean of a round
is."""
