"""The running coordinator: a run, its server, and what people see of it."""
