"""The rules of all operators: where the rows of a node's outputs are, by where those of its inputs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from apportion.serving.row_independence import (
    contraction_rules,
    elementwise_rules,
    layout_rules,
    reduction_rules,
)
from apportion.serving.row_independence.elementwise_rules import Rule
from apportion.serving.row_independence.graph_node import Content, GraphNode, RowAxis, Rows, RowsMixed

RULES: Mapping[str, Rule] = {
    **elementwise_rules.RULES,
    **reduction_rules.RULES,
    **layout_rules.RULES,
    **contraction_rules.RULES,
    **contraction_rules.LEARNER_RULES,
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
