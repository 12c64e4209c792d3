"""Who has which task, and when a round ends: no I/O, no clock."""
