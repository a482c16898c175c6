"""Reads from an ONNX graph whether each row of its outputs depends on its own row of the inputs alone.

The place of the rows is followed from the inputs to the outputs, node by node (row_axis.py); what each operator does to
it is a rule (elementwise_rules.py and its neighbours). An operator without a rule, and all that a rule does not allow,
leaves the question undecided: then rows are taken to depend on each other. What is computed from the number of rows
alone may be a size, and a tensor that is the same in every row; other numbers may not be made of it.

The shapes of all tensors of a graph at two numbers of rows, and the values of those that no row decides.

The graph is run by ONNX Runtime as it is, without optimizations, with a Shape operator behind each tensor: the tensors
themselves are freed as the run goes on. Two numbers of rows tell which dimensions grow with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.exporting.onnxruntime_session import BF16, run_bits, runtime
from apportion.serving.row_independence.counted_tensors import OF_SHAPES, content
from apportion.serving.row_independence.graph_node import COUNTS, Content, GraphNode, RowAxis, RowsMixed, Tensor, sized
from apportion.serving.row_independence.rules import rows_after

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


_RANDOM = (
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
)  # fmt: skip
OVER_ALL_ROWS = {
    "DynamicQuantizeLinear": "finds one range for all rows (dynamic quantization)",
    "DynamicQuantizeMatMul": "finds one range for all rows (dynamic quantization)",
    "DynamicQuantizeLSTM": "finds one range for all rows (dynamic quantization)",
    **dict.fromkeys(("NonZero", "Unique", "Compress", "NonMaxSuppression"), "gives as many rows as the values decide"),
    **dict.fromkeys(_RANDOM, "draws random numbers"),
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), "is a branch or a loop, which is not read"),
}
"""The operators that are known to compute over all rows, and those that are not read, with what they do."""
MOST_BYTES = 1 << 30
"""The largest size in bytes of a file that is read."""
LEAST_OPSET = 7
"""The first version of ONNX's operators that is read: those before it broadcast in another way."""
VALUES = 4096
"""The largest number of elements of a constant whose values a rule may ask for."""


@dataclass(frozen=True)
class GraphReading:
    """What was read of a graph. ``why``: why the rows of its outputs may depend on other rows than their own; None
    where they do not. ``quantized``: whether it rounds to whole numbers on the way; ``random``: whether it draws
    random numbers."""

    why: str | None
    quantized: bool = False
    random: bool = False


def read(path: str | Path, row: Sequence[Array]) -> GraphReading:
    """Read a file. ``row``: one row of each input, in their order, that the network is known to compute."""
    import onnx
    from onnx import inliner

    operators = set[str]()
    try:
        # Weights may lie in other files beside it: all of them are needed to run it.
        size = sum(file.stat().st_size for file in Path(path).parent.glob(f"{Path(path).name}*"))
        if size > MOST_BYTES:
            return GraphReading(f"a graph of more than {MOST_BYTES >> 20} MiB is not read")
        model = inliner.inline_local_functions(onnx.load(str(path)))
        operators = _operators(model.graph.node)
        _follow(model, row)
        why = None
    except RowsMixed as mixed:
        why = str(mixed)
    except Exception as error:  # of a file that ONNX Runtime runs and that cannot be read here: undecided
        why = f"its graph cannot be read ({type(error).__name__}: {error})"[:500]
    quantized = any("Quantize" in name or "QLinear" in name for name in operators)
    return GraphReading(why, quantized, bool(operators & {"Dropout", *_RANDOM}))


def _operators(nodes: Sequence[Any]) -> set[str]:
    """Return the types of the nodes, those within branches and loops too."""
    inner = [attribute.g for node in nodes for attribute in node.attribute if attribute.HasField("g")]
    return {node.op_type for node in nodes}.union(*(_operators(graph.node) for graph in inner))


def _follow(model: Any, row: Sequence[Array]) -> None:
    """Raise RowsMixed where a row of an output may depend on several rows of the inputs."""
    graph = model.graph
    weights = {value.name: value for value in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in weights]
    outputs = [value.name for value in graph.output]
    versions = {opset.domain if opset.domain != "ai.onnx" else "": opset.version for opset in model.opset_import}
    nodes = _needed(graph.node, outputs)
    _check_read(graph, nodes, versions)
    of_rows = _reached(nodes, inputs)
    made = [name for node in nodes for name in node.output if name]
    constant = [name for name in made if name not in of_rows]
    probe = probed(model, [*inputs, *made], constant, row)
    tensors: dict[str, Tensor] = {name: _input(name, probe) for name in inputs}
    tensors |= {name: _weight(name, value) for name, value in weights.items()}
    for node in nodes:
        read = _read(node, tensors, probe, versions)
        if not any(name in of_rows for name in node.output):
            tensors |= _without_rows(node, read, probe)
            continue
        try:
            tensors |= _followed(node, read, probe)
        except RowsMixed as mixed:
            raise RowsMixed(f"{_named(node)} {mixed}") from mixed
    for name in outputs:
        rows = tensors[name].rows
        if not isinstance(rows, RowAxis) or (rows.axis, rows.layouts) != (0, RowAxis(0).layouts):
            raise RowsMixed(f"output {name} does not have the rows in dimension 0")


def _check_read(graph: Any, nodes: Sequence[Any], versions: Mapping[str, int]) -> None:
    """Raise RowsMixed where the graph has what is not read, or an operator that mixes rows in any case."""
    if graph.sparse_initializer:
        raise RowsMixed("it has sparse weights, which are not read")
    if versions.get("", LEAST_OPSET) < LEAST_OPSET:
        raise RowsMixed(f"its operators are of version {versions['']}, and only {LEAST_OPSET} or newer are read")
    for node in nodes:
        if node.op_type in OVER_ALL_ROWS:
            raise RowsMixed(f"{_named(node)} {OVER_ALL_ROWS[node.op_type]}")


def _named(node: Any) -> str:
    return f"{node.op_type} {node.name or next(iter(node.output), '')!s}".strip()


def _needed(nodes: Sequence[Any], outputs: Sequence[str]) -> list[Any]:
    """Return the nodes that the outputs depend on, in their order."""
    wanted, found = {*outputs}, []
    for node in reversed(nodes):
        if wanted & {*node.output}:
            found.append(node)
            wanted |= {*node.input} | _read_inside(node)
    return found[::-1]


def _read_inside(node: Any) -> set[str]:
    """Return the names of tensors that the branches of a node read."""
    inner = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return {name for graph in inner for child in graph.node for name in {*child.input} | _read_inside(child)}


def _reached(nodes: Sequence[Any], inputs: Sequence[str]) -> set[str]:
    """Return the tensors that depend on what the rows hold."""
    of_rows = {*inputs}
    for node in nodes:
        if node.op_type not in OF_SHAPES and ({*node.input} | _read_inside(node)) & of_rows:
            of_rows |= {*node.output}
    return of_rows


def _input(name: str, probe: Probe) -> Tensor:
    shapes = probe.shapes[name]
    return Tensor(name, shapes, sized(RowAxis(0), shapes, COUNTS))


def _weight(name: str, initializer: Any) -> Tensor:
    import onnx

    value = onnx.numpy_helper.to_array(initializer)
    return Tensor(name, (value.shape,) * 2, Content.FIXED, (value,) * 2 if value.size <= VALUES else None)


def _read(node: Any, tensors: Mapping[str, Tensor], probe: Probe, versions: Mapping[str, int]) -> GraphNode:
    """Return a node as the rules see it."""
    import onnx

    return GraphNode(
        op=node.op_type,
        name=node.name,
        version=versions.get(node.domain, 1),
        inputs=[tensors[name] if name else None for name in node.input],
        output_shapes=[probe.shapes[name] if name else None for name in node.output],
        attributes={a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
    )


def _without_rows(node: Any, read: GraphNode, probe: Probe) -> dict[str, Tensor]:
    """Return the outputs of a node that does not depend on what the rows hold."""
    return {
        name: Tensor(name, probe.shapes[name], content(read, at, probe.values[name]), probe.values[name])
        for at, name in enumerate(node.output)
        if name
    }


def _followed(node: Any, read: GraphNode, probe: Probe) -> dict[str, Tensor]:
    """Return the outputs of a node that depends on the rows."""
    found = {}
    for name, rows in zip(node.output, rows_after(read), strict=False):
        if name:
            assert isinstance(rows, RowAxis)
            found[name] = Tensor(name, probe.shapes[name], sized(rows, probe.shapes[name], COUNTS))
    if missing := [name for name in node.output if name and name not in found]:
        raise RowsMixed(f"has an output {missing[0]} of which nothing is known")
    return found
