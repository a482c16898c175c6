"""``nn.RNN`` as the operator RNN of ONNX, for sequences of any length: torch.export would unroll its loop for the
length of the sample, as it does not with LSTM and GRU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_ACTIVATIONS = {"tanh": "Tanh", "relu": "Relu"}


@contextmanager
def rnn_operators(network: nn.Module) -> Iterator[None]:
    """Hold each ``nn.RNN`` of a network as an operator of ONNX, which computes nothing by itself: for the time of an
    export."""
    found = [module for module in network.modules() if type(module) is nn.RNN]
    try:
        for module in found:
            forward: Callable[..., Any] = partial(_as_operators, module)
            object.__setattr__(module, "forward", forward)
        yield
    finally:
        for module in found:
            object.__delattr__(module, "forward")


def _as_operators(rnn: nn.RNN, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """input: (batch, time, inputs) or (time, batch, inputs), as ``batch_first`` says, or (time, inputs). hx: (layers *
    directions, batch, hidden), or without the batch, as the input is. Raises TypeError where the input is packed."""
    if not isinstance(input, Tensor):
        raise TypeError(
            f"it takes a {type(input).__name__}, whose lengths a file cannot hold, and not the padded tensor and a mask"
        )
    if input.ndim == 2:  # one sequence alone: the operator has a dimension for several
        several, start = input.unsqueeze(0 if rnn.batch_first else 1), None if hx is None else hx.unsqueeze(1)
        outputs, state = _as_operators(rnn, several, start)
        return outputs.squeeze(0 if rnn.batch_first else 1), state.squeeze(1)
    directions = 2 if rnn.bidirectional else 1
    found = input.transpose(0, 1) if rnn.batch_first else input
    last = []
    for layer in range(rnn.num_layers):
        start = None if hx is None else hx[layer * directions : (layer + 1) * directions]
        found, state = _layer(rnn, layer, directions, found, start)
        last.append(state)
    return (found.transpose(0, 1) if rnn.batch_first else found), torch.cat(last)


def _layer(rnn: nn.RNN, layer: int, directions: int, x: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    names = [f"l{layer}{suffix}" for suffix in ("", "_reverse")[:directions]]

    def stacked(kind: str) -> Tensor:
        return torch.stack([getattr(rnn, f"{kind}_{name}") for name in names])

    bias = torch.cat([stacked("bias_ih"), stacked("bias_hh")], 1) if rnn.bias else None
    time, batch = x.shape[:2]
    shapes = [(time, directions, batch, rnn.hidden_size), (directions, batch, rnn.hidden_size)]
    outputs, state = torch.onnx.ops.symbolic_multi_out(
        "RNN",
        (x, stacked("weight_ih"), stacked("weight_hh"), bias, None, start),
        attrs={
            "activations": [_ACTIVATIONS[rnn.nonlinearity]] * directions,
            "direction": "bidirectional" if directions == 2 else "forward",
            "hidden_size": rnn.hidden_size,
        },
        dtypes=(x.dtype, x.dtype),
        shapes=shapes,
    )
    return outputs.transpose(1, 2).flatten(2), state
