"""int8: gradients travel between hosts as whole numbers from -127 to 127, with a scale for each block: about a quarter
of the bytes of float32.

Papers: Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding", NeurIPS 2017; Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016. Rounding is to
the nearest, and what it leaves out is added to the next step's gradient (error feedback).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from apportion.comm.network.host_exchange import HostSum
from apportion.parallel.compression.coded_sum import WORD, Codec, CodedSum
from apportion.parallel.compression.compression import Compression

MOST = 127.0
"""The largest whole number of a code."""


@final
@dataclass(frozen=True, repr=False)
class Int8(Compression):
    """Whole numbers of one byte."""

    keeps_errors = True
    passes = 6.0

    block: int = 256
    """The number of gradients that have one scale: the largest of them becomes 127."""

    def __post_init__(self) -> None:
        self._must_be_whole("block", least=8)

    def between(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> HostSum:
        return CodedSum(_Blocks(self.block), dtype, keeps_errors=True)

    def sent(self, numel: int, itemsize: int) -> float:
        return numel * (1.0 + itemsize / self.block)


@final
class _Blocks(Codec):
    """The code: the scales of the blocks, and then a byte for each number."""

    def __init__(self, block: int) -> None:
        self._block = block

    def nbytes(self, numel: int, itemsize: int) -> int:
        return self._scale_bytes(numel, itemsize) + numel

    def _scale_bytes(self, numel: int, itemsize: int) -> int:
        return -(-numel // self._block) * max(itemsize, WORD // 2)

    def encode(self, numbers: Tensor, code: Tensor) -> None:
        for part, scales, whole in self._parts(numbers, code):
            torch.amax(part.abs(), 1, out=scales)
            scales.div_(MOST)
            # A block of zeros has the scale 0, and its numbers stay 0.
            whole.copy_(part.div(scales.masked_fill(scales == 0.0, 1.0).unsqueeze(1)).round_())

    def add(self, code: Tensor, numbers: Tensor, *, times: float = 1.0) -> None:
        for part, scales, whole in self._parts(numbers, code):
            part.addcmul_(whole.to(part.dtype), scales.unsqueeze(1), value=times)

    def _parts(self, numbers: Tensor, code: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns the (blocks, scales, whole numbers) of all full blocks, and of a last one that is shorter."""
        count, block = numbers.numel(), self._block
        head = self._scale_bytes(count, numbers.element_size())
        scales = code[:head].view(numbers.dtype)
        whole = code[head : head + count].view(torch.int8)
        full = count // block
        parts = [(numbers[: full * block].view(full, block), scales[:full], whole[: full * block].view(full, block))]
        if full * block < count:
            parts.append((numbers[full * block :][None], scales[full:], whole[full * block :][None]))
        return [part for part in parts if part[0].numel()]
