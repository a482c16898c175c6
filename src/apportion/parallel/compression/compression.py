"""The interface of a compression: a value of a strategy, which makes the sums that send less between hosts. And the
errors that these sums keep from step to step, as a part of a training's state (``KeptErrors``)."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from apportion.comm.group import Group, collective
from apportion.comm.network.host_exchange import HostSum
from apportion.core.strategy import State
from apportion.core.value import Value, parse

METHODS = "apportion.parallel.compression.methods"
"""The folder whose files are the compressions."""
COMPRESSED = (torch.float32, torch.float64)
"""The types of gradients that are compressed. Those that are as small as what they would become travel as they are."""


class Compression(Value, ABC):
    """A way to compress what is summed between hosts. Within a host nothing is compressed."""

    keeps_errors: ClassVar[bool] = False
    """Is what a message has left out kept, and added to the next one (error feedback)?"""
    passes: ClassVar[float]
    """How long it takes, measured, in passes through the memory of the gradients: for a price."""

    @abstractmethod
    def between(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> HostSum:
        """Make the sum of one flat tensor that is made of tensors of these shapes, for all steps."""

    @abstractmethod
    def sent(self, numel: int, itemsize: int) -> float:
        """Return about how many bytes stand for ``numel`` numbers of ``itemsize`` bytes each, in one message."""

    def sent_bytes(self, nbytes: float) -> float:
        """Return about how many bytes stand for ``nbytes`` bytes of float32."""
        return self.sent(max(1, int(nbytes // 4)), 4)


def compression(given: Compression | str | None) -> Compression | None:
    """Return the compression that is given as such, or as its written form: ``"int8(block=128)"``."""
    found = parse(given, METHODS) if isinstance(given, str) else given
    if found is not None and not isinstance(found, Compression):
        raise ValueError(f'compress={given!r} must be a compression, such as "fp16", "int8" or "power_sgd(rank=4)"')
    return found


# What compressed sums have left out so far, as a part of a training's state.
#
# It belongs to a host, and to the slices that its ranks have: a run that goes on with the same ranks on as many hosts
# has the bits of one that was never stopped. One that goes on with others begins with nothing left out, and says so.

SETTING, PREFIX = "compress", "compress"
"""The name of what the settings of a state say, and what the names of its tensors begin with."""


class KeptErrors:
    """The errors that some sums keep. ``hosts``: the number of every rank's host, by rank."""

    def __init__(self, compress: Compression, hosts: Sequence[int], group: Group) -> None:
        self._compress, self._hosts, self._group = compress, list(hosts), group
        self._first = self._hosts.index(self._hosts[group.rank])
        """The first rank of this rank's host."""

    @collective
    def add_to(self, state: State, sums: Sequence[HostSum], numbers: Sequence[int]) -> State:
        """Return the state with what all ranks keep. ``numbers``: of how many numbers each sum is. Called by all of
        them."""
        slots: dict[str, Tensor] = {}
        for number, between in enumerate(sums):
            for name, tensor in between.state_dict().items():
                is_sent = not between.same_on_host or self._first == self._group.rank
                each = self._group.all_gather_rows(tensor if is_sent else tensor[:0])
                slots |= {self._name(rank, number, name): own for rank, own in enumerate(each) if len(own)}
        settings = {**state.settings, SETTING: self._setting(numbers)}
        return replace(state, optimizer={**state.optimizer, **slots}, settings=settings)

    def load(self, state: State, sums: Sequence[HostSum], numbers: Sequence[int]) -> None:
        """Go on from what a state has of this rank. ``numbers``: of how many numbers each sum is."""
        earlier, now = state.settings.get(SETTING), self._setting(numbers)
        if earlier != now and state.step and self._group.rank == 0:
            before = (
                f"compress={earlier['method']} on hosts {earlier['hosts']}"
                if earlier
                else "no compression between hosts"
            )
            after = f"compress={self._compress} on hosts {self._hosts}"
            if earlier and before == after:
                after += f", whose sums are of {numbers} numbers and not of {earlier.get('numbers')}"
            warnings.warn(
                f"the state was saved with {before}, and goes on with {after}: what has been left out of the gradients "
                "so far begins at zero",
                stacklevel=2,
            )
        for number, between in enumerate(sums):
            begin = self._name(self._first if between.same_on_host else self._group.rank, number, "")
            kept = {name.removeprefix(begin): t for name, t in state.optimizer.items() if name.startswith(begin)}
            between.load_state_dict(kept if earlier == now else {})

    def _setting(self, numbers: Sequence[int]) -> dict[str, Any]:
        return {"method": str(self._compress), "hosts": self._hosts, "numbers": list(numbers)}

    def _name(self, rank: int, number: int, name: str) -> str:
        return f"{PREFIX}/{rank}/{number}/{name}"
