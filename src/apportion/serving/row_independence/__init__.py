"""Whether each row of a network's outputs depends on its own row of the inputs alone, read from its ONNX graph."""
