"""Operators that compute over whole axes: sums, softmax, normalisation, sorting. They keep rows apart where the axis of
the rows is not among those."""

from __future__ import annotations

from collections.abc import Sequence

from apportion.serving.row_independence.elementwise_rules import Rule, elementwise
from apportion.serving.row_independence.graph_node import GraphNode, RowAxis, Rows, RowsMixed, joined


def _apart(node: GraphNode, axes: Sequence[int]) -> RowAxis:
    """Return the rows of the first input, which must not be on these axes."""
    rows = node.rows(0)
    if rows is None:
        raise RowsMixed("has rows in another input than the first")
    if rows.axis in axes:
        raise RowsMixed("computes over all rows")
    return rows


def _reduce(node: GraphNode) -> Sequence[Rows]:
    rank = node.rank(0)
    given = node.attribute("axes") or node.integers(1) or []
    if not given and node.attribute("noop_with_empty_axes", 0):
        return elementwise(node)
    return [_reduced(node, {int(axis) % rank for axis in given} or {*range(rank)})]


def _arg_reduce(node: GraphNode) -> Sequence[Rows]:
    return [_reduced(node, {node.axis(0, node.rank(0))})]


def _reduced(node: GraphNode, axes: set[int]) -> RowAxis:
    rows = _apart(node, sorted(axes))
    keeps = bool(node.attribute("keepdims", 1))
    return rows if keeps else rows.at(rows.axis - sum(axis < rows.axis for axis in axes))


def _softmax(node: GraphNode) -> Sequence[Rows]:
    rank = node.rank(0)
    if node.version < 13:  # the dimensions from the axis on are one
        return [_apart(node, range(node.axis(1, rank), rank))]
    return [_apart(node, [node.axis(-1, rank)])]


def _over_one_axis(node: GraphNode) -> Sequence[Rows]:
    return [_apart(node, [node.axis(-1, node.rank(0))])]


def _over_last_axes(node: GraphNode) -> Sequence[Rows]:
    """LayerNormalization and RMSNormalization: over the axis and all that follow."""
    rank = node.rank(0)
    node.must_be_fixed(*range(1, len(node.inputs)))
    return [_apart(node, range(node.axis(-1, rank), rank))] * len(node.output_shapes)


def _skip_layer_norm(node: GraphNode) -> Sequence[Rows]:
    node.must_be_fixed(*range(2, len(node.inputs)))
    found = [rows.at(rows.axis + node.rank(0) - node.rank(at)) for at in (0, 1) if (rows := node.rows(at)) is not None]
    rows = joined(found)
    if rows.axis == node.rank(0) - 1:
        raise RowsMixed("computes over all rows")
    return [rows] * len(node.output_shapes)


def _group_norm(node: GraphNode) -> Sequence[Rows]:
    node.must_be_fixed(*range(1, len(node.inputs)))
    return [_apart(node, range(1, node.rank(0)))]


def _batch_norm(node: GraphNode) -> Sequence[Rows]:
    if node.attribute("training_mode", 0) or len(node.output_shapes) > 1:
        raise RowsMixed("computes with the mean and variance of all rows (training mode)")
    node.must_be_fixed(*range(1, len(node.inputs)))
    return [_apart(node, [1])]


def _mean_variance(node: GraphNode) -> Sequence[Rows]:
    rank = node.rank(0)
    return [_apart(node, [int(axis) % rank for axis in node.attribute("axes", [0, 2, 3])])]


def _cumulative(node: GraphNode) -> Sequence[Rows]:
    axes = node.integers(1)
    assert axes is not None
    return [_apart(node, [axis % node.rank(0) for axis in axes])]


def _top_k(node: GraphNode) -> Sequence[Rows]:
    node.must_be_fixed(1)
    return [_apart(node, [node.axis(-1, node.rank(0))])] * 2


def _last_two(node: GraphNode) -> Sequence[Rows]:
    """Matrices in the last two dimensions."""
    node.must_be_fixed(*range(1, len(node.inputs)))
    rank = node.rank(0)
    return [_apart(node, [rank - 2, rank - 1])]


def _local_response(node: GraphNode) -> Sequence[Rows]:
    return [_apart(node, range(1, node.rank(0)))]


_REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]

RULES: dict[str, Rule] = {
    **{f"Reduce{name}": _reduce for name in _REDUCTIONS},
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg_reduce),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _over_last_axes),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip_layer_norm),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization"), _group_norm),
    **dict.fromkeys(("Trilu", "Det", "Inverse"), _last_two),
    "LpNormalization": _over_one_axis,
    "BatchNormalization": _batch_norm,
    "MeanVarianceNormalization": _mean_variance,
    "CumSum": _cumulative,
    "TopK": _top_k,
    "LRN": _local_response,
}
