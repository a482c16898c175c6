"""The shapes of all tensors of a graph at two numbers of rows, and the values of those that no row decides.

The graph is run by ONNX Runtime as it is, without optimizations, with a Shape operator behind each tensor: the tensors
themselves are freed as the run goes on. Two numbers of rows tell which dimensions grow with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.exporting.onnxruntime_session import BF16, run_bits, runtime
from apportion.serving.row_independence.graph_node import COUNTS
from apportion.serving.row_independence.row_axis import RowsMixed

_SHAPE = "apportion.shape/"
Array = NDArray[Any]


@dataclass(frozen=True)
class Probe:
    """What was found: for each tensor its shapes, and for some their values, at each of ``COUNTS``."""

    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    values: Mapping[str, tuple[Array, ...]]


def probed(model: Any, shapes_of: Sequence[str], values_of: Sequence[str], row: Sequence[Array]) -> Probe:
    """Run a model (an ``onnx.ModelProto``, which is changed). ``row``: one row of each input that it is known to
    compute. Raises RowsMixed where it cannot be run with several."""
    session = _session(model, shapes_of, values_of)
    turns = []
    for count in COUNTS:
        feed = {x.name: np.repeat(one[:1], count, 0) for x, one in zip(session.get_inputs(), row, strict=True)}
        try:
            turns.append(_run(session, feed, shapes_of, values_of))
        except Exception as error:  # onnxruntime's own have no base but this
            why = str(error).partition("\n")[0]
            raise RowsMixed(f"it does not take {count} rows of what it takes one of ({why})") from error
    shapes = {name: tuple(turn[0][name] for turn in turns) for name in shapes_of}
    return Probe(shapes, {name: tuple(turn[1][name] for turn in turns) for name in values_of})


def _session(model: Any, shapes_of: Sequence[str], values_of: Sequence[str]) -> Any:
    import onnx

    graph = model.graph
    if not any(opset.domain in ("", "ai.onnx") for opset in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("", 18))
    graph.node.extend(onnx.helper.make_node("Shape", [name], [_SHAPE + name]) for name in shapes_of)
    known = {value.name for value in graph.output}
    wanted = [*(_SHAPE + name for name in shapes_of), *(name for name in values_of if name not in known)]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own have no base but this
        raise RowsMixed(f"cannot be looked at ({str(error).partition(chr(10))[0]})") from error


def _run(
    session: Any, feed: Mapping[str, Array], shapes_of: Sequence[str], values_of: Sequence[str]
) -> tuple[dict[str, tuple[int, ...]], dict[str, Array]]:
    wanted = [*(_SHAPE + name for name in shapes_of), *values_of]
    given = {x.name: _texts(feed[x.name]) for x in session.get_inputs()}
    if any(x.type == BF16 for x in (*session.get_inputs(), *session.get_outputs())):
        every = dict(zip([x.name for x in session.get_outputs()], run_bits(session, given), strict=True))
        found = [every[name] for name in wanted]
    else:
        found = session.run(wanted, given)
    shapes = {name: tuple(map(int, shape)) for name, shape in zip(shapes_of, found, strict=False)}
    return shapes, dict(zip(values_of, found[len(shapes_of) :], strict=True))


def _texts(values: Array) -> Array:
    """Convert bytes to Python's strings, which ONNX Runtime takes."""
    if values.dtype != object:
        return values
    made = np.empty(values.size, dtype=object)
    made[:] = [value.decode() for value in values.reshape(-1)]
    return made.reshape(values.shape)
