"""Conversion of a module to its stages, by torch.export: what cannot become neurons is refused by the layer's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx, nn

from apportion.exporting.blamed_layer import ONE_WAY, blamed_layer, decides, first_line, named
from apportion.exporting.spiking.conversion.rate_net import (
    INPUT,
    ConvolutionMap,
    DenseMap,
    FlattenMap,
    LinearMap,
    RateNet,
    RateTerm,
    Shape,
    Stage,
    applied,
    per_channel,
    pool,
    scaled,
    then,
)

_CURES = {
    "max_pool": (
        "the largest rate of several neurons is not a sum of their spikes; use an average pool, or "
        'spiking(max_pool="average"), which puts one there and trains the net again'
    ),
    "softmax": "a softmax divides by what all neurons fire; leave it out at the end, and use no attention",
    "attention": "attention multiplies activations with each other, which spikes cannot; use convolutions",
    "recurrent": "its state and gates are no rates; use convolutions or linear layers over a window of time",
    "norm": "it takes its statistics from each example, which no weights can hold; use BatchNorm2d",
    "activation": "a rate is at least 0 and linear in the current; use ReLU or ReLU6",
    "other": "no rule converts it; build the net of convolutions, linear layers, BatchNorm2d, ReLU, average pools "
    "and sums",
}
_OF_OPERATORS = {
    "softmax": "softmax",  # before "max", which is a part of it
    "max": "max_pool",
    "attention": "attention",
    "matmul": "attention",
    "bmm": "attention",
    "lstm": "recurrent",
    "gru": "recurrent",
    "rnn": "recurrent",
    "layer_norm": "norm",
    "group_norm": "norm",
    "instance_norm": "norm",
    **dict.fromkeys(("sigmoid", "tanh", "gelu", "silu", "elu", "leaky", "prelu", "hard", "mish", "soft"), "activation"),
}  # fmt: skip
_MODULES: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str], ...] = (
    ((nn.RNNBase, nn.RNNCellBase), "recurrent"),
    ((nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer), "attention"),
)


def cure_for_operator(operator: str) -> str:
    """What to say of an operation of torch by this name."""
    return _CURES[next((kind for part, kind in _OF_OPERATORS.items() if part in operator), "other")]


def refuse_modules(module: nn.Module) -> None:
    """Raise ValueError, by the layer's name, for layers that torch.export would take apart."""
    for name, layer in module.named_modules():
        for types, kind in _MODULES:
            if isinstance(layer, types):
                where = f"layer {name} ({type(layer).__name__})" if name else type(layer).__name__
                raise ValueError(f"{where} cannot become spiking neurons: {_CURES[kind]}")


aten = torch.ops.aten


@dataclass(frozen=True, eq=False, kw_only=True)
class _Sum:
    """A value of the program: linear paths from stages, and a constant."""

    shape: Shape
    terms: tuple[RateTerm, ...]
    bias: Tensor
    """A float64 tensor of the whole ``shape``."""
    layers: tuple[str, ...] = ()
    """The layers with weights that the paths go through, with their types."""


@dataclass(eq=False, kw_only=True)
class _Program:
    """The program while it is read."""

    module: nn.Module
    average_instead_of_max: bool
    values: dict[fx.Node, _Sum | Tensor] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)


def lowered(module: nn.Module, sample: Any, *, average_instead_of_max: bool = False) -> RateNet:
    """Return the stages of a module in evaluation mode; ``sample``: two examples or more.

    ``average_instead_of_max``: a max pool is read as an average pool, which computes something else. Raises ValueError
    with the layer's name and the cure where the module is not made of convolutions, linear layers, rectifiers and what
    folds into them.
    """
    if not isinstance(sample, Tensor) or not sample.is_floating_point():
        what = f"a {type(sample).__name__}" if not isinstance(sample, Tensor) else f"of type {sample.dtype}"
        raise ValueError(
            f"{type(module).__name__} takes inputs that are {what}, and a spiking net takes one floating point tensor "
            "as its current: give the module one such input (embed or join the others outside)"
        )
    refuse_modules(module)
    exported = _exported(module, sample)
    program = _Program(module=module, average_instead_of_max=average_instead_of_max)
    _place_inputs(program, exported)
    for node in exported.graph.nodes:
        if node.op == "call_function":
            _step(program, node)
        elif node.op == "output":
            _end(program, exported, node)
    return RateNet(shape=tuple(sample.shape[1:]), stages=tuple(program.stages))


def _exported(module: nn.Module, sample: Tensor) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    try:
        with torch.no_grad():
            return torch.export.export(module, (sample,), dynamic_shapes=shapes)
    except Exception as error:  # torch.export has no one class for what it refuses
        why = ONE_WAY if decides(error) else first_line(error)
        raise ValueError(
            f"{named(module, blamed_layer(module, error))} has no fixed graph for any number of examples, which a "
            f"spiking net needs: {why}; let its forward pass decide nothing by the numbers or the shapes of its inputs"
        ) from error


def _place_inputs(program: _Program, exported: torch.export.ExportedProgram) -> None:
    tensors = {**dict(program.module.named_parameters()), **dict(program.module.named_buffers()), **exported.constants}
    targets = {spec.arg.name: spec.target for spec in exported.graph_signature.input_specs}
    for node in exported.graph.nodes:
        if node.op != "placeholder":
            continue
        target = targets.get(node.name)
        if target is None:
            shape = _shape(node)
            zeros = torch.zeros(shape, dtype=torch.float64)
            program.values[node] = _Sum(shape=shape, terms=(RateTerm(source=INPUT),), bias=zeros)
        else:
            found = tensors.get(target)
            program.values[node] = torch.empty(0) if found is None else found.detach().double()


def _end(program: _Program, exported: torch.export.ExportedProgram, node: fx.Node) -> None:
    results = node.args[0]
    assert isinstance(results, tuple | list)
    if len(results) != 1 or not isinstance(program.values.get(results[0]), _Sum):  # type: ignore[arg-type]
        raise ValueError(
            f"{type(program.module).__name__} has {len(results)} outputs, and a spiking net has one readout: return "
            "one tensor that is computed from the input"
        )
    value = program.values[results[0]]  # type: ignore[index]
    assert isinstance(value, _Sum)
    program.stages.append(_stage(program, value, results[0], "readout"))  # type: ignore[arg-type]


def _step(program: _Program, node: fx.Node) -> None:
    """Read one operation."""
    rule = _RULES.get(node.target)
    if rule is None and not any(isinstance(program.values.get(x), _Sum) for x in node.all_input_nodes):
        return  # what is computed from no activation: a shape, a constant that nothing below uses
    if rule is None:
        _refuse(program, node)
    stages = len(program.stages)
    found = rule(program, node)
    if isinstance(found, _Sum) and len(program.stages) == stages:  # the layers before an activation are in its stage
        given = [value for x in node.all_input_nodes if isinstance(value := program.values.get(x), _Sum)]
        own = [_layer(program, node)] if node.target in _WITH_WEIGHTS else []
        layers = dict.fromkeys([*(name for value in given for name in value.layers), *own])
        found = replace(found, layers=tuple(layers))
    if found is not None:
        program.values[node] = found


def _refuse(program: _Program, node: fx.Node, why: str = "") -> NoReturn:
    layer = _layer(program, node)
    operator = getattr(node.target, "_opname", None) or str(node.target)
    raise ValueError(f"{layer} cannot become spiking neurons: {why or cure_for_operator(operator)}")


def _layer(program: _Program, node: fx.Node) -> str:
    """The layer that an operation was written in, with its type."""
    name = _name(program, node)
    found = dict(program.module.named_modules()).get(name)
    operator = getattr(node.target, "_opname", None) or str(node.target)
    if found is None or found is program.module:
        return f"the function {operator} in {type(program.module).__name__}"
    inner = "" if not list(found.children()) else f", its function {operator},"
    return f"layer {name} ({type(found).__name__}){inner}"


def _name(program: _Program, node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    names = [str(path) for path, _ in stack.values()]
    return names[-1] if names else ""


def _unique(program: _Program, node: fx.Node, otherwise: str) -> str:
    """A name for a stage: the layer's, without what cannot be part of a name in a file."""
    base = (_name(program, node) or otherwise).replace(".", "_")
    taken, name, number = {"input", "output", *(stage.name for stage in program.stages)}, base, 2
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    return name


def _shape(node: fx.Node) -> Shape:
    """The shape of an example."""
    return tuple(int(n) for n in node.meta["val"].shape[1:])


def _stage(program: _Program, value: _Sum, node: fx.Node, otherwise: str, ceiling: float | None = None) -> Stage:
    bias = value.bias.flatten(1)[:, 0] if value.bias.ndim > 1 else value.bias
    if value.bias.ndim > 1 and not torch.allclose(value.bias, bias.reshape(-1, *[1] * (value.bias.ndim - 1))):
        _refuse(
            program,
            node,
            "two layers without an activation between them leave a bias that differs between pixels; put a ReLU "
            "between them, or take the padding of the second or the bias of the first away",
        )
    name = _unique(program, node, otherwise)
    return Stage(
        name=name,
        shape=value.shape,
        terms=value.terms,
        bias=bias.clone(),
        ceiling=ceiling,
        layers=", ".join(value.layers),
    )


# One rule for each operation: (program, node) -> its value, or None where it is not a value.


def _value(program: _Program, node: fx.Node, at: int = 0) -> _Sum:
    found = program.values.get(node.args[at])  # type: ignore[arg-type]
    if not isinstance(found, _Sum):
        _refuse(
            program, node, "it computes with something that is not an activation; make it a layer with its own weights"
        )
    return found


def _constant(program: _Program, argument: Any) -> Tensor | None:
    found = program.values.get(argument) if isinstance(argument, fx.Node) else None
    return found if isinstance(found, Tensor) else None


def _mapped(value: _Sum, new: LinearMap) -> _Sum:
    terms = tuple(replace(term, maps=then(term.maps, new)) for term in value.terms)
    return _Sum(shape=new.outs, terms=terms, bias=applied([new], value.bias[None])[0])


def _convolution(program: _Program, node: fx.Node) -> _Sum:
    value, weight = _value(program, node), _constant(program, node.args[1])
    if weight is None or len(value.shape) != 3:
        _refuse(program, node, "its weights are computed from the input; give it weights of its own")
    bias, stride, padding, dilation, groups = _filled(node, (None, [1, 1], [0, 0], [1, 1], 1), skip=2)
    if isinstance(padding, str):
        padding = _named_padding(program, node, padding, weight, dilation)
    new = ConvolutionMap(
        ins=value.shape, weight=weight, stride=_pair(stride), padding=_pair(padding), dilation=_pair(dilation),
        groups=groups,
    )  # fmt: skip
    return _shifted(_mapped(value, new), _constant(program, bias))


def _named_padding(program: _Program, node: fx.Node, name: str, weight: Tensor, dilation: Any) -> list[int]:
    spans = [d * (k - 1) for d, k in zip(_pair(dilation), weight.shape[2:], strict=True)]
    if name == "same" and any(span % 2 for span in spans):
        _refuse(program, node, "its padding differs between two sides; use kernels of odd size")
    return [span // 2 if name == "same" else 0 for span in spans]


def _linear(program: _Program, node: fx.Node) -> _Sum:
    value, weight = _value(program, node), _constant(program, node.args[1])
    if weight is None or len(value.shape) != 1:
        _refuse(program, node, "it is applied to more than one dimension; flatten its input first")
    (bias,) = _filled(node, (None,), skip=2)
    return _shifted(_mapped(value, DenseMap(weight=weight)), _constant(program, bias))


def _batch_norm(program: _Program, node: fx.Node) -> _Sum:
    value = _value(program, node)
    weight, bias, mean, variance = (_constant(program, argument) for argument in node.args[1:5])
    if node.args[5] or mean is None or variance is None:
        _refuse(program, node, "it takes its statistics from the batch; use track_running_stats=True")
    factor = (variance + cast(float, node.args[7])).rsqrt()
    factor = factor if weight is None else factor * weight
    shift = -mean * factor if bias is None else bias - mean * factor
    return _shifted(_multiplied(value, factor), shift)


def _multiplied(value: _Sum, factor: Tensor) -> _Sum:
    terms = tuple(replace(term, maps=scaled(term.maps, factor, value.shape)) for term in value.terms)
    return replace(value, terms=terms, bias=value.bias * per_channel(factor, len(value.shape)))


def _shifted(value: _Sum, bias: Tensor | None) -> _Sum:
    return value if bias is None else replace(value, bias=value.bias + per_channel(bias, len(value.shape)))


def _add(program: _Program, node: fx.Node, sign: float = 1.0) -> _Sum:
    left, right = (program.values.get(x) if isinstance(x, fx.Node) else x for x in node.args[:2])
    sign *= cast(float, node.kwargs.get("alpha", 1))
    if isinstance(left, _Sum) and isinstance(right, int | float):
        return replace(left, bias=left.bias + sign * right)
    if not isinstance(left, _Sum) or not isinstance(right, _Sum) or left.shape != right.shape:
        _refuse(program, node, "it adds something else than two activations of the same shape")
    other = right if sign == 1 else _multiplied(right, torch.full(right.shape[:1], sign, dtype=torch.float64))
    return _Sum(shape=left.shape, terms=left.terms + other.terms, bias=left.bias + other.bias)


def _times(program: _Program, node: fx.Node, *, divide: bool = False) -> _Sum:
    value, number = _value(program, node), node.args[1]
    if not isinstance(number, int | float):
        _refuse(program, node, "it multiplies activations with each other, which spikes cannot; use sums")
    return _multiplied(value, torch.full(value.shape[:1], 1 / number if divide else number, dtype=torch.float64))


def _rectify(program: _Program, node: fx.Node, ceiling: float | None = None) -> _Sum:
    value = _value(program, node)
    program.stages.append(_stage(program, value, node, "relu", ceiling))
    zeros = torch.zeros(value.shape, dtype=torch.float64)
    return _Sum(shape=value.shape, terms=(RateTerm(source=len(program.stages) - 1),), bias=zeros)


def _clip(program: _Program, node: fx.Node, default: tuple[Any, Any] = (None, None)) -> _Sum:
    low, high = _filled(node, default, skip=1)
    if low != 0 or (high is not None and not high > 0):
        _refuse(program, node, f"it clips at {low} and {high}, and a rate is at least 0; use ReLU or ReLU6")
    return _rectify(program, node, None if high is None else float(high))


def _average(program: _Program, node: fx.Node) -> _Sum:
    value = _value(program, node)
    kernel, stride, padding, ceil, counted, divisor = _filled(node, (None, [], [0, 0], False, True, None), skip=1)
    odd = _left_over(value, kernel, stride, padding)
    if (any(padding) and not counted) or divisor is not None or (ceil and any(odd)):
        _refuse(program, node, "its windows have different numbers of pixels; use an average pool without padding")
    return _mapped(value, pool(value.shape, _pair(kernel), _pair(stride or kernel), _pair(padding)))


def _left_over(value: _Sum, kernel: Any, stride: Any, padding: Any) -> list[int]:
    """The number of rows and of columns behind the last whole window."""
    spans = zip(value.shape[1:], _pair(kernel), _pair(stride or kernel), _pair(padding), strict=True)
    return [(n + 2 * p - k) % s for n, k, s, p in spans]


def _adaptive(program: _Program, node: fx.Node) -> _Sum:
    value, size = _value(program, node), _pair(node.args[1])
    if any(n % m for n, m in zip(value.shape[1:], size, strict=True)):
        _refuse(program, node, f"{value.shape[1:]} pixels are no multiple of {size}; use windows of one size")
    kernel = (value.shape[1] // size[0], value.shape[2] // size[1])
    return _mapped(value, pool(value.shape, kernel, kernel, (0, 0)))


def _mean(program: _Program, node: fx.Node) -> _Sum:
    value = _value(program, node)
    dims, keep = _filled(node, (None, False), skip=1)
    if len(value.shape) != 3 or sorted(d % 4 for d in dims or ()) != [2, 3]:
        _refuse(program, node, "it averages over other dimensions than an image's height and width")
    whole = (value.shape[1], value.shape[2])
    pooled = _mapped(value, pool(value.shape, whole, whole, (0, 0)))
    return pooled if keep else _mapped(pooled, FlattenMap(ins=pooled.shape))


def _max(program: _Program, node: fx.Node) -> _Sum:
    if not program.average_instead_of_max:
        _refuse(program, node, cure_for_operator("max_pool2d"))
    value = _value(program, node)
    kernel, stride, padding, dilation, ceil = _filled(node, (None, [], [0, 0], [1, 1], False), skip=1)
    if _pair(dilation) != (1, 1):
        _refuse(program, node, "an average pool in its place has no dilation; use dilation=1")
    if ceil and any(_left_over(value, kernel, stride, padding)):
        _refuse(program, node, "its last windows are cut off (ceil_mode), and an average needs whole ones; pad before")
    return _mapped(value, pool(value.shape, _pair(kernel), _pair(stride or kernel), _pair(padding)))


def _reshape(program: _Program, node: fx.Node) -> _Sum:
    value, shape = _value(program, node), _shape(node)
    if shape == value.shape:
        return value
    if len(shape) != 1:
        _refuse(program, node, f"it makes {shape} of {value.shape}; only flattening keeps the order of spikes' weights")
    return _mapped(value, FlattenMap(ins=value.shape))


def _slice(program: _Program, node: fx.Node) -> _Sum:
    value = _value(program, node)
    dim, start, end, step = _filled(node, (0, None, None, 1), skip=1)
    size = (value.shape[dim - 1] if dim else None) if isinstance(dim, int) else None
    whole = not start and (end is None or (isinstance(end, int) and (size is None or end >= size)))
    if whole and step == 1:
        return value
    if not whole or len(value.shape) != 3 or dim not in (2, 3):
        _refuse(program, node, "it takes a part of the activations; only whole rows and columns at a step are folded")
    ones = torch.ones(value.shape[0], 1, 1, 1, dtype=torch.float64)
    stride = (step, 1) if dim == 2 else (1, step)
    return _mapped(value, ConvolutionMap(ins=value.shape, weight=ones, stride=stride, groups=len(ones), fixed=True))


def _pad(program: _Program, node: fx.Node) -> _Sum:
    value = _value(program, node)
    given: list[Any] = [*node.args[1:], *node.kwargs.values()]
    pads, rest = list(given[0]), given[1:]
    left, right, top, bottom, before, after = pads + [0] * (6 - len(pads))
    odd = [x for x in rest if x not in ("constant", None, 0, 0.0)]
    if len(value.shape) != 3 or odd or left != right or top != bottom:
        _refuse(program, node, "it pads with other numbers than zeros, or one side more than the other")
    channels = value.shape[0]
    weight = torch.zeros(channels + before + after, channels, 1, 1, dtype=torch.float64)
    weight[before : before + channels, :, 0, 0] = torch.eye(channels, dtype=torch.float64)
    groups = 1
    if not before and not after:
        weight, groups = torch.ones(channels, 1, 1, 1, dtype=torch.float64), channels
    padding = (int(top), int(left))
    return _mapped(
        value, ConvolutionMap(ins=value.shape, weight=weight, padding=padding, groups=groups, fixed=True)
    )  # fmt: skip


def _pair(x: Any) -> tuple[int, int]:
    numbers = [int(x)] * 2 if isinstance(x, int) else [int(n) for n in x]
    return (numbers[0], numbers[-1])


def _filled(node: fx.Node, defaults: tuple[Any, ...], *, skip: int) -> list[Any]:
    """The arguments after the first ``skip``, with defaults for those that are not given."""
    names = [argument.name for argument in node.target._schema.arguments][skip:]  # type: ignore[union-attr]
    given = list(node.args[skip:])
    rest = [
        node.kwargs.get(name, default)
        for name, default in zip(names[len(given) :], defaults[len(given) :], strict=False)
    ]
    found = given + rest  # an operator may have fewer arguments: clamp_min has no upper limit
    return (found + list(defaults[len(found) :]))[: len(defaults)]


_WITH_WEIGHTS = (aten.conv2d.default, aten.conv2d.padding, aten.linear.default)
_RULES: dict[Any, Callable[[_Program, fx.Node], _Sum | None]] = {
    **dict.fromkeys((aten.conv2d.default, aten.conv2d.padding), _convolution),
    aten.linear.default: _linear,
    aten.batch_norm.default: _batch_norm,
    **dict.fromkeys((aten.relu.default, aten.relu_.default), _rectify),
    aten.relu6.default: lambda program, node: _rectify(program, node, 6.0),
    **dict.fromkeys((aten.hardtanh.default, aten.hardtanh_.default), partial(_clip, default=(-1.0, 1.0))),
    **dict.fromkeys((aten.clamp.default, aten.clamp_.default), _clip),
    **dict.fromkeys((aten.clamp_min.default, aten.clamp_min_.default), _clip),
    **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor), _add),
    **dict.fromkeys((aten.sub.Tensor, aten.sub_.Tensor), partial(_add, sign=-1.0)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul_.Tensor), _times),
    **dict.fromkeys((aten.div.Tensor, aten.div_.Tensor), partial(_times, divide=True)),
    aten.avg_pool2d.default: _average,
    aten.adaptive_avg_pool2d.default: _adaptive,
    aten.mean.dim: _mean,
    aten.max_pool2d.default: _max,
    **dict.fromkeys((aten.flatten.using_ints, aten.view.default, aten.reshape.default), _reshape),
    aten.slice.Tensor: _slice,
    **dict.fromkeys((aten.pad.default, aten.constant_pad_nd.default), _pad),
    **dict.fromkeys((aten.contiguous.default, aten.alias.default, aten.clone.default, aten.detach.default), _value),
    **dict.fromkeys((aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default), _value),
    aten.sym_size.int: lambda program, node: None,
}
