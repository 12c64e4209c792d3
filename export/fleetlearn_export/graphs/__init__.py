"""FlatArguments programs as ONNX graphs, and train_many.onnx, the training step of many devices at
once."""
