"""Where the rows of a batch lie in a tensor of a graph.

Rows are dimension 0 of every input. On the way to the outputs they move: a transposition takes them to another axis,
and a reshaping joins them with other dimensions. An axis that holds n rows has ``outer * n * inner`` elements, of which
element ``(i * n + row) * inner + j`` belongs to ``row``::

    [n, heads, length, width]  --reshape-->  [n * heads, length, width]       axis 0, outer 1, inner = heads
    [length, n, width]         --reshape-->  [length * n, width]              axis 0, outer = length, inner 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
