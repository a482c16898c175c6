"""Quantization of ONNX files: int8, with the choices made by calibration examples, and weights of float16.

ONNX Runtime's quantizers write the int8 graph; what it computes is held to an evaluator of the graph.
"""
