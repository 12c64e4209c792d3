"""Writes ONNX straight from a traced graph: one small function for each ATen operator."""
