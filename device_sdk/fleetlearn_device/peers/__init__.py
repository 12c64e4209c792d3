"""Training without a coordinator: devices average their models with their neighbours'."""
