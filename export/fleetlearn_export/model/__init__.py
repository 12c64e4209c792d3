"""The user's model, its loss and its local step, checked in PyTorch before anything is traced."""
