"""The computation of each layer of torch on a strip, by the layer's exact class; another class may do anything, and is
refused.

``torch.nn.functional`` has functions that do what some of these layers do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from apportion.cost_model.elementwise import ACTIVATIONS
from apportion.parallel.spatial import channels, norm, pooling
from apportion.parallel.spatial.call_arguments import Call, arguments, image_of, unflat
from apportion.parallel.spatial.functions import dropout, softmax
from apportion.parallel.spatial.geometry import RowRange, strip
from apportion.parallel.spatial.placements import SpatialPlan, positions, rows_of
from apportion.parallel.spatial.shapes import flatten, padded_by
from apportion.parallel.spatial.strip import SpatialShard, summed
from apportion.parallel.spatial.windows import WINDOW_CALLS, WINDOWS, Layer, interpolate, pixel_shuffle, resize

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_ELEMENTWISE = tuple(getattr(nn, name) for name in ACTIVATIONS.values())
_PADS = {
    "constant": (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    "reflect": (nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    "replicate": (nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    "circular": (nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
}


def _local_response_norm(holding: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    unflat(x)
    settings = (layer.size, layer.alpha, layer.beta, layer.k)
    return pooling.local_response_norm(x, settings, holding.group)


def _linear(holding: SpatialPlan, layer: Any, x: SpatialShard) -> Any:
    """Apply a Linear layer. Of a flattened image each rank keeps the columns for the features it has, and the outputs
    are terms of a sum."""
    if x.flat:
        own = x.own.flatten(1)
        y = summed(functional.linear(own, holding.part(layer, "weight", 1, _features(x, holding))), holding.group)
        return y if layer.bias is None else y + holding.part(layer, "bias", 0, None).to(y.dtype)
    if x.dim == x.own.dim() - 1:
        return holding.on_all(layer, x)
    return x.like(functional.linear(x.own, holding.use(layer.weight), holding.use(layer.bias)))


def _features(x: SpatialShard, holding: SpatialPlan) -> Sequence[int]:
    """The positions of this rank's part of an image among the features, once the image is flat."""
    return _places(
        tuple(SpatialShard(x.own, x.dim, x.bounds).shape[1:]), x.dim - 1, strip(x.bounds, holding.group.rank)
    )


@lru_cache(64)
def _places(shape: tuple[int, ...], dim: int, rows: RowRange) -> Sequence[int]:
    inner = torch.Size(shape[dim + 1 :]).numel()
    if dim == 0:
        return range(rows.start * inner, rows.stop * inner)
    places = torch.arange(torch.Size(shape).numel()).view(shape).narrow(dim, rows.start, rows.n)
    return tuple(places.flatten().tolist())


def _prelu(holding: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    if layer.weight.numel() > 1 and x.flat:
        raise ValueError(f"{x.held()} was flattened, and has a slope for each feature: flatten it later")
    return channels.prelu(holding, layer, x)


def prelu_call(holding: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Compute ``functional.prelu`` with one weight, or with one for each channel."""
    given = arguments("input weight", args, kwargs)
    x, weight = image_of(given), given["weight"]
    if isinstance(weight, SpatialShard) or (x.flat and weight.numel() > 1):
        raise ValueError(f"{x.held()} has no channels that go with these slopes")
    weight = holding.use(weight)
    if x.dim == 1 and weight.numel() > 1:
        weight = rows_of(weight, 0, positions(strip(x.bounds, holding.group.rank)))
    return x.like(functional.prelu(x.own, weight))


def _elementwise(holding: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    return x.like(layer(x.own))


def _dropout(holding: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    call = getattr(functional, type(layer).__name__.lower())
    return dropout(holding, call, (x, layer.p, layer.training, layer.inplace), {})


def _flatten(holding: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    return flatten(holding, "flatten", (x, layer.start_dim, layer.end_dim), {})


def _softmax(holding: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    call = functional.log_softmax if isinstance(layer, nn.LogSoftmax) else functional.softmax
    return softmax(holding, call, (x, layer.dim), {})


def _softmax_2d(holding: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    return softmax(holding, functional.softmax, (x, -3), {})


def _pad(mode: str) -> Layer:
    def padded(holding: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
        return padded_by(holding, x, list(layer.padding), mode, float(getattr(layer, "value", 0.0)))

    return padded


LAYERS: Mapping[type[nn.Module], Layer] = {
    **WINDOWS,
    **dict.fromkeys(_BATCH_NORMS, norm.batch_norm),
    **dict.fromkeys(_INSTANCE_NORMS, norm.instance_norm),
    **dict.fromkeys(_DROPOUTS, _dropout),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **{kind: _pad(mode) for mode, kinds in _PADS.items() for kind in kinds},
    nn.GroupNorm: norm.group_norm,
    nn.LayerNorm: norm.layer_norm,
    nn.LocalResponseNorm: _local_response_norm,
    nn.PReLU: _prelu,
    nn.Linear: _linear,
    nn.Flatten: _flatten,
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.Softmax2d: _softmax_2d,
    nn.Identity: lambda holding, layer, x: x,
    nn.Upsample: resize,
    nn.UpsamplingNearest2d: resize,
    nn.PixelShuffle: pixel_shuffle,
}
LAYER_CALLS: Mapping[Any, Call] = {
    **WINDOW_CALLS,
    functional.interpolate: interpolate,
    functional.prelu: prelu_call,
    torch.prelu: prelu_call,
}
"""The functions of torch that do what these layers do, with what computes each on strips."""
