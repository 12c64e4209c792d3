"""A training step as one program of operators that ONNX has a counterpart for."""
