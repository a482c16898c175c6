"""Layers, and parts of them, that are run by themselves to be timed: forward and back, on messages that take no
time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from apportion.comm.group import DONE, Group, WaitClock, Work
from apportion.core import tree
from apportion.parallel.recurrent.layer import chunks, layer
from apportion.profiler.call_timer import backward, clock, fresh


@final
class Silent(Group):
    """A group as its first rank sees it, in which messages take no time: the time that is left is that of computing.
    What other ranks would give are copies of this rank's own tensors."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.waits, self.all_waits = 0, size, deque(), WaitClock()

    def all_reduce(self, tensor: Tensor) -> Work:
        return DONE

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).expand(self.size, *tensor.shape)  # without memory of its own

    def gather_into(self, rows: Tensor, own: Tensor) -> None:
        rows.copy_(own.expand_as(rows))

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        pass

    def reduce_scatter(self, rows: Tensor, into: Tensor) -> None:
        into.copy_(rows[0])

    def gather_parts(self, own: Tensor, parts: Sequence[Tensor]) -> None:
        for part in parts:
            n = min(part.numel(), own.numel())
            part.view(-1)[:n].copy_(own.detach().view(-1)[:n])

    def send(self, tensor: Tensor, to: int) -> Work:
        return DONE

    def receive(self, into: Tensor, source: int) -> Work:
        return DONE

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class TimedPart(ABC):
    """A layer, or a part of one, to time."""

    @abstractmethod
    def run(self) -> tuple[float, float]:
        """Run it once, and return its (forward, backward) seconds."""


@final
class PartCalls(TimedPart):
    """A module or a function that is called on these arguments, and autograd through it."""

    def __init__(
        self, call: Callable[..., Any], args: Any, kwargs: Any, device: torch.device, *, copies: bool = False
    ) -> None:
        self._call, self._given, self._device, self._copies = call, (args, kwargs), device, copies
        self._parameters = list(call.parameters()) if isinstance(call, nn.Module) else []
        self._ones: list[Tensor] | None = None

    def run(self) -> tuple[float, float]:
        for p in self._parameters:
            p.grad = None
        args, kwargs = fresh(self._given, [], copies=self._copies)
        began = clock(self._device)
        result = self._call(*args, **kwargs)
        forward = clock(self._device) - began
        made = [t for t in tree.tensors(result) if t.requires_grad]
        if self._ones is None:
            self._ones = [torch.ones_like(t) for t in made]
        began = clock(self._device)
        backward(made, list(self._ones))
        return forward, clock(self._device) - began


@final
class OneOfStack(TimedPart):
    """One layer of a recurrent stack as ``wavefront_parallel`` runs it, chunk by chunk. ``only_one``: only the first of
    its chunks, without what is done once for all of them (the gradients of its weights, where they are made so)."""

    def __init__(self, net: nn.RNNBase, x_TBI: Tensor, length: int, *, only_one: bool) -> None:
        number = min(1, net.num_layers - 1)  # most layers look at hidden units
        self._layer = layer(net, number)
        self._parameters = list(net.parameters())
        time, rows = x_TBI.shape[:2]
        self._pieces, self._only_one, self._ran = chunks(time, length), only_one, False
        self._x = torch.randn(time, rows, self._layer.inputs, dtype=x_TBI.dtype)
        self._y = torch.empty(time, rows, self._layer.outputs, dtype=x_TBI.dtype)
        self._dy, self._dx = torch.ones_like(self._y), torch.empty_like(self._x)
        widths = [self._layer.outputs] + [net.hidden_size] * isinstance(net, nn.LSTM)
        self._state = tuple(torch.zeros(rows, width, dtype=x_TBI.dtype) for width in widths)

    def run(self) -> tuple[float, float]:
        cpu, own = torch.device("cpu"), self._layer
        for p in self._parameters:
            p.grad = None
        pieces = self._pieces[:1] if self._only_one and self._ran else self._pieces  # memory holds numbers by then
        self._ran = True
        began = clock(cpu)
        own.begin_pass(self._x, self._y, self._state, training=True)
        begun = clock(cpu)
        for piece in pieces:
            own.forward(piece)
        forward = clock(cpu) - (begun if self._only_one else began)
        began = clock(cpu)
        own.begin_backward((None,) * len(own.state))
        for piece in reversed(pieces):
            own.backward(piece, self._dy[piece], self._dx[piece])
        if not self._only_one:
            own.finish()
        return forward, clock(cpu) - began
