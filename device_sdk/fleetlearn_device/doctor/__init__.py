"""What a device needs, checked: what is so, and what to do."""
