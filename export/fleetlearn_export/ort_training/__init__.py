"""ONNX Runtime's own training artifacts, made from the same model and loss."""
