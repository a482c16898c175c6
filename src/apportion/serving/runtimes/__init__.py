"""ONNX Runtime, torch and remote servers behind one interface."""
