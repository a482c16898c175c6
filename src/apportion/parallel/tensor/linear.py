"""Linear layers cut by outputs (columns) or by inputs (rows), and dropout on a slice.

::

    rank 0   x --- half of the columns --- f(.) --- half of the rows \\
                                                                       sum --- y
    rank 1   x --- half of the columns --- f(.) --- half of the rows /

A column slice needs the whole input and gives its own outputs; an element-wise function leaves them where they are; a
row slice needs its own inputs and gives a term of a sum. So a pair costs one sum forward, of the size of its output,
and one backward, of the size of its input (Megatron's f and g: Shoeybi et al., 2019). In place, by class: names and
hooks stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from apportion.comm.differentiable import copy_to, gather_from
from apportion.comm.group import Group
from apportion.core.rng import mix, strategy_draws
from apportion.core.torch_private import parameters_of
from apportion.parallel.ops.matmul import linear, linear_form
from apportion.parallel.tensor.slicing import Slicer, shares
from apportion.parallel.tracing.network import undisturbed


class _SumInPlace(Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, group: Group) -> Tensor:
        group.all_reduce(term).wait()
        ctx.mark_dirty(term)
        return term

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def sum_terms(term: Tensor, group: Group) -> Tensor:
    """Sum a tensor over the ranks, like ``reduce_from``, where it lies: it was just made, and nothing else uses it."""
    if group.size == 1:
        return term
    summed: Tensor = _SumInPlace.apply(term.contiguous(), group)
    return summed


def slice_columns(layer: nn.Linear, slicer: Slicer, *, gathers: bool) -> None:
    """Cut a Linear layer so that each rank computes some of the outputs; ``gathers``: all ranks then get all of
    them."""
    own = slicer.own_units(layer.out_features)
    column: Any = layer
    column.__class__, column.group, column.gathers = ColumnSlice, slicer.group, gathers
    column.linear = linear_form()
    column.sizes = [len(share) for share in shares(layer.out_features, slicer.group.size)]
    slicer.cut(layer, "weight", own, None)
    slicer.cut(layer, "bias", own)


def slice_rows(layer: nn.Linear, slicer: Slicer) -> None:
    """Cut a Linear layer so that each rank computes a term of all outputs from its own inputs, which come in slices.
    The bias is in rank 0's term."""
    row: Any = layer
    row.__class__, row.group, row.linear = RowSlice, slicer.group, linear_form()
    row.width = len(slicer.own_units(layer.in_features))
    slicer.cut(layer, "weight", None, slicer.own_units(layer.in_features))
    slicer.first_only(layer, "bias")


class ColumnSlice(nn.Linear):
    """A Linear layer cut by columns: x (..., in), whole -> this rank's outputs, or all of them."""

    group: Group
    sizes: list[int]
    gathers: bool
    linear: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(copy_to(x, self.group), self.weight, self.bias)
        return gather_from(y, self.group, -1, self.sizes) if self.gathers else y


class RowSlice(nn.Linear):
    """A Linear layer cut by rows: this rank's inputs (..., own) -> (..., out), whole: the sum over the ranks."""

    group: Group
    width: int
    linear: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.width:
            raise RuntimeError(
                f"a layer with {self.in_features} inputs holds weights of {self.width} and was given {x.shape[-1]}: "
                "the network does not compute what it computed when it was traced; use data_parallel"
            )
        bias = self.bias if self.group.rank == 0 else None
        return sum_terms(self.linear(x, self.weight, bias), self.group)


def slice_dropout(layer: nn.Dropout, slicer: Slicer, number: int) -> None:
    """Make a dropout layer one that is given a slice; ``number``: which of the model's dropout layers it is."""
    sliced: Any = layer
    sliced.__class__, sliced.draws = SlicedDropout, OwnDraws(slicer.group.rank, number)


class SlicedDropout(nn.Dropout):
    """A dropout with which each rank drops other units of its slice. If all ranks drew the same, unit i of every slice
    would go at once."""

    draws: OwnDraws

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return functional.dropout(x, self.p, self.training, self.inplace)
        with self.draws(x.device):
            return functional.dropout(x, self.p, self.training, self.inplace)


class OwnDraws:
    """A context in which a rank draws its own random numbers; outside of it all ranks draw the same, which is what a
    network that all ranks compute in the same way needs. The draws are a function of one number that all ranks draw:
    when a layer is computed again with the generator as it was (activation checkpointing), it has the same draws
    again."""

    def __init__(self, rank: int, number: int) -> None:
        self._rank, self._number = rank, number
        self._generator = torch.default_generator
        self._state: Tensor | None = None

    def __call__(self, device: torch.device) -> OwnDraws:
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index or 0]
        return self

    def __enter__(self) -> None:
        with strategy_draws():
            drawn = torch.randint(2**62, (), generator=self._generator, device=self._generator.device)
        self._state = self._generator.get_state()
        self._generator.manual_seed(mix(int(drawn), self._rank, self._number))

    def __exit__(self, *_: object) -> None:
        assert self._state is not None
        self._generator.set_state(self._state)


# Linear layers whose weight is stored as (inputs, outputs), as the Conv1D of GPT-2 has it: known by what they compute,
# and cut by outputs, which are gathered.


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer computes ``x @ weight + bias``, and nothing else: it is tried."""
    own = dict(layer.named_parameters())
    if type(layer).__module__.startswith("torch.nn") or set(own) not in ({"weight"}, {"weight", "bias"}):
        return False
    weight, bias = own["weight"], own.get("bias")
    plain = not any(True for _ in layer.children()) and not any(True for _ in layer.buffers())
    if not plain or weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[1:]):
        return False
    x = torch.linspace(-1.0, 1.0, 6 * len(weight), dtype=weight.dtype, device=weight.device).view(2, 3, -1)
    with undisturbed(layer):
        expected = x @ weight if bias is None else x @ weight + bias
        try:
            found = layer.forward(x)
        except Exception:  # it takes something else
            return False
    same = isinstance(found, Tensor) and found.shape == expected.shape and found.dtype == expected.dtype
    return same and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def slice_transposed(layer: nn.Module, slicer: Slicer) -> None:
    """Cut a transposed layer so that each rank computes some of the outputs, and all ranks then get all of them. In
    place, by class."""
    sliced: Any = layer
    width = sliced.weight.shape[1]
    sliced.__class__, sliced.group = TransposedSlice, slicer.group
    sliced.sizes = [len(share) for share in shares(width, slicer.group.size)]
    slicer.cut(layer, "weight", None, slicer.own_units(width))
    if "bias" in parameters_of(layer):
        slicer.cut(layer, "bias", slicer.own_units(width))


class TransposedSlice(nn.Module):
    """A transposed Linear layer cut by outputs: x (..., in), whole -> (..., out), whole."""

    group: Group
    sizes: list[int]
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = linear(copy_to(x, self.group), self.weight.t(), self._parameters.get("bias"))
        return gather_from(y, self.group, -1, self.sizes)
