"""Trees of tensors and numbers from one rank to another, whatever their shapes turn out to be.

::

    length of the description (0: as the last one) | description (JSON) | tensor | tensor | ...

A description is sent where it differs from the one before: of a training step's micro-batches, once or twice.

``ahead``, on both sides: the receiver asks for the next message as soon as it has one, so that it travels while the
receiver computes; a message does not travel to a rank that has not asked for it. The receiver asks for one that is like
the last: where the next is another, as many bytes as were asked for come first, and are not read. Other messages
between the same two ranks would be taken for it: those need a connection of their own.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from apportion.comm.group import DONE, Group, Work, bytes_of
from apportion.core.torch_private import pytree

UNDER_WAY = 8
"""The number of messages that a rank leaves under way before it waits for the oldest: their tensors are kept until
then."""


@final
class StageSender:
    """A sender of messages to another rank."""

    def __init__(self, group: Group, to: int, *, ahead: bool = False) -> None:
        self._group, self._to, self._ahead = group, to, ahead
        self._last: Any = None
        self._asked: list[int] = []
        """The bytes of each tensor that the other side waits for."""
        self._under_way: deque[list[tuple[Work, Tensor]]] = deque()

    def send(self, values: Sequence[Any]) -> None:
        """Send a list of trees; what is in them is not to be changed before ``finish``."""
        values = [tuple(value) if isinstance(value, torch.Size) else value for value in values]
        leaves, spec = pytree.tree_flatten(values)
        plain = [_described(leaf) for leaf in leaves]
        works: list[tuple[Work, Tensor]] = []
        text = json.dumps(plain)  # 1 is not True there, and 0.0 not -0.0
        if self._last == (spec, text):
            self._post(torch.zeros(1, dtype=torch.int64), works)
        else:
            data = json.dumps([pytree.treespec_dumps(spec), plain]).encode()
            self._post(torch.tensor([len(data)]), works)
            # The receiver has asked ahead for tensors like the last ones, and takes these bytes before it asks for
            # others.
            for nbytes in self._asked:
                self._post(torch.zeros(nbytes, dtype=torch.uint8), works)
            self._post(torch.frombuffer(bytearray(data), dtype=torch.uint8), works)
            self._last = spec, text
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
        for tensor in tensors:
            self._post(bytes_of(tensor.resolve_conj().resolve_neg().contiguous()), works)
        if self._ahead:
            self._asked = [tensor.nbytes for tensor in tensors]
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
        """Wait until all messages have been received, or need no further work of this rank."""
        while self._under_way:
            self._wait()


@final
class StageReceiver:
    """A receiver of messages from another rank."""

    def __init__(self, group: Group, source: int, device: torch.device, *, ahead: bool = False) -> None:
        self._group, self._source, self._device, self._ahead = group, source, device, ahead
        self._last: tuple[Any, list[Any]] | None = None
        self._coming: tuple[_PendingTensor, list[_PendingTensor]] | None = None
        """The length and the tensors of the next message, where they were asked for ahead."""

    def receive(self) -> list[Any]:
        """Receive what was sent; a tensor that requires a gradient there does so here, as a leaf. Blocks."""
        first, tensors = self._coming or (self._ask(torch.int64, [1]), [])
        if length := int(first.wait()):
            for tensor in tensors:
                tensor.wait()  # nothing: it was asked for before anyone knew
            text = self._ask(torch.uint8, [length]).wait()
            spec, plain = json.loads(text.cpu().numpy().tobytes())
            self._last = pytree.treespec_loads(spec), plain
        assert self._last is not None, "the first message is described"
        spec, plain = self._last
        if length or not self._ahead:
            tensors = self._ask_for(plain)
        arrived = iter([tensor.wait() for tensor in tensors])
        self._coming = (self._ask(torch.int64, [1]), self._ask_for(plain)) if self._ahead else None
        leaves = [next(arrived).requires_grad_(one[2]) if isinstance(one, list) else one for one in plain]
        values: list[Any] = pytree.tree_unflatten(leaves, spec)
        return values

    def _ask_for(self, plain: Sequence[Any]) -> list[_PendingTensor]:
        return [self._ask(getattr(torch, one[0]), one[1]) for one in plain if isinstance(one, list)]

    def _ask(self, dtype: torch.dtype, shape: Sequence[int]) -> _PendingTensor:
        into = torch.empty(shape, dtype=dtype, device=self._device)
        work = self._group.receive(bytes_of(into), self._source) if into.numel() else DONE
        return _PendingTensor(work, into)


class _PendingTensor(NamedTuple):
    """A tensor that was asked for."""

    work: Work
    into: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.into


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.requires_grad]
