"""Operators of the domain ai.onnx.ml, which converters write for scikit-learn and the like: a row of numbers in, a
label or scores out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from apportion.serving.row_independence.elementwise_rules import Rule
from apportion.serving.row_independence.graph_node import COUNTS, GraphNode, Rows
from apportion.serving.row_independence.row_axis import RowsMixed, reshaped


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

RULES: dict[str, Rule] = {
    **dict.fromkeys(_LEARNERS, _of_rows),
    "CDist": _distances,
    "ArrayFeatureExtractor": _array_feature_extractor,
    "FeatureVectorizer": _columns,
    "OneHotEncoder": _one_hot_encoder,
}
