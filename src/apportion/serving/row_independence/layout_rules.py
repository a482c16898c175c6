"""Operators that move elements: transpositions, changes of shape, slices, lookups."""

from __future__ import annotations

from collections.abc import Sequence

from apportion.serving.row_independence.elementwise_rules import Rule
from apportion.serving.row_independence.graph_node import (
    COUNTS,
    Content,
    GraphNode,
    RowAxis,
    Rows,
    RowsMixed,
    joined,
    reshaped,
)

ALL = 2**31 - 1
"""The least end of a slice that is beyond all numbers of rows."""


def _first(node: GraphNode) -> RowAxis:
    rows = node.rows(0)
    if rows is None:
        raise RowsMixed("has rows in another input than the first")
    return rows


def _transpose(node: GraphNode) -> Sequence[Rows]:
    rank = node.rank(0)
    order = node.attribute("perm") or [*reversed(range(rank))]
    rows = _first(node)
    return [rows.at([*order].index(rows.axis))]


def _reshape(node: GraphNode) -> Sequence[Rows]:
    """Reshape, Flatten, Squeeze, Unsqueeze: the order of the elements stays. The new shape may be computed from the
    number of rows."""
    shapes = node.output_shapes[0]
    assert shapes is not None
    return [reshaped(_first(node), node.shape(0), shapes, COUNTS)]


def _concat(node: GraphNode) -> Sequence[Rows]:
    axis = node.axis(0, node.rank(0))
    numbered = node.tensor(0).rows is Content.NUMBERS and axis == 1
    found = [node.rows(at) for at in range(int(numbered), len(node.inputs))]
    rows = [one for one in found if one is not None]
    if len(rows) < len(found) or any(one.axis == axis for one in rows):
        raise RowsMixed("puts rows behind other rows")
    whole = joined(rows)
    return [RowAxis(whole.axis, whole.layouts, numbered and whole.axis == 0)]


def _split(node: GraphNode) -> Sequence[Rows]:
    rows = _first(node)
    if node.axis(0, node.rank(0)) == rows.axis:
        raise RowsMixed("divides the rows")
    if node.has(1):
        node.integers(1)
    return [rows] * len(node.output_shapes)


def _slice(node: GraphNode) -> Sequence[Rows]:
    rows, rank = _first(node), node.rank(0)
    if node.has(1):
        starts = node.tensor(1)
        given = node.integers(3)
        axes = given if given is not None else [*range(starts.shapes[0][0])]
    else:
        axes = list(node.attribute("axes") or range(len(node.attribute("starts"))))
    axes = [axis % rank for axis in axes]
    if rows.axis not in axes:
        if node.has(1):
            node.integers(1), node.integers(2), node.integers(4)
        return [rows]
    # All rows may be taken, in their order: the end then grows with their number, or is very large.
    at = axes.index(rows.axis)
    if node.has(1):
        begin, end, step = (node.tensor(n).values if node.has(n) else None for n in (1, 2, 4))
        if begin is None or end is None:
            raise RowsMixed("takes some of the rows")
        whole = all(
            int(begin[turn][at]) == 0
            and int(end[turn][at]) >= node.tensor(0).shapes[turn][rows.axis]
            and (step is None or int(step[turn][at]) == 1)
            for turn in range(len(COUNTS))
        ) and (int(end[1][at]) > int(end[0][at]) or int(end[0][at]) >= ALL)
    else:
        whole = node.attribute("starts")[at] == 0 and node.attribute("ends")[at] >= ALL
    if not whole or len(axes) > 1:
        raise RowsMixed("takes some of the rows")
    return [rows]


def _gather(node: GraphNode) -> Sequence[Rows]:
    data, indices = node.rows(0), node.rows(1)
    axis = node.axis(0, node.rank(0))
    if data is None and indices is not None:  # a table, and numbers that say what is looked up
        return [indices.at(axis + indices.axis)]
    if data is None or indices is not None:
        raise RowsMixed("looks rows up by rows")
    if data.axis == axis:
        raise RowsMixed("takes some of the rows")
    return [data if data.axis < axis else data.at(data.axis - 1 + node.rank(1))]


def _gather_elements(node: GraphNode) -> Sequence[Rows]:
    """GatherElements and ScatterElements: the index counts along one axis only."""
    found = [node.rows(at) for at in range(len(node.inputs))]
    rows = [one for one in found if one is not None]
    if len(rows) < len(found) or any(one.axis == node.axis(0, node.rank(0)) for one in rows):
        raise RowsMixed("looks rows up by rows")
    return [joined(rows)]


def _gather_nd(node: GraphNode) -> Sequence[Rows]:
    data, indices, batch = node.rows(0), node.rows(1), int(node.attribute("batch_dims", 0))
    if data is None and indices is not None and indices.axis < node.rank(1) - 1 and indices.axis >= batch:
        return [indices]
    own = data is not None and data.axis == 0 and (1, 1) in data.layouts
    if own and indices is not None and indices.numbered and (1, 1) in indices.layouts and not batch:
        return [RowAxis(0)]  # each index begins with the number of its row: it looks up in that row
    if data is not None and indices is not None and data.axis < batch:
        return [joined([data, indices])]
    raise RowsMixed("looks rows up by rows")


def _expand(node: GraphNode) -> Sequence[Rows]:
    rows = _first(node)
    return [rows.at(rows.axis + len(node.out_shape()) - node.rank(0))]


def _tile(node: GraphNode) -> Sequence[Rows]:
    rows = _first(node)
    repeats = node.integers(1)
    assert repeats is not None
    times = repeats[rows.axis]
    return [RowAxis(rows.axis, frozenset((times * outer, inner) for outer, inner in rows.layouts))]


def _pad(node: GraphNode) -> Sequence[Rows]:
    rows, rank = _first(node), node.rank(0)
    pads = node.attribute("pads") or node.integers(1)
    axes = node.integers(3)
    axes = [*range(rank)] if axes is None else [axis % rank for axis in axes]
    if pads is None:
        raise RowsMixed("is padded by what is not known")
    node.must_be_fixed(2)
    for at, axis in enumerate(axes):
        if axis == rows.axis and (pads[at] or pads[at + len(axes)]):
            raise RowsMixed("adds rows")
    return [rows]


def _one_hot(node: GraphNode) -> Sequence[Rows]:
    node.must_be_fixed(1, 2)
    rows = _first(node)
    axis = node.axis(-1, node.rank(0) + 1)
    return [rows if rows.axis < axis else rows.at(rows.axis + 1)]


def _reverse_sequence(node: GraphNode) -> Sequence[Rows]:
    rows, lengths = _first(node), node.rows(1)
    if rows.axis != int(node.attribute("batch_axis", 1)) or (lengths is not None and lengths.axis != 0):
        raise RowsMixed("reverses the rows")
    if lengths is not None:
        joined([rows.at(0), lengths])
    return [rows]


def _whole_batch(node: GraphNode) -> Sequence[Rows]:
    """Image operators that compute each element of dimension 0 by itself."""
    rows = _first(node)
    if rows.axis != 0:
        raise RowsMixed("computes over all rows")
    return [rows]


def _resize(node: GraphNode) -> Sequence[Rows]:
    if node.attribute("coordinate_transformation_mode") == b"tf_crop_and_resize":
        raise RowsMixed("cuts regions out")
    rows = _whole_batch(node)
    if node.has(1) and node.op == "Resize" and node.version < 11:
        node.must_be_fixed(1)
    if node.out_shape()[0] != node.shape(0)[0]:
        raise RowsMixed("resizes the batch")
    return rows


def _grid_sample(node: GraphNode) -> Sequence[Rows]:
    found = [rows for at in (0, 1) if (rows := node.rows(at)) is not None]
    if len(found) < 2 or any(rows.axis for rows in found):
        raise RowsMixed("computes over all rows")
    return [joined(found)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
    **dict.fromkeys(("GatherElements", "ScatterElements"), _gather_elements),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _whole_batch),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Expand": _expand,
    "Tile": _tile,
    "Pad": _pad,
    "OneHot": _one_hot,
    "ReverseSequence": _reverse_sequence,
    "GridSample": _grid_sample,
}
