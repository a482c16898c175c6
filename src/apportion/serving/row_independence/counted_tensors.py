"""Tensors that do not depend on what the rows hold, but may depend on how many there are.

Values are known at two numbers of rows only. They hold for every number where each element is a linear function of the
number: what is computed in another way, as ``n > 20`` is, may be the same for 2 and 3 rows and another for 30. It is
then ``Content.UNCLEAR``, and no row may be computed with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.serving.row_independence.graph_node import COUNTS, Content, GraphNode, RowAxis, Rows, Tensor
from apportion.serving.row_independence.rules import rows_after

Array = NDArray[Any]
OF_SHAPES = ("Shape", "Size")
"""The operators whose outputs depend on the shape of their input alone."""
_SIZES = {"ConstantOfShape": (0,), "Expand": (1,), "Reshape": (1,), "Tile": (1,)}
"""The inputs of operators that are sizes of the output; all others are what its elements are computed from."""
_ELEMENT_BY_ELEMENT = (
    "Add", "Concat", "Expand", "Identity", "Neg", "Reshape", "Squeeze", "Sub", "Transpose", "Unsqueeze",
)  # fmt: skip
"""The operators of which each output is a linear function of numbers that are linear functions themselves."""
_SELECTING = ("Gather", "Slice", "Split")


def content(node: GraphNode, at: int, values: Sequence[Array]) -> Rows:
    """Return what an output of a node depends on. ``node``: a node none of whose inputs depends on what the rows hold,
    except for those of which it takes the shape. ``values``: those of the output at each of ``COUNTS``."""
    given = [tensor for tensor in node.inputs if tensor is not None]
    if any(tensor.rows is Content.UNCLEAR for tensor in given):
        return Content.UNCLEAR
    if all(tensor.rows is Content.FIXED for tensor in given):
        return Content.FIXED
    sizes = _SIZES.get(node.op, ())
    data = [x for place, x in enumerate(node.inputs) if x is not None and place not in sizes]
    if node.op in OF_SHAPES:
        known = node.op == "Shape" or _growing(given[0].shapes) <= 1
    elif any(isinstance(tensor.rows, RowAxis) for tensor in data):
        known = _keeps_rows_apart(node, at)
    else:
        known = all(tensor.rows is Content.FIXED for tensor in data) or _is_linear(node, data, values)
    if not known:
        return Content.UNCLEAR
    shapes = [value.shape for value in values]
    if shapes[0] == shapes[1] and np.array_equal(values[0], values[1]):
        return Content.FIXED
    return _repeated(shapes, values) or (Content.NUMBERS if _are_numbers(values) else Content.COUNTED)


def _keeps_rows_apart(node: GraphNode, at: int) -> bool:
    """Return whether a node computes each row of the output from the same row of tensors that repeat a row."""
    try:
        rows_after(node)[at]
    except (ValueError, AssertionError, IndexError):
        return False
    return True


def _is_linear(node: GraphNode, data: Sequence[Tensor], values: Sequence[Array]) -> bool:
    """Return whether the elements of an output are linear functions of the number of rows, where those of its inputs
    are."""
    counted = [tensor for tensor in data if tensor.rows is not Content.FIXED]
    if any(tensor.values is None for tensor in counted):
        return False
    if node.op in _ELEMENT_BY_ELEMENT:
        return True
    if node.op in _SELECTING:
        return counted == [data[0]] and not _growing(data[0].shapes)
    if node.op == "Mul":
        return len(counted) == 1
    if node.op == "Where":
        return data[0].rows is Content.FIXED
    first, last = (data[n].values if n < len(data) else None for n in (0, 1))
    if node.op == "Equal":  # of a number and -1, say
        return any(_grows(x) and y is not None and bool((y[0] < 0).all()) for x, y in ((first, last), (last, first)))
    if node.op == "Range":
        return counted == [data[1]] and _counts_up(first, last, node.tensor(2).values, values)
    return counted == [data[0]] and first is not None and _is_linear_in_one(node, first, last, values)


def _is_linear_in_one(
    node: GraphNode, counted: Sequence[Array], fixed: Sequence[Array] | None, values: Sequence[Array]
) -> bool:
    """Return the same of an operator whose first input alone depends on the number of rows."""
    if node.op in ("Cast", "Abs"):
        return _grows(counted) and all(np.array_equal(x, y) for x, y in zip(counted, values, strict=True))
    if node.op == "Div":  # without a remainder
        return fixed is not None and all(
            np.array_equal(x * y, z) for x, y, z in zip(values, fixed, counted, strict=True)
        )
    if node.op == "ReduceProd":
        return counted[0].shape == counted[1].shape and int(np.sum(counted[0] != counted[1])) <= 1
    return False


def _counts_up(
    begin: Sequence[Array] | None,
    end: Sequence[Array] | None,
    step: Sequence[Array] | None,
    values: Sequence[Array],
) -> bool:
    """Return whether a range goes up by one to an end that does not fall with the number of rows."""
    if begin is None or end is None or step is None or int(step[0]) != 1:
        return False
    return _grows(end) and all(len(v) == b - a for v, a, b in zip(values, begin, end, strict=True))


def _growing(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the number of dimensions that depend on the number of rows."""
    return sum(a != b for a, b in zip(*shapes, strict=True))


def _grows(values: Sequence[Array] | None) -> bool:
    """Return whether numbers are none below zero, and none that falls with the number of rows."""
    if values is None:
        return False
    if values[0].shape != values[1].shape:  # the numbers of the rows
        return all(bool((value >= 0).all()) for value in values)
    return bool((values[0] >= 0).all() and (values[1] >= values[0]).all())


def _are_numbers(values: Sequence[Array]) -> bool:
    """Return whether a tensor is a column of 0, 1, 2, ... up to the number of rows."""
    columns = [np.arange(count).reshape(-1, 1) for count in COUNTS]
    return all(np.array_equal(value, column) for value, column in zip(values, columns, strict=True))


def _repeated(shapes: Sequence[tuple[int, ...]], values: Sequence[Array]) -> RowAxis | None:
    """Return the axis along which a tensor repeats the same elements for every row, with all layouts that fit."""
    if len(shapes[0]) != len(shapes[1]):
        return None
    grown = [at for at, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    if len(grown) != 1:
        return None
    axis = grown[0]
    sizes = [shape[axis] for shape in shapes]
    if sizes[0] % COUNTS[0] or sizes[0] // COUNTS[0] * COUNTS[1] != sizes[1]:
        return None
    each, layouts = sizes[0] // COUNTS[0], set()
    for outer in [n for n in range(1, each + 1) if each % n == 0]:
        cut = []
        for count, value in zip(COUNTS, values, strict=True):
            moved = np.moveaxis(value, axis, 0).reshape(outer, count, each // outer, -1)
            cut += [moved[:, row] for row in range(count)]
        if all(np.array_equal(cut[0], other) for other in cut[1:]):
            layouts.add((outer, each // outer))
    return RowAxis(axis, frozenset(layouts)) if layouts else None
