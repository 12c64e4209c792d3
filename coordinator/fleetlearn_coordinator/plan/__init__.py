"""What people write: the plan of a training run, and the settings of the process that serves it."""
