"""The decision whether requests to a member are computed together. What is undecided is computed one by one."""

from __future__ import annotations

from collections.abc import Sequence

from apportion.serving.protocol.datatypes import Array
from apportion.serving.row_independence.graph_reader import GraphReading, read
from apportion.serving.row_independence.row_trials import remembers, why_rows_differ
from apportion.serving.runtimes.runtime import Runtime

NOT_ALLOWED = "batch=False"
"""The reason where the settings say that requests are never computed together."""


def why_not_together(program: Runtime, row: Sequence[Array] | None, graph: str | None, *, batch: bool) -> str | None:
    """Return why requests may not be computed together; None where they may. ``row``: one row of each input that the
    program computes. ``graph``: an ONNX file of the same net. None: there is none. ``batch``: the settings allow it.
    Raises ValueError where the program's answers depend on what it computed before."""
    reading = GraphReading("") if row is None or graph is None else read(graph, row)
    if row is not None and not reading.random and remembers(program, row, quantized=reading.quantized):
        raise ValueError(
            "the network gives an input another output after other inputs, as batch normalization in training mode "
            "can: what one client asks would change the answers to others; export it in evaluation mode (model.eval())"
        )
    if not batch:
        return NOT_ALLOWED
    if not program.batched:
        every = (*program.inputs, *program.outputs)
        fixed = next((spec.name for spec in every if not spec.shape or spec.shape[0] is not None), "it")
        return f"{fixed} has no dimension 0 of any size"
    if row is None:
        return "no row was found that it computes"
    if graph is None:
        return "it has no ONNX graph, in which it could be read whether its rows depend on each other"
    return reading.why or why_rows_differ(program, row, quantized=reading.quantized)
