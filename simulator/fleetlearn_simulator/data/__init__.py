"""The training examples of each device: generated, read from an .npz file, or made by the user's
function."""
