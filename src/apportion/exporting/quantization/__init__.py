"""Quantization of ONNX files: int8 by ONNX Runtime's quantizers, with the choices made by calibration examples, and
weights of float16."""
