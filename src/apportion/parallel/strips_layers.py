"""What a layer of torch does on a strip: by its class, exactly; another class may do anything, and is refused.

``torch.nn.functional`` has the same in functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from apportion.parallel import channels, spatial_layers, spatial_norm, spatial_pools
from apportion.parallel.spatial_layers import Conv, each
from apportion.parallel.spatial_pools import Pool
from apportion.parallel.strips import strip
from apportion.parallel.strips_functions import (
    Call,
    arguments,
    dropout,
    elementwise,
    flatten,
    padded_by,
    softmax,
    whole,
)
from apportion.parallel.strips_holding import Holding, rows_of
from apportion.parallel.strips_tensor import Strip, cut, summed

Layer = Callable[[Holding, Any, Any], Any]
"""(holding, the layer, its input): the input is a strip, or of what ``divides`` a whole tensor."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVERAGE = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ADAPTIVE_AVERAGE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_ADAPTIVE_MAX = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_ELEMENTWISE = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh,
    nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
_PADS = {
    "constant": (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    "reflect": (nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    "replicate": (nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    "circular": (nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
}


def image(holding: Holding, x: Any, dims: int) -> Strip:
    """An image of so many dimensions, cut."""
    if isinstance(x, Tensor):
        if x.dim() != dims + 2:
            raise ValueError(f"its input has {x.dim()} dimensions, and an image of {dims} has {dims + 2}")
        return cut(x, holding.image_dim(dims), holding.group)
    if x.flat or x.own.dim() != dims + 2:
        raise ValueError(f"its input is {x.held()}: no image of {dims} dimensions")
    if x.dim == 0:
        raise ValueError(f"its input is {x.held()}, which is along the batch")
    if (x.dim == 1) == holding.spatial:
        raise ValueError(f"its input is {x.held()}, and dimension {x.dim} is not what split={holding.split!r} cuts")
    return cast(Strip, x)


def _conv(holding: Holding, layer: Any, x: Any) -> Any:
    settings = Conv.of(layer.weight, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    if holding.spatial:
        x = image(holding, x, layer.weight.dim() - 2)
        return spatial_layers.conv(x, holding.use(layer.weight), holding.use(layer.bias), settings, holding.group)
    shape = torch.Size([layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size])
    made = channels.conv(
        holding, x, shape, layer.bias is not None, settings, lambda name, d, p: holding.part(layer, name, d, p)
    )
    return made if made is not None else _alike(holding, layer, x)


def conv_call(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``functional.conv2d`` with weights that are no layer's: every rank has all of them."""
    names = "input weight bias stride padding dilation groups"
    given = arguments(names, args, kwargs, bias=None, stride=1, padding=0, dilation=1, groups=1)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    settings = Conv.of(weight, given["stride"], given["padding"], given["dilation"], given["groups"])
    if holding.spatial:
        x = image(holding, x, weight.dim() - 2)
        return spatial_layers.conv(x, holding.use(weight), holding.use(bias), settings, holding.group)

    def take(name: str, dim: int, positions: Sequence[int] | None) -> Tensor:
        if positions is None:
            holding.used_alike(given[name])
            return cast(Tensor, given[name])
        return rows_of(holding.use(given[name]), dim, positions)

    made = channels.conv(holding, x, weight.shape, bias is not None, settings, take)
    if made is None:
        raise ValueError(f"{weight.shape[0]} channels are too few for {holding.group.size} workers")
    return made


def _alike(holding: Holding, layer: nn.Module, x: Any) -> Any:
    """The plain layer, on every rank."""
    holding.used_alike(layer)
    return layer(whole(holding, x) if isinstance(x, Strip) else x)


def _conv_transpose(holding: Holding, layer: Any, x: Any) -> Any:
    if not holding.spatial:
        return _alike(holding, layer, x)
    settings = Conv.of(layer.weight, layer.stride, layer.padding, layer.dilation, layer.groups)
    x = image(holding, x, layer.weight.dim() - 2)
    weight, bias = holding.use(layer.weight), holding.use(layer.bias)
    return spatial_layers.conv_transpose(x, weight, bias, settings, layer.output_padding, holding.group)


def _max_pool(holding: Holding, layer: Any, x: Any) -> Any:
    dims = _MAX.index(type(layer)) + 1
    if layer.return_indices:
        raise ValueError("return_indices=True numbers the pixels of the whole image")
    if not holding.spatial:
        return x.like(layer(x.own))
    pool = Pool.of(dims, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)
    return spatial_pools.max_pool(image(holding, x, dims), pool, holding.group)


def _average_pool(holding: Holding, layer: Any, x: Any) -> Any:
    dims = _AVERAGE.index(type(layer)) + 1
    if not holding.spatial:
        return x.like(layer(x.own))
    pool = Pool.of(dims, layer.kernel_size, layer.stride, layer.padding, 1, layer.ceil_mode)
    divisor = getattr(layer, "divisor_override", None)
    x = image(holding, x, dims)
    return spatial_pools.average_pool(x, pool, holding.group, padded=layer.count_include_pad, divisor=divisor)


def _adaptive(kind: str) -> Layer:
    kinds = {"avg": _ADAPTIVE_AVERAGE, "max": _ADAPTIVE_MAX}[kind]

    def pool(holding: Holding, layer: Any, x: Any) -> Any:
        if getattr(layer, "return_indices", False):
            raise ValueError("return_indices=True numbers the pixels of the whole image")
        if not holding.spatial:
            return x.like(layer(x.own))
        x = image(holding, x, kinds.index(type(layer)) + 1)
        return spatial_pools.adaptive_pool(x, layer.output_size, kind, holding.group)

    return pool


def _batch_norm(holding: Holding, layer: Any, x: Strip) -> Any:
    if x.flat:
        return _alike(holding, layer, x)
    if not holding.spatial:
        return channels.batch_norm(holding, layer, x)
    for p in (layer.weight, layer.bias):
        holding.use(p)
    if holding.planning:
        holding.norms.append(layer)
    return spatial_norm.batch_norm(x, layer, holding.attendance)


def _group_norm(holding: Holding, layer: Any, x: Strip) -> Any:
    if not holding.spatial:
        found = channels.group_norm(holding, layer, x)
        return found if found is not None else _alike(holding, layer, x)
    weight, bias = holding.use(layer.weight), holding.use(layer.bias)
    return spatial_norm.group_norm(x, layer.num_groups, weight, bias, layer.eps, holding.group)


def _instance_norm(holding: Holding, layer: Any, x: Strip) -> Any:
    if layer.track_running_stats:
        raise ValueError("its running statistics are means over examples: use track_running_stats=False")
    if not holding.spatial:
        return _alike(holding, layer, x)
    weight, bias = holding.use(layer.weight), holding.use(layer.bias)
    return spatial_norm.group_norm(x, x.own.shape[1], weight, bias, layer.eps, holding.group)


def _layer_norm(holding: Holding, layer: Any, x: Strip) -> Any:
    dims = len(layer.normalized_shape)
    weight, bias = holding.use(layer.weight), holding.use(layer.bias)
    if x.flat:
        raise ValueError(f"{x.held()} was flattened: its statistics would be taken of it as it was before")
    if x.dim < x.own.dim() - dims:  # it looks at what this rank has
        return x.like(functional.layer_norm(x.own, layer.normalized_shape, weight, bias, layer.eps))
    return spatial_norm.layer_norm(x, dims, weight, bias, layer.eps, holding.group)


def _local_response_norm(holding: Holding, layer: Any, x: Strip) -> Strip:
    settings = (layer.size, layer.alpha, layer.beta, layer.k)
    return spatial_pools.local_response_norm(x, settings, holding.group)


def _linear(holding: Holding, layer: Any, x: Strip) -> Any:
    """Of a flattened image: each rank keeps the columns for the features it has, and the outputs are terms of a sum."""
    if x.flat:
        own = x.own.flatten(1)
        y = summed(functional.linear(own, holding.part(layer, "weight", 1, _features(x, holding))), holding.group)
        return y if layer.bias is None else y + holding.part(layer, "bias", 0, None)
    if x.dim == x.own.dim() - 1:
        return _alike(holding, layer, x)
    return x.like(functional.linear(x.own, holding.use(layer.weight), holding.use(layer.bias)))


def _features(x: Strip, holding: Holding) -> Sequence[int]:
    """Where this rank's part of an image is, once it is flat."""
    shape, rows = Strip(x.own, x.dim, x.bounds).shape, strip(x.bounds, holding.group.rank)
    inner = shape[x.dim + 1 :].numel()
    if x.dim == 1:
        return range(rows.start * inner, rows.stop * inner)
    places = torch.arange(shape[1:].numel()).view(shape[1:]).narrow(x.dim - 1, rows.start, rows.n)
    return list(places.flatten().tolist())


def _elementwise(holding: Holding, layer: Any, x: Strip) -> Strip:
    return x.like(layer(x.own))


def _dropout(holding: Holding, layer: Any, x: Strip) -> Strip:
    return dropout(holding, getattr(functional, type(layer).__name__.lower()), (x, layer.p, layer.training), {})


def _flatten(holding: Holding, layer: Any, x: Strip) -> Strip:
    return flatten(holding, "flatten", (x, layer.start_dim, layer.end_dim), {})


def _softmax(holding: Holding, layer: Any, x: Strip) -> Strip:
    call = functional.log_softmax if isinstance(layer, nn.LogSoftmax) else functional.softmax
    return softmax(holding, call, (x, layer.dim), {})


def _softmax_2d(holding: Holding, layer: Any, x: Strip) -> Strip:
    return softmax(holding, functional.softmax, (x, 1), {})


def _pad(mode: str) -> Layer:
    def padded(holding: Holding, layer: Any, x: Strip) -> Strip:
        return padded_by(holding, x, list(layer.padding), mode, float(getattr(layer, "value", 0.0)))

    return padded


def _upsample(holding: Holding, layer: Any, x: Strip) -> Strip:
    return upsample(
        holding, functional.interpolate, (x, layer.size, layer.scale_factor, layer.mode, layer.align_corners), {}
    )


def upsample(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Strip:
    """``functional.interpolate`` to a multiple of the rows."""
    names = "input size scale_factor mode align_corners recompute_scale_factor antialias"
    given = arguments(names, args, kwargs, size=None, scale_factor=None, mode="nearest", align_corners=None)
    x: Strip = given["input"]
    mode, dims = given["mode"], len(x.shape) - 2
    across = list(x.shape[2:])
    if given["size"] is not None:
        target = list(each(given["size"], dims))
    else:
        factor = given["scale_factor"]
        factors = list(factor) if isinstance(factor, Sequence) else [factor] * dims
        target = [int(n * f) for n, f in zip(across, factors, strict=True)]
        if any(t != n * f for t, n, f in zip(target, across, factors, strict=True)):
            raise ValueError(f"scale_factor={factor} gives no whole number of rows")
    if mode not in ("nearest", "nearest-exact", "linear", "bilinear", "trilinear"):
        raise ValueError(f'mode="{mode}" looks further than one row: use "nearest" or "bilinear"')
    if given["align_corners"] or given.get("antialias"):
        raise ValueError("align_corners=True and antialias=True give every row a weight of its own")
    if x.dim == 1:
        return x.like(functional.interpolate(x.own, target, mode=mode, align_corners=given["align_corners"]))
    if target[x.dim - 2] % x.length:
        raise ValueError(f"{x.length} rows become {target[x.dim - 2]}, which is no multiple of them")
    return spatial_pools.upsample(x, target[x.dim - 2] // x.length, mode, holding.group, target)


def _pixel_shuffle(holding: Holding, layer: Any, x: Strip) -> Strip:
    if not holding.spatial:
        raise ValueError("it makes rows of channels, which lie on several ranks")
    return spatial_pools.pixel_shuffle(x, layer.upscale_factor)


LAYERS: Mapping[type[nn.Module], Layer] = {
    **dict.fromkeys(_CONVOLUTIONS, _conv),
    **dict.fromkeys(_TRANSPOSED, _conv_transpose),
    **dict.fromkeys(_MAX, _max_pool),
    **dict.fromkeys(_AVERAGE, _average_pool),
    **dict.fromkeys(_ADAPTIVE_AVERAGE, _adaptive("avg")),
    **dict.fromkeys(_ADAPTIVE_MAX, _adaptive("max")),
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
    **dict.fromkeys(_INSTANCE_NORMS, _instance_norm),
    **dict.fromkeys(_DROPOUTS, _dropout),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **{kind: _pad(mode) for mode, kinds in _PADS.items() for kind in kinds},
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.LocalResponseNorm: _local_response_norm,
    nn.PReLU: channels.prelu,
    nn.Linear: _linear,
    nn.Flatten: _flatten,
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.Softmax2d: _softmax_2d,
    nn.Identity: lambda holding, layer, x: x,
    nn.Upsample: _upsample,
    nn.UpsamplingNearest2d: _upsample,
    nn.PixelShuffle: _pixel_shuffle,
}
_WINDOWS = (*_TRANSPOSED, *_MAX, *_AVERAGE, *_ADAPTIVE_AVERAGE, *_ADAPTIVE_MAX)


def _pool_call(kind: type[nn.Module]) -> Call:
    """A pooling function, by the layer that has the same settings in the same order."""
    layer = LAYERS[kind]

    def call(holding: Holding, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return layer(holding, kind(*args[1:], **{n: v for n, v in kwargs.items() if n != "input"}), args[0])

    return call


def known_layer_calls() -> dict[Any, Call]:
    """What ``torch.nn.functional`` has of them."""
    calls: dict[Any, Call] = {functional.interpolate: upsample, functional.prelu: elementwise}
    for d, kinds in enumerate(zip(_MAX, _AVERAGE, _ADAPTIVE_AVERAGE, _ADAPTIVE_MAX, strict=True), 1):
        names = (f"max_pool{d}d", f"avg_pool{d}d", f"adaptive_avg_pool{d}d", f"adaptive_max_pool{d}d")
        for name, kind in zip(names, kinds, strict=True):
            places = (functional, torch) if hasattr(torch, name) and name != f"max_pool{d}d" else (functional,)
            calls |= {getattr(place, name): _pool_call(kind) for place in places}
        calls[getattr(functional, f"conv{d}d")] = conv_call
    return calls


def divides(of: Any, *, spatial: bool) -> bool:
    """Does this layer, or this function, begin to divide the work where every rank has the whole image?"""
    if isinstance(of, nn.Module):
        return type(of) in _CONVOLUTIONS or (spatial and type(of) in _WINDOWS)
    found = _LAYER_CALLS.get(of)
    return found is conv_call or (spatial and found is not None and found not in (upsample, elementwise))


_LAYER_CALLS = known_layer_calls()
