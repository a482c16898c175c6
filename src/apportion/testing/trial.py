"""The description of a trial: a step and its arguments, the rows that each rank is given in each step (contiguous parts
of contiguous global batches), and the place of each process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from apportion.core.torch_private import pytree
from apportion.core.tree import map_tensors, tensors


@dataclass(frozen=True)
class Division:
    """``parts``: the rows of each group of ranks in every global batch. ``group``: the number of consecutive ranks that
    are given the same rows: 1 in data parallelism, all of them in tensor parallelism."""

    parts: tuple[int, ...]
    group: int

    @property
    def batch_size(self) -> int:
        """The rows of a global batch."""
        return sum(self.parts)

    def batch(self, rows: Any, step: int) -> Any:
        """Returns the rows of all ranks in a step, counted from 0."""
        first = step * self.batch_size
        return _cut(rows, first, first + self.batch_size)

    def part(self, rows: Any, step: int, rank: int) -> Any:
        """Returns the rows of one rank in a step, counted from 0."""
        place = rank // self.group
        first = step * self.batch_size + sum(self.parts[:place])
        return _cut(rows, first, first + self.parts[place])


def _cut(rows: Any, first: int, end: int) -> Any:
    return map_tensors(lambda tensor: tensor[first:end] if tensor.ndim else tensor, rows)


def divided(rows: Any, ranks: int, steps: int, shared: bool | int, parts: Sequence[int] | None) -> Division:
    """Returns the division of ``rows`` over steps and ranks. Raises ValueError where the rows, their number or the
    other arguments do not fit each other."""
    group = _group(shared, ranks)
    groups = ranks // group
    count = count_rows(rows)
    if parts is not None:
        chosen = _checked(parts, groups)
        if count != steps * sum(chosen):
            raise ValueError(
                f"rows have {count} examples, and steps={steps} global batches of parts={chosen} take "
                f"{steps * sum(chosen)}: give that many rows, or change steps or parts"
            )
        return Division(chosen, group)
    if count % (steps * groups):
        whole = count // (steps * groups)
        fitting = [number * steps * groups for number in (whole, whole + 1) if number]
        raise ValueError(
            f"rows have {count} examples, which are not divisible into steps={steps} global batches with equal parts "
            f"for {groups} {'groups of ranks' if group > 1 else 'ranks'}: give a multiple of {steps * groups}, such as "
            f"{' or '.join(map(str, fitting))}, or the rows of each rank in a batch, as "
            "parts=(3, 5)"
        )
    return Division((count // (steps * groups),) * groups, group)


def _group(shared: bool | int, ranks: int) -> int:
    if isinstance(shared, bool):
        return ranks if shared else 1
    if not isinstance(shared, int) or shared < 1 or ranks % shared:
        raise ValueError(
            f"shared={shared!r}: it is True where all ranks are given the same rows, or the number of consecutive "
            f"ranks that are, which divides ranks={ranks}"
        )
    return shared


def _checked(parts: Sequence[int], groups: int) -> tuple[int, ...]:
    chosen = tuple(parts) if isinstance(parts, Iterable) else ()
    if len(chosen) != groups or not all(type(part) is int and part > 0 for part in chosen):
        raise ValueError(
            f"parts={parts!r}: it has the rows of each {'rank' if groups > 1 else 'group of ranks'} in a global batch, "
            f"here {groups} positive integers"
        )
    return chosen


def count_rows(rows: Any) -> int:
    """Returns the number of examples of a tree of tensors, the size of dimension 0. Raises ValueError where the tensors
    do not agree on it, or there are none."""
    _refuse_other_leaves(rows)
    found = [tensor for tensor in tensors(rows) if tensor.ndim]
    if not found:
        raise ValueError(
            f"rows={_briefly(rows)} have no tensor with examples in dimension 0: give a tensor, or a tuple, list or "
            "dict of tensors"
        )
    lengths = [len(tensor) for tensor in found]
    if len(set(lengths)) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in found)
        raise ValueError(
            f"the tensors of rows have different numbers of examples in dimension 0 (shapes {shapes}): each tensor has "
            "one entry for each example, and what all examples share belongs into step"
        )
    if not lengths[0]:
        raise ValueError("rows have no examples: their tensors have size 0 in dimension 0; give at least one a rank")
    return lengths[0]


def _refuse_other_leaves(rows: Any) -> None:
    for leaf in pytree.tree_leaves(rows, is_leaf=lambda value: isinstance(value, PackedSequence | Mapping)):
        if isinstance(leaf, Mapping):
            for value in leaf.values():
                _refuse_other_leaves(value)
        elif isinstance(leaf, np.ndarray):
            raise ValueError(
                f"rows have an array of numpy of shape {leaf.shape}: rows are tensors; convert it by torch.from_numpy"
            )
        elif isinstance(leaf, PackedSequence):
            raise ValueError(
                "rows have a PackedSequence, whose dimension 0 is not the example: give padded sequences and their "
                "lengths, and pack them in step"
            )


def _briefly(rows: Any) -> str:
    if isinstance(rows, Tensor):
        return f"a tensor of shape {tuple(rows.shape)}"
    text = repr(rows)
    return text if len(text) <= 60 else f"{text[:57]}..."


Step = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class StepTrial:
    """The arguments of ``assert_same_network`` that the ranks need, under the same names."""

    step: Step
    model: nn.Module | Callable[[], nn.Module]
    wrap: Callable[[nn.Module], Any] | None
    optimizer: Callable[[Any], Any] | None
    reference: Step | None
    rows: Any
    steps: int
    division: Division


@dataclass(frozen=True)
class RankPlace:
    """One process of a pass. ``folder``: where its pass leaves records and outputs. ``source``: the folder whose files
    count as the user's. ``weights``: the file of the weights that the network is set to; None leaves its own.
    ``alone``: that it is the reference, and not a rank. ``wait``: seconds for each collective."""

    rank: int
    ranks: int
    folder: str
    source: str
    backend: str
    wait: float
    alone: bool = False
    weights: str | None = None
