"""bf16: gradients travel between hosts as numbers of the exponent of float32 and 7 bits of fraction: half the bytes.

Paper: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019. What torch's DDP does with
``bf16_compress_hook``; there the sum is made in these numbers, and here in the gradients' own.

Nothing overflows that float32 can hold, and each number is rounded to 1 part in 256: use fp16 where gradients are
between 6e-5 and 65504, as most are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from apportion.comm.network.host_exchange import HostSum
from apportion.parallel.compression.coded_sum import CodedSum, Rounded
from apportion.parallel.compression.compression import Compression


@final
@dataclass(frozen=True, repr=False)
class Bf16(Compression):
    """Numbers of 8 bits of exponent and 7 of fraction."""

    passes = 2.0

    def between(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> HostSum:
        return CodedSum(Rounded(torch.bfloat16), dtype, keeps_errors=False)

    def sent(self, numel: int, itemsize: int) -> float:
        return 2.0 * numel
