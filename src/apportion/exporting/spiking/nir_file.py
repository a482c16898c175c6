"""NIR files: spiking graphs for the programs that read the Neuromorphic Intermediate Representation.

::

    SpikingGraph -- adapted to a dialect --> nir.NIRGraph -- HDF5 --> net.nir --> sinabs, spikingjelly, norse, ...

The file says in its metadata what NIR has no fields for: its dialect, the rule of its neurons, its number of steps.
Its numbers are float32, since most programs read no others. It names no v_reset, so that nir 1.0.4 opens it too, which
sinabs asks for: nir 1.0.8 takes zero where there is none.
"""

from __future__ import annotations

import io
import keyword
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.exporting.spiking.dialects.adaptation import adapted, too_early, without_zeros
from apportion.exporting.spiking.dialects.dialect import DIALECTS, Dialect, dialect
from apportion.exporting.spiking.graph import (
    Convolution,
    CurrentSource,
    Dense,
    Flatten,
    Neurons,
    Node,
    Readout,
    SpikingGraph,
    layer_of,
)

_WRITER = "apportion"
_ALL_BUT_EXAMPLES = (0, -1)
"""The dimensions that a Flatten makes into one, where the examples are not counted."""
_KINDS = ("Input", "Affine", "Linear", "Conv2d", "SumPool2d", "AvgPool2d", "Flatten", "IF", "Output")
Shape = tuple[int, ...]
Edge = tuple[str, str]


def version() -> str:
    """Return the version of nir. Raises ModuleNotFoundError where it is not installed."""
    import nir

    return str(nir.__version__)


def write(graph: SpikingGraph, path: Path, dialect_name: str) -> SpikingGraph:
    """Write the graph in this dialect, and return the graph as the file says it (``read``). Raises ValueError, with the
    layer's name and the cure, where the dialect's program would compute something else; then nothing is written."""
    import nir

    spoken = dialect(dialect_name)
    made = adapted(graph, spoken)
    names = _legal_names(node.name for node in made.nodes)
    nodes = {names[node.name]: _written(node, made.into(node.name)) for node in made.nodes}
    edges = [(names[source], names[to]) for source, to in made.edges]
    metadata = {
        "writer": _WRITER,
        "dialect": spoken.name,
        "reset": spoken.reset,
        "strictly": int(spoken.strictly),
        "timesteps": graph.timesteps,
        "outputs": np.array(graph.readout.shape),
    }
    if graph.units is not None:
        metadata["input_step"], metadata["output_step"] = graph.units
        metadata["levels"] = max(node.levels or 0 for node in graph.neurons)
    whole = nir.NIRGraph(nodes, edges, metadata=metadata)
    for node in whole.nodes.values():
        if isinstance(node, nir.IF):
            node.to_dict = _without_v_reset(node)
    file = io.BytesIO()  # h5py ends the process where a disk is full
    nir.write(file, whole)
    path.write_bytes(file.getvalue())
    return read(path, dialect_name)


def read(path: Path, dialect_name: str, *, timesteps: int | None = None) -> SpikingGraph:
    """Read the graph that the dialect's program computes for the file, with neurons of its rule.

    ``timesteps``: the number of steps, for a file that does not say it. Raises ValueError, with the node's name, where
    the program would compute something else than the file says, or where a spiking graph has no such node.
    """
    import nir

    spoken = dialect(dialect_name)
    try:
        whole = nir.read(path)
    except (OSError, KeyError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{path.name} cannot be read as a NIR file: {error}") from error
    for name, node in whole.nodes.items():
        _check_kind(name, type(node).__name__, spoken)
    said = _said(path, whole.metadata, spoken)
    steps = timesteps if said is None else said
    if steps is None:
        raise ValueError(f"{path.name} does not say for how many steps it is run: give timesteps")
    edges: list[Edge] = [(str(source), str(to)) for source, to in whole.edges]
    order = _topological(path, list(whole.nodes), edges)
    if spoken.depth_first:
        _check_order(path, order[0], edges, spoken)
    nodes: list[Node] = []
    shapes: dict[str, Shape] = {}
    for name in order:
        before = {shapes[source] for source, to in edges if to == name}
        made = _read(name, whole.nodes[name], before, spoken)
        shapes[name] = made.shape
        nodes.append(made)
    graph = without_zeros(SpikingGraph(nodes=tuple(nodes), edges=tuple(edges), timesteps=steps))
    graph = _with_outputs(graph, _ints(whole.metadata["outputs"])) if said is not None else graph
    return _of_integers(path, graph, whole.metadata) if spoken.reset == "signed" else graph


def _of_integers(path: Path, graph: SpikingGraph, metadata: Mapping[str, Any]) -> SpikingGraph:
    """Return the graph with the levels and the units of a quantised net, which its file says."""
    if not {"levels", "input_step", "output_step"} <= set(metadata):
        raise ValueError(
            f"{path.name} does not say the levels and the units of integers: it is not a file of exact neurons"
        )
    changed = (replace(node, levels=int(metadata["levels"])) for node in graph.neurons)
    units = (float(metadata["input_step"]), float(metadata["output_step"]))
    return replace(graph.with_nodes(*changed), current="first_step", units=units)


def _said(path: Path, metadata: Mapping[str, Any], spoken: Dialect) -> int | None:
    """Check what the file says of itself, and return its number of steps."""
    if metadata.get("writer") != _WRITER:
        return None
    found = metadata["dialect"]
    if found != spoken.name:
        rule = DIALECTS[found].rule if found in DIALECTS else "follows a rule that is not known here"
        raise ValueError(
            f"{path.name} is written in the dialect {found}, in which a neuron {rule}; in {spoken.name} it "
            f"{spoken.rule}, and the file would be another network: export it again with dialect={spoken.name!r}"
        )
    if (metadata["reset"], bool(metadata["strictly"])) != (spoken.reset, spoken.strictly):
        raise ValueError(
            f"{path.name} says that its neurons reset by {metadata['reset']!r}, and in {spoken.name} a neuron "
            f"{spoken.rule}: export it again"
        )
    return int(metadata["timesteps"])


def _with_outputs(graph: SpikingGraph, shape: Shape) -> SpikingGraph:
    """Return the graph with outputs of this shape: a file without a Flatten has (outputs, 1, 1)."""
    if graph.readout.shape == shape:
        return graph
    flat = Flatten(name=f"{graph.readout.name}_flat", shape=shape)
    *before, readout = graph.nodes
    edges = [(source, flat.name if to == readout.name else to) for source, to in graph.edges]
    nodes = (*before, flat, replace(graph.readout, shape=shape))
    return replace(graph, nodes=nodes, edges=(*edges, (flat.name, readout.name)))


def _without_v_reset(node: Any) -> Any:
    """Return a ``to_dict`` of the node without the field that nir 1.0.4 does not know."""
    whole = node.to_dict()
    return lambda: {key: value for key, value in whole.items() if key != "v_reset"}


def _legal_names(names: Iterable[str]) -> dict[str, str]:
    """Return for each name one that a program can name a module by: letters, digits and underscores, all different, and
    none that modules have already."""
    found: dict[str, str] = {}
    taken: set[str] = {"graph", "return_state", "stateful_modules", "execution_order", *keyword.kwlist}
    modules = torch.nn.ModuleDict()
    for name in names:
        legal = re.sub(r"\W", "_", name, flags=re.ASCII)
        legal = legal if re.match(r"[A-Za-z]", legal) else f"n{legal}"
        while legal in taken or hasattr(modules, legal):
            legal += "_"
        taken.add(legal)
        found[name] = legal
    return found


def _written(node: Node, before: Sequence[Node]) -> Any:
    """Return the NIR node."""
    import nir

    if isinstance(node, CurrentSource):
        return nir.Input({"input": np.array(node.shape)})
    if isinstance(node, Readout):
        return nir.Output({"output": np.array(node.shape)})
    if isinstance(node, Flatten):
        start, end = _ALL_BUT_EXAMPLES
        return nir.Flatten({"input": np.array(before[0].shape)}, start_dim=start, end_dim=end)
    if isinstance(node, Neurons):
        threshold = node.threshold.reshape(-1, *[1] * (len(node.shape) - 1)) if node.threshold.ndim else node.threshold
        whole = threshold.expand(node.shape).contiguous().numpy()
        return nir.IF(r=np.ones_like(whole), v_threshold=whole)
    if isinstance(node, Dense):
        return nir.Affine(weight=_array(node.weight), bias=_array(node.bias))
    if node.weight.shape[-1] != node.weight.shape[-2]:
        raise ValueError(
            f"{layer_of(node)} has a kernel of {tuple(node.weight.shape[-2:])}, and nir takes all kernels for "
            "square: fill the kernel with zeros, and the padding with it"
        )
    return nir.Conv2d(
        input_shape=before[0].shape[1:],
        weight=_array(node.weight),
        stride=node.stride,
        padding=node.padding,
        dilation=node.dilation,
        groups=node.groups,
        bias=_array(node.bias),
    )


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()


def _topological(path: Path, names: Sequence[str], edges: Sequence[Edge]) -> list[str]:
    """Return the names in an order in which every edge goes forwards."""
    order: list[str] = []
    left = list(names)
    while left:
        ready = [name for name in left if all(source in order for source, to in edges if to == name)]
        if not ready:
            raise ValueError(f"{path.name} has a cycle through {left[0]}: a spiking graph has none")
        order += ready
        left = [name for name in left if name not in ready]
    return order


def _check_order(path: Path, first: str, edges: Sequence[Edge], spoken: Dialect) -> None:
    early = too_early(first, edges)
    if early is not None:
        raise ValueError(
            f"{path.name}: {spoken.name} computes {early[1]} before {early[0]}, which flows into it, and leaves that "
            "out: the order of the edges must lead it, as it does in files that are exported in this dialect"
        )


def _check_kind(name: str, kind: str, spoken: Dialect) -> None:
    if kind in spoken.wrong:
        raise ValueError(
            f"{name} ({kind}): {spoken.name} {spoken.wrong[kind]}, and would compute another network: export the file "
            f"with dialect={spoken.name!r}"
        )
    if kind not in _KINDS:
        raise ValueError(f"{name} ({kind}) is not a node of a spiking graph, which has {', '.join(_KINDS)}")


def _read(name: str, node: Any, before: set[Shape], spoken: Dialect) -> Node:
    """Return the node of a spiking graph."""
    kind = type(node).__name__
    if kind == "Input":
        return CurrentSource(name=name, shape=_ints(node.input_type["input"]))
    if len(before) != 1:
        raise ValueError(f"{name} ({kind}): what flows into it has the shapes {sorted(before)}: it must be one")
    (comes,) = before
    if kind == "Output":
        return Readout(name=name, shape=comes)
    if kind in ("Affine", "Linear"):
        weight = torch.from_numpy(node.weight)
        bias = torch.from_numpy(node.bias) if kind == "Affine" else weight.new_zeros(len(weight))
        return Dense(name=name, shape=(len(weight),), weight=weight, bias=bias)
    makers: dict[str, Callable[[str, Any, Shape], Node]] = {
        "Conv2d": _convolution, "SumPool2d": _pool, "AvgPool2d": _pool, "Flatten": _flatten, "IF": _neurons,
    }  # fmt: skip
    made = makers[kind](name, node, comes)
    if not isinstance(made, Neurons):
        return made
    if spoken.one_threshold and made.threshold.ndim:
        raise ValueError(
            f"{name} (IF) has thresholds that differ, and {spoken.name} reads one for a layer: export the file with "
            f"dialect={spoken.name!r}"
        )
    return replace(made, reset=spoken.reset, strictly=spoken.strictly)


def _convolution(name: str, node: Any, comes: Shape) -> Convolution:
    weight = torch.from_numpy(node.weight)
    stride, dilation = _pair(node.stride), _pair(node.dilation)
    kernel = (int(weight.shape[-2]), int(weight.shape[-1]))
    padding = (0, 0) if isinstance(node.padding, str) and node.padding == "valid" else node.padding
    if isinstance(padding, str):
        raise ValueError(f"{name} (Conv2d) has the padding {padding!r}, which is not read: say it in rows and columns")
    return Convolution(
        name=name,
        shape=(len(weight), *_rows(comes, kernel, stride, _pair(padding), dilation)),
        weight=weight,
        bias=torch.from_numpy(node.bias),
        stride=stride,
        padding=_pair(padding),
        dilation=dilation,
        groups=int(node.groups),
    )


def _pool(name: str, node: Any, comes: Shape) -> Convolution:
    """Return the pool as a convolution of each channel by itself. A mean counts the zeros of the padding too."""
    channels, kernel = comes[0], _pair(node.kernel_size)
    share = 1.0 if type(node).__name__ == "SumPool2d" else 1 / math.prod(kernel)
    stride, padding = _pair(node.stride), _pair(node.padding)
    if share == 1 and padding != (0, 0):
        raise ValueError(f"{name} (SumPool2d) has the padding {padding}, which most programs leave out: pad before it")
    return Convolution(
        name=name,
        shape=(channels, *_rows(comes, kernel, stride, padding, (1, 1))),
        weight=torch.full((channels, 1, *kernel), share),
        bias=torch.zeros(channels),
        stride=stride,
        padding=padding,
        groups=channels,
    )


def _flatten(name: str, node: Any, comes: Shape) -> Flatten:
    found = (int(node.start_dim), int(node.end_dim))
    if found not in (_ALL_BUT_EXAMPLES, (0, len(comes) - 1)):
        raise ValueError(f"{name} (Flatten) flattens the dimensions {found[0]} to {found[1]}, and only all can be read")
    return Flatten(name=name, shape=(math.prod(comes),))


def _neurons(name: str, node: Any, comes: Shape) -> Neurons:
    """Return the neurons, with the rule of the standard."""
    if bool((node.r != 1).any()):
        raise ValueError(
            f"{name} (IF) has a resistance r other than 1, which most programs ignore: put it into weights"
        )
    if node.v_reset is not None and bool((node.v_reset != 0).any()):
        raise ValueError(f"{name} (IF) has a v_reset other than 0, which most programs ignore")
    whole = torch.from_numpy(np.ascontiguousarray(node.v_threshold)).expand(comes)
    by_channel = whole.reshape(len(whole), -1)[:, 0] if whole.ndim else whole
    if not bool((whole == by_channel.reshape(-1, *[1] * (whole.ndim - 1))).all()):
        raise ValueError(f"{name} (IF) has different thresholds within a channel, which cannot be read")
    same = bool((by_channel == by_channel[0]).all())
    return Neurons(name=name, shape=comes, threshold=by_channel[0].clone() if same else by_channel.clone())


def _ints(values: Any) -> Shape:
    return tuple(int(value) for value in np.atleast_1d(values))


def _pair(value: Any) -> tuple[int, int]:
    values = _ints(value)
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])


def _rows(comes: Shape, kernel: Sequence[int], stride: Shape, padding: Shape, dilation: Shape) -> tuple[int, int]:
    """Return the rows and columns of what comes out."""
    found = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(comes[1:], kernel, stride, padding, dilation, strict=True)
    ]
    return found[0], found[1]
