"""The Open Inference Protocol: requests and responses in JSON and in binary tensors."""
