"""A code of numbers rounded to a shorter floating-point type."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from apportion.parallel.compression.coded_sum import Codec


@final
class Rounded(Codec):
    """Numbers of another type, such as torch.float16."""

    by_number = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def nbytes(self, numel: int, itemsize: int) -> int:
        return self._dtype.itemsize * numel

    def encode(self, numbers: Tensor, code: Tensor) -> None:
        self._numbers(code, numbers.numel()).copy_(numbers)

    def add(self, code: Tensor, numbers: Tensor, *, times: float = 1.0) -> None:
        numbers.add_(self._numbers(code, numbers.numel()), alpha=times)

    def decode(self, code: Tensor, numbers: Tensor) -> None:
        numbers.copy_(self._numbers(code, numbers.numel()))

    def _numbers(self, code: Tensor, numel: int) -> Tensor:
        return code.view(self._dtype)[:numel]
