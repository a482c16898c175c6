"""The rules of all operators: where the rows of a node's outputs are, by where those of its inputs are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from apportion.serving.row_independence import elementwise_rules, layout_rules
from apportion.serving.row_independence.elementwise_rules import Rule, elementwise
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

# Operators that multiply and add up: matrix products, convolutions, recurrent layers, attention.
#
# Operators of the domain ai.onnx.ml, which converters write for scikit-learn and the like: a row of numbers in, a
# label or scores out.


def _product(node: GraphNode, left: int, right: int) -> RowAxis:
    """Return the rows of a matrix product of two inputs. Axes are counted from the end, where broadcasting aligns
    them."""
    found = []
    for at, summed, other in ((left, -1, -2), (right, -2, -1)):
        rows, rank = node.rows(at), node.rank(at)
        if rows is None:
            continue
        axis = rows.axis - rank if rank > 1 else summed  # a vector is summed as a whole
        if axis == summed:
            raise RowsMixed("adds all rows up")
        if axis == other and node.has(right if at == left else left) and node.rows(right if at == left else left):
            raise RowsMixed("multiplies rows with other rows")
        found.append(rows.at(axis))
    rows = joined(found)
    axis, rank = rows.axis, len(node.out_shape())
    if axis == -2 and node.rank(right) == 1:
        axis = -1
    elif axis < -2:
        axis += (node.rank(left) == 1) + (node.rank(right) == 1)
    return rows.at(axis + rank)


def _mat_mul(node: GraphNode) -> Sequence[Rows]:
    node.must_be_fixed(2, 3)  # the zero points of MatMulInteger
    return [_product(node, 0, 1)]


def _q_linear_mat_mul(node: GraphNode) -> Sequence[Rows]:
    node.must_be_fixed(1, 2, 4, 5, 6, 7)
    return [_product(node, 0, 3)]


def _gemm(node: GraphNode) -> Sequence[Rows]:
    """alpha * A' B' + beta * C."""
    a, b, c = node.rows(0), node.rows(1), node.rows(2)
    found = []
    if a is not None:
        if a.axis != (1 if node.attribute("transA", 0) else 0):
            raise RowsMixed("adds all rows up")
        found.append(a.at(0))
    if b is not None:
        if b.axis != (0 if node.attribute("transB", 0) else 1):
            raise RowsMixed("adds all rows up")
        found.append(b.at(1))
    if c is not None:
        found.append(c.at(c.axis + 2 - node.rank(2)))
    return [joined(found)]


def _einsum(node: GraphNode) -> Sequence[Rows]:
    equation = node.attribute("equation").decode().replace(" ", "")
    terms, arrow, result = equation.partition("->")
    if not arrow or "." in equation:
        raise RowsMixed(f"computes {equation!r}, which is not read")
    found = []
    for at, labels in enumerate(terms.split(",")):
        if (rows := node.rows(at)) is None:
            continue
        label = labels[rows.axis]
        if label not in result or labels.count(label) > 1:
            raise RowsMixed("adds all rows up")
        found.append(rows.at(result.index(label)))
    return [joined(found)]


def _convolution(node: GraphNode) -> Sequence[Rows]:
    """Convolutions and pools compute each element of dimension 0 by itself."""
    node.must_be_fixed(*range(1, len(node.inputs)))
    rows = node.rows(0)
    if rows is None or rows.axis != 0:
        raise RowsMixed("computes over all rows")
    if len(node.output_shapes) > 1:
        raise RowsMixed("counts the elements of the whole batch (Indices)")
    return [rows]


def _recurrent(node: GraphNode) -> Sequence[Rows]:
    """RNN, GRU, LSTM: x is [time, row, number], or [row, time, number] with layout=1."""
    node.must_be_fixed(1, 2, 3, 7)
    first = bool(node.attribute("layout", 0))
    found = []
    for at, axis in ((0, 0 if first else 1), (4, 0), (5, 0 if first else 1), (6, 0 if first else 1)):
        if (rows := node.rows(at)) is None:
            continue
        if rows.axis != axis:
            raise RowsMixed("takes the rows as steps in time")
        found.append(rows.at(0))
    rows = joined(found)
    return [rows.at(axis) for axis in ((0, 0, 0) if first else (2, 1, 1))][: len(node.output_shapes)]


def _attention(node: GraphNode) -> Sequence[Rows]:
    """Attention of queries, keys and values with the row in dimension 0; a mask has it there too, or is the same for
    all rows."""
    found = []
    for at in range(len(node.inputs)):
        if (rows := node.rows(at)) is None:
            continue
        if rows.axis != 0 or (at == 3 and node.rank(at) < 4):
            raise RowsMixed("computes over all rows")
        found.append(rows)
    if any(node.has(at) and node.rows(at) is None for at in (0, 1, 2)):
        raise RowsMixed("has keys without rows")
    return [joined(found)] * len(node.output_shapes)


_BATCHED = (
    "Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "AveragePool", "MaxPool", "LpPool", "GlobalAveragePool",
    "GlobalMaxPool", "GlobalLpPool", "QLinearGlobalAveragePool", "QLinearAveragePool",
)  # fmt: skip

CONTRACTION_RULES: dict[str, Rule] = {
    **dict.fromkeys(("MatMul", "MatMulInteger"), _mat_mul),
    **dict.fromkeys(_BATCHED, _convolution),
    **dict.fromkeys(("RNN", "GRU", "LSTM"), _recurrent),
    "QLinearMatMul": _q_linear_mat_mul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Attention": _attention,
}


def _of_rows(node: GraphNode) -> Sequence[Rows]:
    """Each row of a matrix is computed by itself."""
    node.must_be_fixed(*range(1, len(node.inputs)))
    rows = node.rows(0)
    if rows is None or rows.axis != 0 or node.rank(0) != 2:
        raise RowsMixed("computes over all rows")
    return [rows] * len(node.output_shapes)


def _array_feature_extractor(node: GraphNode) -> Sequence[Rows]:
    """Takes columns by the last dimension, or looks labels up in a list of them."""
    rows, indices = node.rows(0), node.rows(1)
    shapes = node.output_shapes[0]
    if rows is None and indices is not None and shapes is not None and math.prod(shapes[0][:-1]) == 1:
        return [reshaped(indices, node.shape(1), shapes, COUNTS)]
    node.must_be_fixed(1)
    if rows is None or rows.axis == node.rank(0) - 1:
        raise RowsMixed("takes some of the rows")
    return [rows]


def _distances(node: GraphNode) -> Sequence[Rows]:
    """CDist of ONNX Runtime: the distances of each row to the rows of a matrix, which are weights."""
    node.must_be_fixed(1)
    return _of_rows(node)


def _columns(node: GraphNode) -> Sequence[Rows]:
    """FeatureVectorizer: the columns of several matrices beside each other."""
    found = [node.rows(at) for at in range(len(node.inputs))]
    rows = found[0]
    if rows is None or rows.axis != 0 or any(other != rows for other in found):
        raise RowsMixed("computes over all rows")
    return [rows]


def _one_hot_encoder(node: GraphNode) -> Sequence[Rows]:
    rows = node.rows(0)
    assert rows is not None
    return [rows]


_LEARNERS = (
    "LinearClassifier", "LinearRegressor", "SVMClassifier", "SVMRegressor", "TreeEnsemble", "TreeEnsembleClassifier",
    "TreeEnsembleRegressor", "Normalizer", "TfIdfVectorizer",
)  # fmt: skip

LEARNER_RULES: dict[str, Rule] = {
    **dict.fromkeys(_LEARNERS, _of_rows),
    "CDist": _distances,
    "ArrayFeatureExtractor": _array_feature_extractor,
    "FeatureVectorizer": _columns,
    "OneHotEncoder": _one_hot_encoder,
}


# Operators that compute over whole axes: sums, softmax, normalisation, sorting. They keep rows apart where the axis of
# the rows is not among those.


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

REDUCTION_RULES: dict[str, Rule] = {
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


RULES: Mapping[str, Rule] = {
    **elementwise_rules.RULES,
    **REDUCTION_RULES,
    **layout_rules.RULES,
    **CONTRACTION_RULES,
    **LEARNER_RULES,
}


def rows_after(node: GraphNode) -> Sequence[Rows]:
    """Return where the rows of each output are. Raises RowsMixed where an output depends on several rows, or it is not
    known that it does not."""
    rule = RULES.get(node.op)
    if rule is None:
        raise RowsMixed("is an operator of which it is not known whether it keeps rows apart")
    for tensor in node.inputs:
        if tensor is not None and tensor.rows is Content.UNCLEAR:
            raise RowsMixed(f"takes {tensor.name!r}, which depends on the number of rows in a way that is not known")
    found = rule(node)
    if node.op == "Concat":  # the only operator that writes the number of the row before other numbers
        return found
    return [replace(rows, numbered=False) if isinstance(rows, RowAxis) else rows for rows in found]
