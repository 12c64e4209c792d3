"""The device's side of the conversation, without I/O."""
