"""The graph of an ONNX file, as far as quantization asks: its layers, whether it is recurrent or has attention, and
what of it only takes room."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "Gather")
"""The types of the operators that have weights, and that the quantizers know."""
_RECURRENT = ("LSTM", "GRU", "RNN", "Loop", "Scan")
_CARRIED = ("Cast", "Dropout", "Reshape", "Transpose", "Where", "Identity", "Mul", "Squeeze", "Unsqueeze", "Expand")
"""The types of the operators that may stand between the softmax of attention and the product with the values."""
_PASSING = (
    "Relu", "Clip", "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Pad",
)  # fmt: skip
"""The types of the operators whose outputs are some of their inputs, so that they round nothing."""
_FLOAT, _FLOAT16 = 1, 10
"""ONNX's numbers of these types."""
HALF_FROM = 16
"""The least number of elements of a tensor that is stored in float16."""


@dataclass(frozen=True)
class WeightedLayer:
    """An operator with weights."""

    node: str
    """The name of its node in the graph."""
    kind: str
    """The type of the operator: "Conv"."""
    name: str
    """The name of its module in the network: "layer1.0.conv1"."""
    in_float: str = ""
    """Why it stays in float32 whatever the examples say; empty: it may be int8."""

    def __str__(self) -> str:
        return self.name


def layers(model: Any) -> list[WeightedLayer]:
    """Return the operators with weights, in the order of the graph."""
    constant = {tensor.name for tensor in model.graph.initializer if tensor.data_type == _FLOAT}
    return [
        WeightedLayer(node.name, node.op_type, _module_of(node), _why_float(node))
        for node in model.graph.node
        if node.op_type in _WEIGHTED and not constant.isdisjoint(node.input)
    ]


def layers_of_nodes(model: Any) -> dict[str, str]:
    """Return the name of the module of each node, by the node's name."""
    return {node.name: _module_of(node) for node in model.graph.node}


def _why_float(node: Any) -> str:
    groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
    if node.op_type == "ConvTranspose" and groups > 1:  # whose weights lie as (inputs, outputs of a group, ...)
        return f"a transposed convolution of {groups} groups, which the quantizers have no scales per channel for"
    return ""


def outside(model: Any, int8: Collection[str], *, alone: bool) -> list[str]:
    """Return the nodes without weights that are to stay in float: those that no int8 layer comes before, or none
    behind, so that their range, such as that of raw inputs, would be rounded for nothing. ``int8``: the names of the
    nodes of the int8 layers. ``alone``: also those that compute, which leaves the layers themselves."""
    weighted = {one.node for one in layers(model)}
    nodes = list(model.graph.node)
    makers = {output: node for node in nodes for output in node.output if output}

    def reached(node: Any, known: Mapping[str, bool]) -> bool:
        return node.name in int8 or (node.name not in weighted and known[node.name])

    before: dict[str, bool] = {}
    for node in nodes:  # in the order in which they are computed
        before[node.name] = any(reached(makers[name], before) for name in node.input if name in makers)
    behind = dict.fromkeys(before, False)
    for node in reversed(nodes):
        if reached(node, behind):
            for name in node.input:
                if name in makers:
                    behind[makers[name].name] = True
    return [
        node.name
        for node in nodes
        if node.name not in weighted
        and not (before[node.name] and behind[node.name] and not (alone and node.op_type not in _PASSING))
    ]


def why_dynamic(model: Any) -> str | None:
    """Return why the activations of a graph have no fixed ranges: the layer that is recurrent, or has attention; None
    where static quantization does."""
    makers = {output: node for node in model.graph.node for output in node.output}
    for node in model.graph.node:
        if node.op_type in _RECURRENT:
            return f"{_module_of(node)} is recurrent ({node.op_type})"
        if node.op_type == "Attention" or (node.op_type == "MatMul" and _from_softmax(node, makers)):
            return f"{_module_of(node)} is attention"
    return None


def _from_softmax(node: Any, makers: Mapping[str, Any]) -> bool:
    """True where the first factor of a product comes from a softmax."""
    at = makers.get(node.input[0])
    while at is not None and at.op_type in _CARRIED:
        at = next((makers[name] for name in at.input if name in makers), None)
    return at is not None and at.op_type == "Softmax"


def _module_of(node: Any) -> str:
    """The module that a node was exported from, or else the node's own name."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            scopes = [str(scope) for scope in ast.literal_eval(entry.value)]
            return next((scope for scope in reversed(scopes[:-1]) if scope), str(node.name))
    return str(node.name)


def with_metadata(model: Any, metadata: Mapping[str, str]) -> Any:
    """Add entries to a file's metadata, and return it."""
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    return model


def compacted(model: Any) -> Any:
    """Take out of a model what no reader needs, and return it: where each node came from, shapes in between, and the
    long names of what lies between two operators."""
    del model.graph.value_info[:], model.metadata_props[:]
    used = {node.domain for node in model.graph.node}
    kept = [opset for opset in model.opset_import if opset.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    known = {value.name for value in (*model.graph.input, *model.graph.output)}
    short: dict[str, str] = {"": ""}

    def renamed(name: str) -> str:
        return name if name in known else short.setdefault(name, f"t{len(short)}")

    nested = any(
        attribute.HasField("g") or attribute.graphs for node in model.graph.node for attribute in node.attribute
    )
    for node in model.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.name = ""
        if not nested:  # a graph inside of a node may use any name of the outer one
            node.input[:] = map(renamed, node.input)
            node.output[:] = map(renamed, node.output)
    for tensor in model.graph.initializer:
        tensor.doc_string = ""
        if not nested:
            tensor.name = renamed(tensor.name)
    return model


def halved(model: Any) -> list[str]:
    """Store the weights in float16, to be made float32 when the file is loaded. Returns the names of those that are out
    of its range; then the model is as it was."""
    from onnx import helper, numpy_helper

    arrays = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if tensor.data_type == _FLOAT and np.prod(tensor.dims) >= HALF_FROM
    }
    largest = np.finfo(np.float16).max
    if beyond := [name for name, array in arrays.items() if not np.all(np.abs(array) <= largest)]:
        return beyond
    casts = []
    for tensor in model.graph.initializer:
        if tensor.name in arrays:
            name = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(arrays[name].astype(np.float16), f"{name}.half"))
            casts.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}.float", to=_FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return []
