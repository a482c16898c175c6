"""What cannot become spiking neurons, and what to do instead."""

from __future__ import annotations

from torch import nn

_CURES = {
    "max_pool": (
        "the largest rate of several neurons is not a sum of their spikes; use an average pool, or "
        'spiking(max_pool="average"), which puts one there and trains the net again'
    ),
    "softmax": "a softmax divides by what all neurons fire; leave it out at the end, and use no attention",
    "attention": "attention multiplies activations with each other, which spikes cannot; use convolutions",
    "recurrent": "its state and gates are no rates; use convolutions or linear layers over a window of time",
    "norm": "it takes its statistics from each example, which no weights can hold; use BatchNorm2d",
    "activation": "a rate is at least 0 and linear in the current; use ReLU or ReLU6",
    "other": "there is no rule for it; build the net of convolutions, linear layers, BatchNorm2d, ReLU, average pools and sums",
}
_OF_OPERATORS = {
    "softmax": "softmax",  # before "max", which is a part of it
    "max": "max_pool",
    "attention": "attention",
    "matmul": "attention",
    "bmm": "attention",
    "lstm": "recurrent",
    "gru": "recurrent",
    "rnn": "recurrent",
    "layer_norm": "norm",
    "group_norm": "norm",
    "instance_norm": "norm",
    **dict.fromkeys(("sigmoid", "tanh", "gelu", "silu", "elu", "leaky", "prelu", "hard", "mish", "soft"), "activation"),
}  # fmt: skip
_MODULES: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str], ...] = (
    ((nn.RNNBase, nn.RNNCellBase), "recurrent"),
    ((nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer), "attention"),
)


def cure_for_operator(operator: str) -> str:
    """What to say of an operation of torch by this name."""
    return _CURES[next((kind for part, kind in _OF_OPERATORS.items() if part in operator), "other")]


def refuse_modules(module: nn.Module) -> None:
    """Raise ValueError, by the layer's name, for layers that torch.export would take apart."""
    for name, layer in module.named_modules():
        for types, kind in _MODULES:
            if isinstance(layer, types):
                where = f"layer {name} ({type(layer).__name__})" if name else type(layer).__name__
                raise ValueError(f"{where} cannot become spiking neurons: {_CURES[kind]}")
