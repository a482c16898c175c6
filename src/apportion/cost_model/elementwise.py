"""The activations of torch, which treat each number by itself, so that a part of a tensor is enough for a part of what
they give."""

from __future__ import annotations

ACTIVATIONS = {
    "celu": "CELU", "elu": "ELU", "gelu": "GELU", "hardshrink": "Hardshrink", "hardsigmoid": "Hardsigmoid",
    "hardswish": "Hardswish", "hardtanh": "Hardtanh", "leaky_relu": "LeakyReLU", "logsigmoid": "LogSigmoid",
    "mish": "Mish", "relu": "ReLU", "relu6": "ReLU6", "selu": "SELU", "sigmoid": "Sigmoid", "silu": "SiLU",
    "softplus": "Softplus", "softshrink": "Softshrink", "softsign": "Softsign", "tanh": "Tanh",
    "tanhshrink": "Tanhshrink", "threshold": "Threshold",
}  # fmt: skip
"""The layer of ``torch.nn`` that applies each function of ``torch.nn.functional``, by name."""
