"""The interface of a compression: a value of a strategy, which makes the sums that send less between hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from apportion.comm.network.host_exchange import HostSum
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
        """Return about how many bytes stand for so many numbers of so many bytes each, in one message."""

    def sent_bytes(self, nbytes: float) -> float:
        """Return about how many bytes stand for so many bytes of float32."""
        return self.sent(max(1, int(nbytes // 4)), 4)


def compression(given: Compression | str | None) -> Compression | None:
    """Return the compression that is given as such, or as its written form: ``"int8(block=128)"``."""
    found = parse(given, METHODS) if isinstance(given, str) else given
    if found is not None and not isinstance(found, Compression):
        raise ValueError(f'compress={given!r} must be a compression, such as "fp16", "int8" or "power_sgd(rank=4)"')
    return found
