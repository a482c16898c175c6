"""Operators that compute each element of their output from the elements at the same place of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from apportion.serving.row_independence.graph_node import GraphNode, Rows, RowsMixed, joined

Rule = Callable[[GraphNode], Sequence[Rows]]

_NAMES = (
    "Abs", "Acos", "Acosh", "Add", "Affine", "And", "Asin", "Asinh", "Atan", "Atanh", "BiasGelu", "Binarizer",
    "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Celu", "Clip", "Cos",
    "Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "FastGelu", "Floor", "Gelu", "Greater", "GreaterOrEqual",
    "HardSigmoid", "HardSwish", "Identity", "Imputer", "IsInf", "IsNaN", "LabelEncoder", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow",
    "QuickGelu", "Reciprocal", "RegexFullMatch", "Relu", "Round", "Scaler", "Selu", "Shrink", "Sigmoid", "Sign",
    "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "StringConcat", "Sub", "Sum", "Swish", "Tan", "Tanh",
    "ThresholdedRelu", "Where", "Xor", "CategoryMapper",
)  # fmt: skip


def elementwise(node: GraphNode) -> Sequence[Rows]:
    """All inputs are brought to one shape by their last dimensions (broadcasting)."""
    rank = len(node.out_shape())
    found = []
    for at in range(len(node.inputs)):
        if (rows := node.rows(at)) is not None:
            found.append(rows.at(rows.axis + rank - node.rank(at)))
    return [joined(found)]


def _of_the_first(node: GraphNode) -> Sequence[Rows]:
    """Scales, zero points and the like are weights; the first input alone has rows."""
    node.must_be_fixed(*range(1, len(node.inputs)))
    rows = node.rows(0)
    assert rows is not None
    return [rows]


def _quantized_pair(node: GraphNode) -> Sequence[Rows]:
    """QLinearAdd and QLinearMul: two tensors, each with its scale and zero point, and those of the output."""
    node.must_be_fixed(1, 2, 4, 5, 6, 7)
    return elementwise(node)


def _cast_like(node: GraphNode) -> Sequence[Rows]:
    rows = node.rows(0)
    if rows is None:
        raise RowsMixed("casts a constant to the type of the rows")
    return [rows]


def _dropout(node: GraphNode) -> Sequence[Rows]:
    training = node.integers(2)
    if training is not None and any(training):
        raise RowsMixed("drops elements at random")
    rows = node.rows(0)
    assert rows is not None
    return [rows] * len(node.output_shapes)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_NAMES, elementwise),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "QLinearSigmoid", "QLinearLeakyRelu"), _of_the_first),
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _quantized_pair),
    "CastLike": _cast_like,
    "Dropout": _dropout,
}
