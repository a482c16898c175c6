"""power_sgd: the gradient of each matrix travels between hosts as the product of two thin ones.

Paper: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019.

::

    gradient M, of n x m       P = M Q, summed over the hosts       orthonormal columns       n x r numbers
                               Q = M' P, summed over the hosts                                m x r numbers
                               sum of M ~ P Q'

One step of power iteration a step, from the last step's Q. What a host's P Q' leaves out of its M is added to the next
step's (error feedback). Gradients that are no matrices, and matrices that would not get smaller, travel as they are. A
convolution's weight is a matrix of its output channels.

A matrix of 1024 x 1024 sends 1/256 of its bytes with rank 2. The sum of the products is the product of sums, so that
more hosts cost no more bytes than two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from apportion.comm.network.host_exchange import HostExchange, HostSum
from apportion.parallel.compression.compression import Compression

SEED = 0
"""The seed of the first Q, which all hosts draw alike."""


@final
@dataclass(frozen=True, repr=False)
class PowerSgd(Compression):
    """Products of matrices of a low rank."""

    keeps_errors = True
    passes = 5.0

    rank: int = 2
    """The number of columns of P and Q: more of them send more, and leave out less."""
    min_compression_rate: float = 1.0
    """A matrix travels as it is unless P and Q are smaller by more than this factor, as in torch's PowerSGDState."""

    def __post_init__(self) -> None:
        self._must_be_whole("rank")
        if not 1.0 <= self.min_compression_rate < math.inf:
            raise ValueError(
                f"min_compression_rate={self.min_compression_rate!r} must be a number of at least 1: 2 leaves whole "
                "what P and Q would not make half as small"
            )

    def between(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> HostSum:
        return _FactorSum(shapes, dtype, self.rank, self.min_compression_rate)

    def sent(self, numel: int, itemsize: int) -> float:
        side = math.sqrt(numel)  # as if it were square: what a price knows is the size
        factors = 2.0 * side * self.rank
        return itemsize * (factors if factors * self.min_compression_rate < numel else float(numel))


@final
class _FactorSum(HostSum):
    """The sum of tensors of these shapes that lie one after the other."""

    same_on_host = True

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, rank: int, rate: float) -> None:
        self._shapes, self._dtype, self._rank = [_matrix(shape, rank, rate) for shape in shapes], dtype, rank
        self._sizes = [shape.numel() for shape in shapes]
        self._factors: list[Tensor] = []
        """Q' of each matrix, after the last step."""
        self._errors: list[Tensor] = []
        """What has been left out of each matrix so far."""
        self._reset()

    def __call__(self, flat: Tensor, hosts: HostExchange) -> None:
        parts = flat.split(self._sizes)
        matrices = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True) if shape is not None]
        plain = [part for part, shape in zip(parts, self._shapes, strict=True) if shape is None]
        for matrix, left in zip(matrices, self._errors, strict=True):
            matrix.add_(left)
        # As rows, which a matrix is multiplied with several times as fast.
        columns = [factor @ matrix.t() for matrix, factor in zip(matrices, self._factors, strict=True)]
        _add_up([*columns, *plain], hosts)
        columns = [torch.linalg.qr(column.t()).Q for column in columns]
        rows = [column.t().contiguous() @ matrix for column, matrix in zip(columns, matrices, strict=True)]
        for matrix, column, row, left in zip(matrices, columns, rows, self._errors, strict=True):
            torch.addmm(matrix, column, row, alpha=-1.0, out=left)
        _add_up(rows, hosts)
        for matrix, column, row in zip(matrices, columns, rows, strict=True):
            torch.mm(column, row, out=matrix)
        self._factors = rows
        # A gradient that is not finite shows in the sum, and is over with it.
        if not all(math.isfinite(tensor.sum().item()) for tensor in (*rows, *self._errors)):
            self._reset()

    def state_dict(self) -> dict[str, Tensor]:
        names = ("factors", self._factors), ("errors", self._errors)
        none = torch.empty(0, dtype=self._dtype)
        return {name: torch.cat([none, *(tensor.reshape(-1) for tensor in tensors)]) for name, tensors in names}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._reset()
        for name, tensors in (("factors", self._factors), ("errors", self._errors)):
            parts = state[name].split([tensor.numel() for tensor in tensors]) if name in state else tensors
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _reset(self) -> None:
        """Draws the first factors, and has nothing left out yet."""
        generator = torch.Generator().manual_seed(SEED)
        shapes = [shape for shape in self._shapes if shape is not None]
        self._factors = [
            torch.randn(self._rank, m, generator=generator, dtype=torch.float64).to(self._dtype) for _, m in shapes
        ]
        self._errors = [torch.zeros(shape, dtype=self._dtype) for shape in shapes]


def _matrix(shape: torch.Size, rank: int, rate: float) -> tuple[int, int] | None:
    """Returns the rows and columns of a tensor as a matrix; None where its factors would not be smaller by more than
    this factor."""
    if len(shape) < 2:
        return None
    n, m = shape[0], shape.numel() // shape[0]
    return (n, m) if rate * rank * (n + m) < n * m else None


def _add_up(tensors: Sequence[Tensor], hosts: HostExchange) -> None:
    """Sums tensors in place over the hosts, in one message."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    hosts.add_up(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
