"""A node of a graph as the rules see it: its attributes, the shapes and values of its tensors, and where their rows
are.

Where the rows of a batch lie in a tensor of a graph.

Rows are dimension 0 of every input. On the way to the outputs they move: a transposition takes them to another axis,
and a reshaping joins them with other dimensions. An axis that holds n rows has ``outer * n * inner`` elements, of which
element ``(i * n + row) * inner + j`` belongs to ``row``::

    [n, heads, length, width]  --reshape-->  [n * heads, length, width]       axis 0, outer 1, inner = heads
    [length, n, width]         --reshape-->  [length * n, width]              axis 0, outer = length, inner 1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class RowsMixed(ValueError):
    """An output of a node depends on several rows, or it could not be shown that it does not."""


@dataclass(frozen=True)
class RowAxis:
    """The axis of a tensor that holds the rows. ``layouts``: the (outer, inner) that are possible, one of them for a
    tensor that is computed from the inputs; a tensor that is the same in every row may have several."""

    axis: int
    layouts: frozenset[tuple[int, int]] = frozenset({(1, 1)})
    numbered: bool = False
    """Whether the first number in the last dimension is that of the row itself, as in an index of (row, column)."""

    def at(self, axis: int) -> RowAxis:
        """Return the same rows at another axis."""
        return RowAxis(axis, self.layouts)


def joined(found: Sequence[RowAxis]) -> RowAxis:
    """Return the rows of what is computed element by element from tensors with these rows. Raises RowsMixed where row n
    of one meets another row of the other."""
    first = found[0]
    # Only layouts in which both tensors have row n at the same elements survive: with any other one an element would be
    # combined with that of another row.
    layouts = frozenset.intersection(*(rows.layouts for rows in found))
    if any(rows.axis != first.axis for rows in found) or not layouts:
        raise RowsMixed("puts each row beside other rows")
    return RowAxis(first.axis, layouts)


def reshaped(rows: RowAxis, before: Sequence[int], shapes: Sequence[tuple[int, ...]], counts: Sequence[int]) -> RowAxis:
    """Return the rows after a change of shape that keeps the order of the elements. ``before``: the old shape and
    ``shapes``: the new ones, the first of both with the first number of rows of ``counts``."""
    grown = [at for at, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    if len(grown) != 1 or len({len(shape) for shape in shapes}) > 1:
        raise RowsMixed("joins rows with other dimensions")
    axis, shape, found = grown[0], shapes[0], set()
    for outer, inner in rows.layouts:
        # In units of single elements: the dimensions before and after the axis are taken into outer and inner, and
        # divided out again by those of the new shape. A remainder means that rows are split across dimensions.
        outer *= math.prod(before[: rows.axis])
        inner *= math.prod(before[rows.axis + 1 :])
        left, right = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        if left and right and outer % left == 0 and inner % right == 0:
            found.add((outer // left, inner // right))
    return sized(RowAxis(axis, frozenset(found)), shapes, counts)


def sized(rows: RowAxis, shapes: Sequence[tuple[int, ...]], counts: Sequence[int]) -> RowAxis:
    """Return the rows with the layouts that fit the tensor's shape at each number of rows. Raises RowsMixed where none
    does, or another dimension grows with the rows."""
    layouts = frozenset(
        (outer, inner)
        for outer, inner in rows.layouts
        if all(rows.axis < len(s) and s[rows.axis] == outer * n * inner for s, n in zip(shapes, counts, strict=True))
    )
    rest = {(*shape[: rows.axis], *shape[rows.axis + 1 :]) for shape in shapes}
    if not layouts or len(rest) > 1:
        raise RowsMixed("has an output whose rows are not those of its inputs")
    return RowAxis(rows.axis, layouts, rows.numbered)


COUNTS = (2, 3)
"""The numbers of rows at which the shapes of all tensors are found."""


class Content(Enum):
    """What a tensor depends on that has no axis of rows."""

    FIXED = "neither the rows nor their number"
    COUNTED = "the number of rows"
    NUMBERS = "the number of rows: the numbers of the rows themselves, from 0 on, in dimension 0"
    UNCLEAR = "the number of rows, in a way that is not known for all numbers"


Rows = RowAxis | Content


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph. ``shapes`` and ``values`` are at each of ``COUNTS``; values are known where they do not
    depend on what the rows hold."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    rows: Rows
    values: tuple[NDArray[Any], ...] | None = None


@dataclass(frozen=True)
class GraphNode:
    """A node. ``version``: of the operators of its domain. An optional input or output that is left out is None."""

    op: str
    name: str
    version: int
    inputs: Sequence[Tensor | None]
    output_shapes: Sequence[tuple[tuple[int, ...], ...] | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def has(self, at: int) -> bool:
        """Return whether the input is given."""
        return at < len(self.inputs) and self.inputs[at] is not None

    def tensor(self, at: int) -> Tensor:
        """Return an input."""
        if not self.has(at):
            raise RowsMixed(f"has no input {at}")
        tensor = self.inputs[at]
        assert tensor is not None
        return tensor

    def shape(self, at: int) -> tuple[int, ...]:
        """Return the shape of an input at the first number of rows."""
        return self.tensor(at).shapes[0]

    def rank(self, at: int) -> int:
        """Return the number of dimensions of an input."""
        return len(self.shape(at))

    def out_shape(self, at: int = 0) -> tuple[int, ...]:
        """Return the shape of an output at the first number of rows."""
        shapes = self.output_shapes[at]
        assert shapes is not None
        return shapes[0]

    def rows(self, at: int) -> RowAxis | None:
        """Return where the rows of an input are; None where it has none. Raises RowsMixed where it depends on their
        number, with which no row may be computed."""
        if not self.has(at):
            return None
        rows = self.tensor(at).rows
        if rows in (Content.COUNTED, Content.NUMBERS, Content.UNCLEAR):
            raise RowsMixed(f"computes with {self.tensor(at).name!r}, which depends on the number of rows")
        return rows if isinstance(rows, RowAxis) else None

    def must_be_fixed(self, *places: int) -> None:
        """Raise RowsMixed where one of these inputs has rows."""
        for at in places:
            if self.rows(at) is not None:
                raise RowsMixed(f"has rows in its input {self.tensor(at).name!r}")

    def integers(self, at: int) -> list[int] | None:
        """Return the numbers in an input that is the same whatever the rows are; None where it is not given."""
        if not self.has(at):
            return None
        tensor = self.tensor(at)
        if tensor.values is None or tensor.rows is not Content.FIXED:
            raise RowsMixed(f"takes {tensor.name!r}, which is not always the same, as a size or an axis")
        return [int(n) for n in np.asarray(tensor.values[0]).reshape(-1)]

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def axis(self, default: int, rank: int, name: str = "axis") -> int:
        """Return an attribute that counts dimensions, from 0 on."""
        return int(self.attribute(name, default)) % max(rank, 1)
