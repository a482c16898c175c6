"""The layers of a network as torch.export sees them, with batch normalisation folded into the layer before it.

::

    nn.Module -- torch.export --> aten graph --> layers in the order of computation, dimension 0 the example

What a circuit of fixed size cannot compute is refused here, by the name of the layer and with the cure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from apportion.core.torch_private import pytree
from apportion.exporting.blamed_layer import ONE_WAY, blamed_layer, decides, first_line, named

Kind = str
"""The kind of a layer: "input", "linear", "convolution", "add", "relu", "average", "maximum" or "reshape"."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FloatLayer:
    """A layer of the network, with the numbers of the layers that it reads."""

    name: str
    kind: Kind
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    """The shape of its output for one example."""
    weight: Tensor | None = None
    bias: Tensor | None = None
    arguments: tuple[Any, ...] = ()
    """The stride, the padding, the dilation and the groups of a convolution; the window, the stride and the padding of
    a pool."""
    most: float | None = None
    """The largest output of a clipped ReLU; None: there is none."""


def computed(layer: FloatLayer, values: Sequence[Tensor]) -> Tensor:
    """Return what a layer computes of the outputs of the layers that it reads, dimension 0 the example."""
    first = values[0]
    if layer.kind == "linear":
        assert layer.weight is not None
        return F.linear(first, layer.weight, layer.bias)
    if layer.kind == "convolution":
        assert layer.weight is not None
        return F.conv2d(first, layer.weight, layer.bias, *layer.arguments)
    if layer.kind == "add":
        return first + values[1]
    if layer.kind == "relu":
        return first.clamp(0, layer.most)
    if layer.kind == "average":
        return F.avg_pool2d(first, *layer.arguments)
    if layer.kind == "maximum":
        largest: Tensor = F.max_pool2d(first, *layer.arguments)
        return largest
    return first.reshape(len(first), *layer.shape)


def every_output(layers: Sequence[FloatLayer], inputs: Tensor) -> list[Tensor]:
    """Return the output of each layer for these inputs."""
    found: list[Tensor] = []
    for layer in layers:
        found.append(inputs if layer.kind == "input" else computed(layer, [found[n] for n in layer.inputs]))
    return found


def imported(module: nn.Module, sample: Any) -> list[FloatLayer]:
    """Return the layers of the network in float64; the last one is its output.

    ``sample``: two examples or more. Raises ValueError, by the name of the layer, for what cannot be a circuit.
    """
    leaves = pytree.tree_leaves(sample)
    if len(leaves) != 1 or not isinstance(leaves[0], Tensor) or not leaves[0].is_floating_point():
        kinds = ", ".join(str(x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in leaves)
        raise ValueError(
            f"{type(module).__name__} takes {kinds or 'nothing'}, and a circuit takes one tensor of floating-point "
            "numbers: put what comes before it, such as an embedding, in front of the circuit"
        )
    for name, part in module.named_modules():  # torch.export itself may fail at them, for another reason
        if type(part).__name__ in _CURES:
            what, cure = _CURES[type(part).__name__]
            raise ValueError(f"{named(module, name)} cannot be a circuit: {what}; {cure}")
    args, kwargs = ((), dict(sample)) if isinstance(sample, dict) else (sample if isinstance(sample, tuple) else (sample,), {})  # fmt: skip  # noqa: E501
    try:
        with torch.no_grad():
            program = torch.export.export(module, args, kwargs)
    except Exception as error:  # torch.export raises classes of many modules
        raise ValueError(
            f"{named(module, blamed_layer(module, error))} cannot be a circuit, which computes the same for every "
            f"input: {ONE_WAY if decides(error) else first_line(error)}; its shapes and its path may not depend on the "
            "numbers in a tensor"
        ) from error
    made = _Importer(program, examples=len(leaves[0])).layers()
    with torch.no_grad():
        expected = pytree.tree_leaves(module(*args, **kwargs))[0].double()
        found = every_output(made, leaves[0].double())[-1]
    apart = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    if not apart < 1e-3:
        raise ValueError(
            f"{type(module).__name__} as separate layers computes something else, by {apart:.1e} of its largest output:"
            " it is not in evaluation mode, or computes across examples"
        )
    return made


class _Importer:
    """Goes through an exported program node by node."""

    def __init__(self, program: torch.export.ExportedProgram, examples: int) -> None:
        self._program, self._examples = program, examples
        self._made: list[FloatLayer] = []
        self._number: dict[fx.Node, int] = {}
        signature = program.graph_signature
        named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        named |= dict(signature.inputs_to_lifted_tensor_constants)
        tensors = {**program.state_dict, **program.constants}
        self._constant = {placeholder: tensors[name] for placeholder, name in named.items()}

    def layers(self) -> list[FloatLayer]:
        nodes = list(self._program.graph.nodes)
        for node in nodes:
            if node.op == "call_function":
                self._add(node)
            elif node.op == "placeholder" and node.name not in self._constant:
                self._append(node, kind="input", inputs=())
        outputs = pytree.tree_leaves(nodes[-1].args)
        if len(outputs) != 1 or not isinstance(outputs[0], fx.Node):
            raise ValueError(f"the network returns {len(outputs)} outputs, and a circuit gives one: return one tensor")
        last = self._number[outputs[0]]
        if last == 0:
            raise ValueError("the network returns its input: there is nothing to compute")
        return self._made[: last + 1]

    def _append(self, node: fx.Node, *, kind: Kind, inputs: Sequence[Any], **others: Any) -> None:
        shape = tuple(node.meta["val"].shape)
        if not shape or shape[0] != self._examples or not all(isinstance(n, int) for n in shape):
            _refuse(node, f"its output of shape {tuple(shape)} has no dimension 0 for the example", "keep it")
        numbers = tuple(x if isinstance(x, int) else self._number[x] for x in inputs)
        name = described(node)
        self._number[node] = len(self._made)
        self._made.append(FloatLayer(name=name, kind=kind, inputs=numbers, shape=shape[1:], **others))

    def _add(self, node: fx.Node) -> None:
        operator = str(node.target).removeprefix("aten.").split(".")[0].rstrip("_")
        rule = _RULES.get(operator)
        if rule is None:
            known = _CURES.get(_class_of(node)) or _CURES.get(operator)
            what, cure = known or (f"the operator {operator} has no circuit", _ONLY)
            _refuse(node, what, cure)
        rule(self, node)

    def _tensor(self, node: fx.Node, argument: Any) -> Tensor | None:
        if argument is None:
            return None
        found = self._constant.get(getattr(argument, "name", ""))
        if found is None:
            _refuse(node, "its weights are computed from the input", "use weights that are parameters")
        made: Tensor = found.detach().double()
        return made

    def linear(self, node: fx.Node) -> None:
        x, weight, bias = _arguments(node, None, None, None)
        if len(node.meta["val"].shape) != 2:
            _refuse(node, "it is applied along a dimension, such as time", "flatten its input to one row per example")
        self._append(
            node, kind="linear", inputs=[x], weight=self._tensor(node, weight), bias=self._tensor(node, bias)
        )  # fmt: skip

    def convolution(self, node: fx.Node) -> None:
        x, weight, bias, stride, padding, dilation, groups = _arguments(node, None, None, None, 1, 0, 1, 1)
        if isinstance(padding, str):
            kernel = weight.meta["val"].shape[2:]
            spread = _pair(dilation)
            if padding == "same" and any((k - 1) * d % 2 for k, d in zip(kernel, spread, strict=True)):
                _refuse(node, "padding='same' of an even window is not the same on both sides", "give it as numbers")
            padding = 0 if padding == "valid" else [(k - 1) * d // 2 for k, d in zip(kernel, spread, strict=True)]
        weights, added = self._tensor(node, weight), self._tensor(node, bias)
        arguments = (_pair(stride), _pair(padding), _pair(dilation), groups)
        self._append(node, kind="convolution", inputs=[x], weight=weights, bias=added, arguments=arguments)

    def batch_norm(self, node: fx.Node) -> None:
        x, weight, bias, mean, variance, training, _, eps = _arguments(node, *[None] * 8)[:8]
        before = self._made[self._number[x]]
        if training or mean is None:
            _refuse(node, "it takes its statistics from the batch", "put the network in evaluation mode")
        if before.weight is None or len(x.users) != 1:
            _refuse(node, "no convolution or linear layer stands right before it", "put it behind one")
        tensors = [self._tensor(node, argument) for argument in (weight, bias, mean, variance)]
        gain, shift, mean, variance = tensors
        assert mean is not None
        assert variance is not None
        scale = (variance + eps).rsqrt() * (1 if gain is None else gain)
        added = 0 if before.bias is None else before.bias
        self._made[self._number[x]] = replace(
            before,
            weight=before.weight * scale.reshape(-1, *[1] * (before.weight.ndim - 1)),
            bias=(added - mean) * scale + (0 if shift is None else shift),
        )
        self._number[node] = self._number[x]

    def relu(self, node: fx.Node) -> None:
        self._append(node, kind="relu", inputs=node.args[:1])

    def clipped(self, node: fx.Node) -> None:
        operator = str(node.target)
        ends = (0, 6) if "relu6" in operator else (-1.0, 1.0) if "hardtanh" in operator else (None, None)
        x, least, most = [*_arguments(node, None, *ends), *ends][:3]
        if least != 0:
            _refuse(node, f"it clips at {least}", "clip at 0, as ReLU and ReLU6 do")
        self._append(node, kind="relu", inputs=[x], most=None if most is None else float(most))

    def add(self, node: fx.Node) -> None:
        first, second = node.args[:2]
        shapes = [tuple(x.meta["val"].shape) if isinstance(x, fx.Node) else None for x in (first, second)]
        if shapes[0] != shapes[1] or node.kwargs.get("alpha", 1) != 1 or not all(x in self._number for x in node.args):
            _refuse(node, "it adds what is not two outputs of layers of the same shape", "add two of the same shape")
        self._append(node, kind="add", inputs=[first, second])

    def pooled(self, node: fx.Node) -> None:
        maximum = "max" in str(node.target)
        x, window, stride, padding, other, ceiling = _arguments(node, None, None, None, 0, None, False)
        dilation, ceil = (other, ceiling) if maximum else (1, other)
        if ceil or (dilation not in (None, 1) and set(_pair(dilation)) != {1}):
            _refuse(node, "it has a dilation or ceil_mode", "use neither")
        if not maximum and set(_pair(padding)) != {0}:
            _refuse(node, "it averages over padding", "pad in the convolution before it")
        shape = (_pair(window), _pair(stride or window), _pair(padding))
        self._append(node, kind="maximum" if maximum else "average", inputs=[x], arguments=shape)
        if not maximum:
            self._whole_power(node, _pair(window))

    def adaptive(self, node: fx.Node) -> None:
        x, size = _arguments(node, None, None)
        given = tuple(x.meta["val"].shape[2:])
        to = _pair(size)
        if any(a % b for a, b in zip(given, to, strict=True)):
            _refuse(node, f"{given} does not divide into {to} equal windows", "choose an output size that divides it")
        window = tuple(a // b for a, b in zip(given, to, strict=True))
        self._append(node, kind="average", inputs=[x], arguments=(window, window, (0, 0)))
        self._whole_power(node, window)

    def mean(self, node: fx.Node) -> None:
        x, dims = _arguments(node, None, None)[:2]
        given = tuple(x.meta["val"].shape)
        if dims is None or len(given) != 4 or {d % 4 for d in dims} != {2, 3}:
            _refuse(node, "it averages over other dimensions than the two of an image", "use AdaptiveAvgPool2d")
        window = given[2:]
        self._whole_power(node, window)
        pooled = FloatLayer(
            name=described(node), kind="average", inputs=(self._number[x],), shape=(given[1], 1, 1),
            arguments=(window, window, (0, 0)),
        )  # fmt: skip
        self._made.append(pooled)
        self._append(node, kind="reshape", inputs=[len(self._made) - 1])

    def _whole_power(self, node: fx.Node, window: Sequence[int]) -> None:
        count = window[0] * window[1]
        if count & (count - 1):
            _refuse(
                node, f"an average over {count} numbers is not a shift of bits", "use windows of 2, 4, 8 or 16 numbers"
            )  # fmt: skip

    def reshape(self, node: fx.Node) -> None:
        self._append(node, kind="reshape", inputs=node.args[:1])

    def same(self, node: fx.Node) -> None:
        if "dropout" in str(node.target) and _arguments(node, None, None, False)[2]:
            _refuse(node, "it drops numbers at random", "put the network in evaluation mode")
        argument = node.args[0]
        assert isinstance(argument, fx.Node)
        self._number[node] = self._number[argument]


_RULES: dict[str, Callable[[_Importer, fx.Node], None]] = {
    "linear": _Importer.linear,
    "conv2d": _Importer.convolution,
    "batch_norm": _Importer.batch_norm,
    "relu": _Importer.relu,
    **dict.fromkeys(("relu6", "hardtanh", "clamp"), _Importer.clipped),
    "add": _Importer.add,
    **dict.fromkeys(("avg_pool2d", "max_pool2d"), _Importer.pooled),
    "adaptive_avg_pool2d": _Importer.adaptive,
    "mean": _Importer.mean,
    **dict.fromkeys(("flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten"), _Importer.reshape),
    **dict.fromkeys(("dropout", "feature_dropout", "contiguous", "alias"), _Importer.same),
}
_ONLY = (
    "linear layers, convolutions in two dimensions, batch normalisation behind them, ReLU, pooling and residual "
    "additions have one"
)
_CURES = {
    **dict.fromkeys(
        ("lstm", "gru", "rnn_tanh", "rnn_relu", "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"),
        ("a recurrent layer needs a state that the circuit does not keep", "use convolutions over a window of time"),
    ),
    **dict.fromkeys(
        (
            "scaled_dot_product_attention",
            "_native_multi_head_attention",
            "_transformer_encoder_layer_fwd",
            "MultiheadAttention",
        ),
        ("attention multiplies activations with each other", "use convolutions or linear layers in its place"),
    ),
    **dict.fromkeys(
        ("softmax", "log_softmax"),
        ("it needs a division", "leave it out: the largest score stays the largest, and the loss can apply it"),
    ),
    **dict.fromkeys(
        ("sigmoid", "tanh", "gelu", "silu", "elu", "selu", "mish", "hardswish", "hardsigmoid", "leaky_relu"),
        ("this activation function is not piecewise linear with 0 below", "train with ReLU"),
    ),
    **dict.fromkeys(
        ("layer_norm", "group_norm", "instance_norm"),
        ("it divides by statistics of its input", "use batch normalisation, which is constant once trained"),
    ),
    **dict.fromkeys(
        ("mul", "matmul", "bmm", "einsum"),
        ("it multiplies activations, and the circuit multiplies by constants", "use linear layers"),
    ),
    "adaptive_max_pool2d": ("its windows are not known", "use a MaxPool2d with windows of the size that it has"),
    "conv1d": ("it convolves in one dimension", "use a Conv2d with a window of height 1"),
}


def _arguments(node: fx.Node, *defaults: Any) -> list[Any]:
    """Return the arguments of a call by position, with those that are missing."""
    given = list(node.args)
    names = [x.name for x in node.target._schema.arguments]  # type: ignore[union-attr]
    return [
        given[n] if n < len(given) else node.kwargs.get(names[n], default)
        for n, default in enumerate(defaults)
        if n < len(names)
    ]


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def described(node: fx.Node) -> str:
    """Return the name of the module that a node is of, with its class: ``features.3 (Conv2d)``."""
    path, kind = _module_of(node)
    return f"{path or 'forward'} ({kind})" if kind else node.name


def _class_of(node: fx.Node) -> str:
    return _module_of(node)[1]


def _module_of(node: fx.Node) -> tuple[str, str]:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    return path, (kind if isinstance(kind, str) else kind.__name__).split(".")[-1]


def _refuse(node: fx.Node, what: str, cure: str) -> NoReturn:
    path, kind = _module_of(node)
    raise ValueError(f"{f'layer {path} ({kind})' if path else kind} cannot be a circuit: {what}; {cure}")
