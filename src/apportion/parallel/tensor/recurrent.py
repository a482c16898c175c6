"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` cut by hidden units: each rank computes every gate of its own units.

A unit's gates need the whole hidden state of the step before, so the ranks meet at every time step, forward and
backward: sequences are long and a step is short, so this is slow, and it is there for what does not fit otherwise. The
products of the inputs are made for all time steps at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from apportion.comm.differentiable import all_gather, copy_to, gather_from, scatter_to
from apportion.comm.group import Group
from apportion.parallel.tensor.slicing import Slicer, shares

_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}


def can_be_sliced(layer: nn.Module) -> bool:
    """Return whether a layer is an LSTM, GRU or RNN of torch's without a projection of the hidden state
    (``proj_size``)."""
    return type(layer) in (nn.LSTM, nn.GRU, nn.RNN) and not layer.proj_size


def slice_units(layer: nn.RNNBase, slicer: Slicer) -> None:
    """Cut a recurrent layer so that each rank holds some units of every layer and direction. In place, by class."""
    own, size = slicer.own_units(layer.hidden_size), layer.hidden_size
    rows = [gate * size + unit for gate in range(_GATES[layer.mode]) for unit in own]
    for suffix in _suffixes(layer):
        slicer.cut(layer, f"weight_ih{suffix}", rows, None)
        slicer.cut(layer, f"weight_hh{suffix}", rows, None)
        if layer.bias:
            slicer.cut(layer, f"bias_ih{suffix}", rows)
            slicer.cut(layer, f"bias_hh{suffix}", rows)
    sliced: Any = layer
    sliced.__class__, sliced.group = {nn.LSTM: LSTMSlice, nn.GRU: GRUSlice, nn.RNN: RNNSlice}[type(layer)], slicer.group
    sliced.sizes = [len(share) for share in shares(size, slicer.group.size)]


def _suffixes(layer: nn.RNNBase) -> list[str]:
    """The suffixes of the parameters' names, in the order of the states."""
    ways = ("", "_reverse") if layer.bidirectional else ("",)
    return [f"_l{number}{way}" for number in range(layer.num_layers) for way in ways]


class _UnitsSlice(nn.RNNBase, ABC):
    """A recurrent layer with some of the units: whole inputs and states -> whole outputs and states, as torch's."""

    group: Group
    sizes: list[int]

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        if isinstance(input, PackedSequence):
            raise TypeError(
                f"{type(self).__bases__[-1].__name__} was traced on a padded sequence and given a packed one: give it "
                "packed sequences from the first batch on, or use data_parallel"
            )
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(0 if self.batch_first else 1)
        x = x.transpose(0, 1) if self.batch_first else x
        states = self._states(hx, x, batched)
        ways = 2 if self.bidirectional else 1
        suffixes, last = _suffixes(self), []
        for number in range(self.num_layers):
            if number:
                x = functional.dropout(x, self.dropout, self.training)
            inputs, outputs = copy_to(x, self.group), []
            for at in range(number * ways, (number + 1) * ways):
                reverse = at % ways == 1
                output, state = self._run(inputs, [s[at] for s in states], suffixes[at], reverse=reverse)
                outputs.append(output)
                last.append((output[0 if reverse else -1], *state))
            x = torch.cat(outputs, -1) if ways > 1 else outputs[0]
        x = x.transpose(0, 1) if self.batch_first else x
        final = [torch.stack(parts) for parts in zip(*last, strict=True)]
        if not batched:
            x, final = x.squeeze(0 if self.batch_first else 1), [t.squeeze(1) for t in final]
        return x, tuple(final) if len(final) > 1 else final[0]

    def _states(self, hx: Any, x: Tensor, batched: bool) -> list[Tensor]:
        """The states to begin with, whole: (layers * directions, batch, hidden) each."""
        if hx is None:
            layers = self.num_layers * (2 if self.bidirectional else 1)
            zeros = x.new_zeros((layers, x.shape[1], self.hidden_size))
            return [zeros] * (2 if self.mode == "LSTM" else 1)
        given = list(hx) if self.mode == "LSTM" else [hx]
        return given if batched else [s.unsqueeze(1) for s in given]

    def _run(self, x: Tensor, states: list[Tensor], suffix: str, *, reverse: bool) -> tuple[Tensor, list[Tensor]]:
        """Run one layer in one direction: outputs (time, batch, hidden), and the last of the states other than the
        output."""
        get: Callable[[str], Any] = lambda name: getattr(self, name + suffix) if self.bias or "w" in name else None  # noqa: E731
        gates = functional.linear(x, get("weight_ih"), get("bias_ih")).unbind(0)
        weight, bias = get("weight_hh"), get("bias_hh")
        whole = copy_to(states[0], self.group)
        own = [scatter_to(s, self.group, -1, self.sizes) for s in states]
        steps = range(len(gates))
        outputs: list[Tensor] = []
        for t in reversed(steps) if reverse else steps:
            if outputs:
                whole = all_gather(outputs[-1], self.group, -1, self.sizes)
            own = self._step(gates[t], functional.linear(whole, weight, bias), own)
            outputs.append(own[0])
        outputs = outputs[::-1] if reverse else outputs
        rest = [gather_from(s, self.group, -1, self.sizes) for s in own[1:]]
        return gather_from(torch.stack(outputs), self.group, -1, self.sizes), rest

    @abstractmethod
    def _step(self, x: Tensor, h: Tensor, own: list[Tensor]) -> list[Tensor]:
        """Compute this rank's states after a time step: ``x`` and ``h`` are what the inputs and the hidden state give
        its gates."""


class LSTMSlice(_UnitsSlice, nn.LSTM):  # type: ignore[misc] # one signature for all three
    def _step(self, x: Tensor, h: Tensor, own: list[Tensor]) -> list[Tensor]:
        i, f, g, o = (x + h).chunk(4, -1)
        cell = torch.sigmoid(f) * own[1] + torch.sigmoid(i) * torch.tanh(g)
        return [torch.sigmoid(o) * torch.tanh(cell), cell]


class GRUSlice(_UnitsSlice, nn.GRU):  # type: ignore[misc] # one signature for all three
    def _step(self, x: Tensor, h: Tensor, own: list[Tensor]) -> list[Tensor]:
        xr, xz, xn = x.chunk(3, -1)
        hr, hz, hn = h.chunk(3, -1)
        z = torch.sigmoid(xz + hz)
        new = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        return [(1 - z) * new + z * own[0]]


class RNNSlice(_UnitsSlice, nn.RNN):  # type: ignore[misc] # one signature for all three
    def _step(self, x: Tensor, h: Tensor, own: list[Tensor]) -> list[Tensor]:
        return [torch.tanh(x + h) if self.mode == "RNN_TANH" else torch.relu(x + h)]
