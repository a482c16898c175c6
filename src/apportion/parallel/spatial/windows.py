"""Layers that look around a pixel, on strips: convolutions, pooling, upsampling; and the functions of torch that do
what these layers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from apportion.parallel.spatial import channels, conv, pooling
from apportion.parallel.spatial.call_arguments import Call, arguments, image_of, unflat
from apportion.parallel.spatial.conv import Conv, each
from apportion.parallel.spatial.placements import SpatialPlan, rows_of
from apportion.parallel.spatial.pooling import Pool
from apportion.parallel.spatial.strip import SpatialShard, cut, nothing

Layer = Callable[[SpatialPlan, Any, Any], Any]
"""The function of a layer on strips, called with (plan, the layer, its input): the input is a strip, or for a layer
that ``divides`` accepts a whole tensor."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGE = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE_AVERAGE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
ADAPTIVE_MAX = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
POOL_ARGUMENTS = {
    "max": "input kernel_size stride padding dilation ceil_mode return_indices",
    "avg": "input kernel_size stride padding ceil_mode count_include_pad divisor_override",
    "adaptive": "input output_size return_indices",
}


def image(plan: SpatialPlan, x: Any, dims: int) -> SpatialShard:
    """An image of ``dims`` dimensions, cut along the dimension that the plan cuts; ValueError for a strip that is cut
    along another one."""
    if isinstance(x, Tensor):
        if x.dim() != dims + 2:
            raise ValueError(f"its input has {x.dim()} dimensions, and an image of {dims} has {dims + 2}")
        return cut(x, plan.image_dim(dims), plan.group)
    if x.flat or x.own.dim() != dims + 2:
        raise ValueError(f"its input is {x.describe()}: no image of {dims} dimensions")
    if x.dim == 0:
        raise ValueError(f"its input is {x.describe()}, which is along the batch")
    if (x.dim == 1) == plan.spatial:
        raise ValueError(f"its input is {x.describe()}, and dimension {x.dim} is not what split={plan.split!r} cuts")
    return cast(SpatialShard, x)


def _by_channel(layer: Callable[[Tensor], Tensor], x: SpatialShard) -> SpatialShard:
    """Apply a layer that looks at each channel, or each example, by itself to the channels or rows that this rank
    has."""
    own = x.own
    if own.shape[x.dim]:
        return x.like(layer(own))
    one = list(own.shape)
    one[x.dim] = 1
    y = layer(own.new_zeros(one))
    return x.like(nothing([*y.shape[: x.dim], 0, *y.shape[x.dim + 1 :]], own, dtype=y.dtype))


def conv_layer(plan: SpatialPlan, layer: Any, x: Any) -> Any:
    settings = Conv.from_arguments(
        layer.weight, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode
    )
    dims = layer.weight.dim() - 2
    if plan.spatial:
        x = image(plan, x, dims)
        return conv.conv(x, plan.used_on_strips(layer.weight), plan.used_on_strips(layer.bias), settings, plan.group)
    shape = torch.Size([layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size])
    made = channels.conv(
        plan,
        _of_channels(plan, x, dims),
        shape,
        layer.bias is not None,
        settings,
        lambda name, d, p: plan.parameter_slice(layer, name, d, p),
    )
    return made if made is not None else plan.on_all(layer, x)


def _of_channels(plan: SpatialPlan, x: Any, dims: int) -> Any:
    """An image that is whole, or whose channels are cut."""
    if isinstance(x, SpatialShard) or x.dim() != dims + 2:
        return image(plan, x, dims)
    return x


def conv_call(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute a convolution such as ``functional.conv2d`` whose weights belong to no layer: every rank has all of
    them."""
    names = "input weight bias stride padding dilation groups"
    given = arguments(names, args, kwargs, bias=None, stride=1, padding=0, dilation=1, groups=1)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    if isinstance(weight, SpatialShard) or isinstance(bias, SpatialShard):
        raise ValueError("its weights are a part of an image")
    settings = Conv.from_arguments(weight, given["stride"], given["padding"], given["dilation"], given["groups"])
    if plan.spatial:
        x = image(plan, x, weight.dim() - 2)
        return conv.conv(x, plan.used_on_strips(weight), plan.used_on_strips(bias), settings, plan.group)

    def slice_of(name: str, dim: int, positions: Sequence[int] | None) -> Tensor:
        if positions is None:
            plan.used_alike(given[name])
            return cast(Tensor, given[name])
        return rows_of(plan.used_on_strips(given[name]), dim, positions)

    x = _of_channels(plan, x, weight.dim() - 2)
    made = channels.conv(plan, x, weight.shape, bias is not None, settings, slice_of)
    if made is None:
        raise ValueError(f"{weight.shape[0]} channels are too few for {plan.group.size} workers")
    return made


def conv_transpose_layer(plan: SpatialPlan, layer: Any, x: Any) -> Any:
    if not plan.spatial:
        return plan.on_all(layer, x)
    settings = Conv.from_arguments(layer.weight, layer.stride, layer.padding, layer.dilation, layer.groups)
    x = image(plan, x, layer.weight.dim() - 2)
    weight, bias = plan.used_on_strips(layer.weight), plan.used_on_strips(layer.bias)
    return conv.conv_transpose(x, weight, bias, settings, layer.output_padding, plan.group)


def max_pool(plan: SpatialPlan, layer: Any, x: Any) -> Any:
    dims = MAX.index(type(layer)) + 1
    if layer.return_indices:
        raise ValueError("return_indices=True numbers the pixels of the whole image")
    x = image(plan, x, dims)
    if not plan.spatial:
        return _by_channel(layer, x)
    pool = Pool.from_arguments(dims, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)
    return pooling.max_pool(x, pool, plan.group)


def average_pool(plan: SpatialPlan, layer: Any, x: Any) -> Any:
    dims = AVERAGE.index(type(layer)) + 1
    x = image(plan, x, dims)
    if not plan.spatial:
        return _by_channel(layer, x)
    pool = Pool.from_arguments(dims, layer.kernel_size, layer.stride, layer.padding, 1, layer.ceil_mode)
    divisor = getattr(layer, "divisor_override", None)
    return pooling.average_pool(x, pool, plan.group, padded=layer.count_include_pad, divisor=divisor)


def adaptive(kind: str) -> Layer:
    kinds = {"avg": ADAPTIVE_AVERAGE, "max": ADAPTIVE_MAX}[kind]

    def pool(plan: SpatialPlan, layer: Any, x: Any) -> Any:
        if getattr(layer, "return_indices", False):
            raise ValueError("return_indices=True numbers the pixels of the whole image")
        x = image(plan, x, kinds.index(type(layer)) + 1)
        if not plan.spatial:
            return _by_channel(layer, x)
        return pooling.adaptive_pool(x, layer.output_size, kind, plan.group)

    return pool


def resize(plan: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    """Run an upsampling layer as ``functional.interpolate``."""
    given = (x, layer.size, layer.scale_factor, layer.mode, layer.align_corners, layer.recompute_scale_factor)
    return interpolate(plan, functional.interpolate, given, {})


def interpolate(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Compute ``functional.interpolate`` to a multiple of the rows."""
    names = "input size scale_factor mode align_corners recompute_scale_factor antialias"
    given = arguments(names, args, kwargs, size=None, scale_factor=None, mode="nearest", align_corners=None)
    x, mode = unflat(image_of(given)), given["mode"]
    if x.dim < 2:  # the image itself is whole
        rest = {name: value for name, value in given.items() if name != "input"}
        return _by_channel(lambda own: functional.interpolate(own, **rest), x)
    across = list(x.shape[2:])
    factors: list[float] | None = None
    if given["size"] is not None:
        target = list(each(given["size"], len(across)))
    else:
        factor = given["scale_factor"]
        factors = list(factor) if isinstance(factor, Sequence) else [factor] * len(across)
        target = [int(n * f) for n, f in zip(across, factors, strict=True)]
        if any(t != n * f for t, n, f in zip(target, across, factors, strict=True)):
            raise ValueError(f"scale_factor={factor} gives no whole number of rows")
        if given.get("recompute_scale_factor"):
            factors = None
    if mode not in ("nearest", "nearest-exact", "linear", "bilinear", "trilinear"):
        raise ValueError(f'mode="{mode}" looks further than one row: use "nearest" or "bilinear"')
    if given["align_corners"] or given.get("antialias"):
        raise ValueError("align_corners=True and antialias=True give every row a weight of its own")
    if target[x.dim - 2] % x.length:
        raise ValueError(f"{x.length} rows become {target[x.dim - 2]}, which is not a multiple of them")
    return pooling.upsample(x, target, factors, mode, plan.group)


def pixel_shuffle(plan: SpatialPlan, layer: Any, x: Any) -> SpatialShard:
    if not plan.spatial:
        raise ValueError("it makes rows of channels, which lie on several ranks")
    return pooling.pixel_shuffle(image(plan, x, 2), layer.upscale_factor)


WINDOWS: Mapping[type[nn.Module], Layer] = {
    **dict.fromkeys(CONVOLUTIONS, conv_layer),
    **dict.fromkeys(TRANSPOSED, conv_transpose_layer),
    **dict.fromkeys(MAX, max_pool),
    **dict.fromkeys(AVERAGE, average_pool),
    **dict.fromkeys(ADAPTIVE_AVERAGE, adaptive("avg")),
    **dict.fromkeys(ADAPTIVE_MAX, adaptive("max")),
}
"""The layers that begin to divide the work where every rank has the whole image."""


def _pool_call(kind: type[nn.Module], names: str) -> Call:
    """A pooling function, computed as the layer that does the same."""
    layer = WINDOWS[kind]

    def call(plan: SpatialPlan, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = arguments(names, args, kwargs)
        x = given.pop("input")
        return layer(plan, kind(**given), x)

    return call


def _window_calls() -> dict[Any, Call]:
    """The functions of torch that do what convolution and pooling layers do, with what computes each on strips."""
    calls: dict[Any, Call] = {}
    for d, kinds in enumerate(zip(MAX, AVERAGE, ADAPTIVE_AVERAGE, ADAPTIVE_MAX, strict=True), 1):
        names = (f"max_pool{d}d", f"avg_pool{d}d", f"adaptive_avg_pool{d}d", f"adaptive_max_pool{d}d")
        taken = (POOL_ARGUMENTS["max"], POOL_ARGUMENTS["avg"], *[POOL_ARGUMENTS["adaptive"]] * 2)
        for name, kind, its in zip(names, kinds, taken, strict=True):
            calls[getattr(functional, name)] = _pool_call(kind, its)
            if "avg" in name and hasattr(torch, name):  # torch's own maxima are pairs
                calls[getattr(torch, name)] = _pool_call(kind, its)
        calls[getattr(functional, f"conv{d}d")] = conv_call
    return calls


WINDOW_CALLS = _window_calls()


def divides(of: Any, *, spatial: bool) -> bool:
    """Return whether this layer, or this function, begins to divide the work where every rank has the whole image."""
    if isinstance(of, nn.Module):
        return type(of) in CONVOLUTIONS or (spatial and type(of) in WINDOWS)
    found = WINDOW_CALLS.get(of)
    return found is conv_call or (spatial and found is not None)
