"""Trees of tensors and numbers from one rank to another, whatever their shapes turn out to be.

::

    length of the description (0: as the last one) | description (JSON) | tensor | tensor | ...

A description is sent where it differs from the one before: of a training step's micro-batches, once or twice.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from apportion.comm.group import DONE, Group, Work

UNDER_WAY = 8
"""Messages that a rank leaves to themselves before it waits for the oldest: their tensors are kept until then."""


@final
class Outlet:
    """Messages to another rank."""

    def __init__(self, group: Group, to: int) -> None:
        self._group, self._to = group, to
        self._last: Any = None
        self._under_way: deque[list[tuple[Work, Tensor]]] = deque()

    def send(self, values: Sequence[Any]) -> None:
        """A list of trees; what is in them is not to be changed before ``finish``."""
        values = [tuple(value) if isinstance(value, torch.Size) else value for value in values]
        leaves, spec = pytree.tree_flatten(values)
        plain = [_described(leaf) for leaf in leaves]
        works: list[tuple[Work, Tensor]] = []
        told = json.dumps(plain)  # 1 is not True there, and 0.0 not -0.0
        if self._last == (spec, told):
            self._post(torch.zeros(1, dtype=torch.int64), works)
        else:
            data = json.dumps([pytree.treespec_dumps(spec), plain]).encode()
            self._post(torch.tensor([len(data)]), works)
            self._post(torch.frombuffer(bytearray(data), dtype=torch.uint8), works)
            self._last = spec, told
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.numel():
                self._post(leaf.detach().contiguous().view(-1).view(torch.uint8), works)
        self._under_way.append(works)
        if len(self._under_way) > UNDER_WAY:
            self._wait()

    def _post(self, tensor: Tensor, works: list[tuple[Work, Tensor]]) -> None:
        work = self._group.send(tensor, self._to)
        if work is not DONE:
            works.append((work, tensor))

    def _wait(self) -> None:
        for work, _ in self._under_way.popleft():
            work.wait()

    def finish(self) -> None:
        """Until all has been received, or is where it needs nobody's help."""
        while self._under_way:
            self._wait()


@final
class Inlet:
    """Messages from another rank."""

    def __init__(self, group: Group, source: int, device: torch.device) -> None:
        self._group, self._source, self._device = group, source, device
        self._last: tuple[Any, list[Any]] | None = None

    def receive(self) -> list[Any]:
        """What was sent; a tensor that requires a gradient there does so here, as a leaf. Blocks."""
        length = int(self._take(torch.int64, [1]))
        if length:
            told = self._take(torch.uint8, [length])
            spec, plain = json.loads(told.cpu().numpy().tobytes())
            self._last = pytree.treespec_loads(spec), plain
        assert self._last is not None, "the first message is described"
        spec, plain = self._last
        leaves = [self._leaf(described) for described in plain]
        values: list[Any] = pytree.tree_unflatten(leaves, spec)
        return values

    def _leaf(self, described: Any) -> Any:
        if not isinstance(described, list):
            return described
        dtype, shape, requires_grad = described
        return self._take(getattr(torch, dtype), shape).requires_grad_(requires_grad)

    def _take(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        into = torch.empty(shape, dtype=dtype, device=self._device)
        if into.numel():
            self._group.receive(into.view(-1).view(torch.uint8), self._source).wait()
        return into


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.requires_grad]
