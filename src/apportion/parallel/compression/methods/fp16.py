"""fp16: gradients travel between hosts as half-precision numbers: half the bytes.

Paper: Micikevicius et al., "Mixed Precision Training", ICLR 2018, for what these numbers can hold. What torch's DDP
does with ``fp16_compress_hook``; there the sum is made in half precision, and here in the gradients' own.

A gradient above 65504 becomes infinite, and one below 6e-8 becomes 0.
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
class Fp16(Compression):
    """Half-precision numbers of 5 bits of exponent and 10 of fraction."""

    passes = 2.0

    def between(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> HostSum:
        return CodedSum(Rounded(torch.float16), dtype, keeps_errors=False)

    def sent(self, numel: int, itemsize: int) -> float:
        return 2.0 * numel
