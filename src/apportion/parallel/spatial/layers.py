"""The computation on strips of torch's layers, and of the functions and methods that a model's own code calls.

Three groups of computations, and the two tables that list them:

- normalisations over an image whose strips lie on the ranks: every statistic is that of the whole image;
- functions and methods of a forward's own code: element by element, over a dimension, or as a change of shape
  (``shapes.py``); ``known_calls`` lists them;
- the other layers, such as Linear, PReLU, Dropout and the paddings (convolutions and pooling are in ``windows.py``).

``LAYERS`` has what computes each layer, by its exact class, and ``LAYER_CALLS`` the functions of torch.nn.functional
that do the same.

Everything that is not listed is refused: a subclass of a layer, or an unknown function, may look at rows that another
rank has.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from apportion.comm.group import Group
from apportion.core.torch_private import BatchNormBase
from apportion.cost_model.elementwise import ACTIVATIONS
from apportion.parallel.ops.sync_batch_norm import NonEmptyRanks, Normalize, use_whole_batch
from apportion.parallel.spatial import channels, pooling, shapes
from apportion.parallel.spatial.call_arguments import Call, arguments, function_of, image_of, in_place, name_of, unflat
from apportion.parallel.spatial.geometry import RowRange, strip
from apportion.parallel.spatial.placements import SpatialPlan, positions, rows_of
from apportion.parallel.spatial.shapes import aligned, flatten, padded_by
from apportion.parallel.spatial.strip import SpatialShard, summed
from apportion.parallel.spatial.windows import WINDOW_CALLS, WINDOWS, Layer, interpolate, pixel_shuffle, resize

# Normalisation over an image that lies on the ranks in strips: every statistic is that of the whole image.
#
# Batch, group, instance and layer normalisation differ in which values they take together. Each is a normalisation of
# the rows of a matrix whose columns lie on the ranks, and that is what ``sync_batch_norm.py`` does with its channels.


def over_image(plan: SpatialPlan, x: SpatialShard) -> bool:
    """Return whether an image is cut as a normalisation takes it: behind its channels, or along them."""
    return not x.flat and (x.dim > 1 if plan.spatial else x.dim == 1)


def batch_norm(plan: SpatialPlan, layer: Any, x: SpatialShard) -> Any:
    """Compute BatchNorm1d, BatchNorm2d or BatchNorm3d; where the image is cut, the layer asks all ranks for its
    statistics."""
    if not over_image(plan, x):
        return plan.on_all(layer, x)
    if not plan.spatial:
        return channels.batch_norm(plan, layer, x)
    for p in (layer.weight, layer.bias):
        plan.used_on_strips(p)
    if plan.planning:
        plan.norms.append(layer)
        return x  # its statistics would be of this rank's rows
    # A rank without rows takes part in the exchange of the statistics, with nothing.
    plan.attendance.present = x.own.numel() > 0
    return x.like(layer(x.own))


def ask_all_ranks(layer: BatchNormBase, attendance: NonEmptyRanks) -> None:
    """Make the layer's statistics those of all ranks' rows, from now on."""
    use_whole_batch(layer, attendance)


def group_norm(plan: SpatialPlan, layer: Any, x: SpatialShard) -> Any:
    """Compute a GroupNorm layer: on the parts of the image or of its channels where that is possible, else on the
    whole."""
    if plan.spatial and over_image(plan, x):
        return _by_groups(plan, layer, x, layer.num_groups)
    found = channels.group_norm(plan, layer, x) if not plan.spatial and over_image(plan, x) else None
    return found if found is not None else plan.on_all(layer, x)


def instance_norm(plan: SpatialPlan, layer: Any, x: SpatialShard) -> Any:
    """Compute InstanceNorm1d, InstanceNorm2d or InstanceNorm3d, with a group for each channel."""
    if layer.track_running_stats:
        raise ValueError("its running statistics are means over examples: use track_running_stats=False")
    if plan.spatial and over_image(plan, x):
        return _by_groups(plan, layer, x, x.own.shape[1])
    return plan.on_all(layer, x)


def _by_groups(plan: SpatialPlan, layer: Any, x: SpatialShard, groups: int) -> SpatialShard:
    y = _normalised(x, x.own.shape[0] * groups, layer.eps, plan.group)
    for p, combine in ((layer.weight, torch.mul), (layer.bias, torch.add)):
        if p is not None:
            y = combine(y, plan.used_on_strips(p).view(-1, *[1] * (y.dim() - 2)))
    return x.like(y)


def layer_norm(plan: SpatialPlan, layer: Any, x: SpatialShard) -> Any:
    """Compute a LayerNorm over the last dimensions; where one of them is cut, the rows of its weights are cut, too."""
    if x.flat:
        return plan.on_all(layer, x)
    before = x.own.dim() - len(layer.normalized_shape)
    weight, bias = plan.used_on_strips(layer.weight), plan.used_on_strips(layer.bias)
    if x.dim < before:  # it looks at what this rank has
        return x.like(functional.layer_norm(x.own, layer.normalized_shape, weight, bias, layer.eps))
    y = _normalised(x, x.own.shape[:before].numel(), layer.eps, plan.group)
    start, n = x.bounds[plan.group.rank], x.own.shape[x.dim]
    for p, combine in ((weight, torch.mul), (bias, torch.add)):
        if p is not None:
            y = combine(y, p.narrow(x.dim - before, start, n))
    return x.like(y)


def _normalised(x: SpatialShard, rows: int, eps: float, group: Group) -> Tensor:
    """Normalise an image, taken as ``rows`` rows of values, so that each row has the mean 0 and the variance 1 over all
    ranks."""
    own = x.own
    if x.shape.numel() == rows:  # each is its own mean
        return own * 0.0
    matrix = own.reshape(1, rows, own.numel() // rows)
    y, *_ = Normalize.apply(matrix, None, None, eps, group, own.numel() > 0)
    return y.view(own.shape)  # type: ignore[no-any-return]


# The operations of a model's own Python code that may run on strips, and how each runs: element by element, over a
# dimension, or as a change of shape (``shapes.py``).
#
# Everything that is not listed is refused: it may look at rows that another rank has.

_NAMES = """
abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor
ceil clamp clamp_max clamp_min clip copysign cos cosh deg2rad div divide eq erf erfc exp exp2 expm1 floor floor_divide
fmod frac ge greater gt hypot isfinite isinf isnan ldexp le lerp less lgamma log log10 log1p log2 logaddexp logical_and
logical_not logical_or logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative positive
pow rad2deg reciprocal relu remainder round rsqrt rsub sgn sigmoid sign sin sinc sinh sqrt square sub subtract tan tanh
true_divide trunc where xlogy zeros_like ones_like
"""
_METHODS = "bfloat16 bool clone contiguous detach double float half int long to type type_as fill_ zero_ copy_"
_OPERATORS = """
abs add and_ eq floordiv ge gt inv invert le lt mod mul ne neg or_ pos pow sub truediv xor iadd isub imul itruediv ipow
"""


def _elementwise_calls() -> set[Any]:
    names = _NAMES.split()
    calls: set[Any] = {getattr(operator, name) for name in _OPERATORS.split()}
    for place, known in ((torch, names), (functional, ACTIVATIONS)):
        both = [*known, *(f"{name}_" for name in known)]
        calls |= {getattr(place, name) for name in both if hasattr(place, name)}
    return calls | {*names, *(f"{name}_" for name in names), *_METHODS.split()}


def elementwise(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Apply the function to this rank's rows of every tensor."""
    everything = (*args, *kwargs.values())
    first = next((a for a in everything if isinstance(a, SpatialShard)), None)
    if first is None or "out" in kwargs:
        raise ValueError("it is known of tensors one by one, not of several together, nor with out=")
    if isinstance(everything[0], Tensor) and in_place(call):
        raise ValueError("it would write a strip into a tensor that every rank has: write it as a new tensor")
    own = {name: aligned(plan, a, first) for name, a in kwargs.items()}
    y: Tensor = function_of(call)(*(aligned(plan, a, first) for a in args), **own)
    return SpatialShard(y, y.dim() + first.dim - first.own.dim(), first.bounds, flat=first.flat)


def softmax(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Compute a softmax or log-softmax along a dimension that is not cut."""
    names = "input dim _stacklevel dtype" if call in _SOFTMAX else "input dim dtype"
    given = arguments(names, args, kwargs, dim=None, dtype=None)
    x, dim = image_of(given), given["dim"]
    if dim is None or x.flat or dim % x.own.dim() == x.dim:
        raise ValueError(f"it looks along the dimension of {x.describe()}")
    return x.like(function_of(call)(x.own, dim=dim, dtype=given["dtype"]))


def mean(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute ``mean`` or ``sum``: over the dimension that is cut it is a sum over the ranks, which all of them have
    then."""
    given = arguments("input dim keepdim dtype", args, kwargs, dim=None, keepdim=False)
    x, keep, averaged = image_of(given), given["keepdim"], name_of(call) == "mean"
    if given.get("dtype") is not None:
        raise ValueError("its dtype= is not known on a strip: convert the tensor first")
    dims = x.own.dim()
    asked = range(dims) if given["dim"] in (None, (), []) else given["dim"]
    if x.flat:
        if asked not in (1, -1, (1,), [1], (-1,), [-1]):
            raise ValueError(f"{x.describe()} was flattened: only the mean over all of it is known")
        y = mean(plan, call, (SpatialShard(x.own, x.dim, x.bounds), range(1, dims)), {})
        return y.unsqueeze(1) if keep else y
    over = sorted({d % dims for d in (asked if not isinstance(asked, int) else (asked,))})
    if x.dim not in over:
        y = function_of(call)(x.own, over, keepdim=keep)
        return SpatialShard(y, x.dim if keep else x.dim - sum(d < x.dim for d in over), x.bounds)
    count = torch.Size([x.shape[d] for d in over]).numel()
    total = summed(x.own.sum(over, keepdim=keep), plan.group)
    return total / count if averaged else total


def dropout(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Drop elements or channels by the draws for the whole image, which are those of one device; each rank takes those
    of its rows.

    The whole mask is drawn: torch fills a mask from one stream of numbers, which can be entered at its beginning only,
    and each example's rows of this rank lie between those of others.
    """
    given = arguments("input p training inplace", args, kwargs, p=0.5, training=True, inplace=False)
    x, p = image_of(given), given["p"]
    by_channel = name_of(call) in ("dropout1d", "dropout2d", "dropout3d")
    if by_channel and x.flat:
        raise ValueError(f"{x.describe()} was flattened, and has no channels to drop")
    if not given["training"] or p == 0.0:
        return x
    whole = list(SpatialShard(x.own, x.dim, x.bounds).shape)
    order = list(range(len(whole)))
    if by_channel:
        whole[2:] = [1] * (len(whole) - 2)
    else:
        order = _in_memory(x.own, x.dim)
    ones = torch.ones([whole[d] for d in order], dtype=x.own.dtype, device=x.own.device)
    mask = call(ones.permute([order.index(d) for d in range(len(whole))]), p, True)
    if mask.shape[x.dim] == x.length:
        rows = strip(x.bounds, plan.group.rank)
        mask = mask.narrow(x.dim, rows.start, rows.n)
    return SpatialShard(x.own.mul_(mask) if given["inplace"] else x.own * mask, x.dim, x.bounds, flat=x.flat)


def _in_memory(own: Tensor, dim: int) -> list[int]:
    """The dimensions as they lie in memory, the outermost first: torch draws in this order. Where there is at most one
    row of ``dim``, its stride tells its place only if the tensor is contiguous in that order; else the dimensions keep
    their own order."""
    strides = own.stride()
    order = sorted(range(own.dim()), key=lambda d: (-strides[d], own.shape[d] == 1))
    inner = 1
    for d in reversed(order):
        if own.shape[dim] <= 1 and strides[d] != inner:
            return list(range(own.dim()))
        inner *= own.shape[d]
    return order


_SOFTMAX = (functional.softmax, functional.log_softmax)


def known_calls() -> dict[Any, Call]:
    """The function that computes each known operation on strips, by torch's function or by the name of a method."""
    calls: dict[Any, Call] = dict.fromkeys(_elementwise_calls(), elementwise)
    for function, names in (
        (softmax, ("softmax", "log_softmax", torch.softmax, torch.log_softmax, *_SOFTMAX)),
        (mean, ("mean", "sum", torch.mean, torch.sum)),
        (dropout, (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d)),
    ):
        calls |= dict.fromkeys(names, function)
    return calls | shapes.known_calls()


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


def _local_response_norm(plan: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    unflat(x)
    settings = (layer.size, layer.alpha, layer.beta, layer.k)
    return pooling.local_response_norm(x, settings, plan.group)


def _linear(plan: SpatialPlan, layer: Any, x: SpatialShard) -> Any:
    """Apply a Linear layer. Of a flattened image each rank keeps the columns for the features it has, and the outputs
    are terms of a sum."""
    if x.flat:
        own = x.own.flatten(1)
        y = summed(functional.linear(own, plan.parameter_slice(layer, "weight", 1, _features(x, plan))), plan.group)
        return y if layer.bias is None else y + plan.parameter_slice(layer, "bias", 0, None).to(y.dtype)
    if x.dim == x.own.dim() - 1:
        return plan.on_all(layer, x)
    return x.like(functional.linear(x.own, plan.used_on_strips(layer.weight), plan.used_on_strips(layer.bias)))


def _features(x: SpatialShard, plan: SpatialPlan) -> Sequence[int]:
    """The positions of this rank's part of an image among the features, once the image is flat."""
    return _places(tuple(SpatialShard(x.own, x.dim, x.bounds).shape[1:]), x.dim - 1, strip(x.bounds, plan.group.rank))


@lru_cache(64)
def _places(shape: tuple[int, ...], dim: int, rows: RowRange) -> Sequence[int]:
    inner = torch.Size(shape[dim + 1 :]).numel()
    if dim == 0:
        return range(rows.start * inner, rows.stop * inner)
    places = torch.arange(torch.Size(shape).numel()).view(shape).narrow(dim, rows.start, rows.n)
    return tuple(places.flatten().tolist())


def _prelu(plan: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    if layer.weight.numel() > 1 and x.flat:
        raise ValueError(f"{x.describe()} was flattened, and has a slope for each feature: flatten it later")
    return channels.prelu(plan, layer, x)


def prelu_call(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Compute ``functional.prelu`` with one weight, or with one for each channel."""
    given = arguments("input weight", args, kwargs)
    x, weight = image_of(given), given["weight"]
    if isinstance(weight, SpatialShard) or (x.flat and weight.numel() > 1):
        raise ValueError(f"{x.describe()} has no channels that go with these slopes")
    weight = plan.used_on_strips(weight)
    if x.dim == 1 and weight.numel() > 1:
        weight = rows_of(weight, 0, positions(strip(x.bounds, plan.group.rank)))
    return x.like(functional.prelu(x.own, weight))


def _elementwise(plan: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    return x.like(layer(x.own))


def _dropout(plan: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    call = getattr(functional, type(layer).__name__.lower())
    return dropout(plan, call, (x, layer.p, layer.training, layer.inplace), {})


def _flatten(plan: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    return flatten(plan, "flatten", (x, layer.start_dim, layer.end_dim), {})


def _softmax(plan: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    call = functional.log_softmax if isinstance(layer, nn.LogSoftmax) else functional.softmax
    return softmax(plan, call, (x, layer.dim), {})


def _softmax_2d(plan: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
    return softmax(plan, functional.softmax, (x, -3), {})


def _pad(mode: str) -> Layer:
    def padded(plan: SpatialPlan, layer: Any, x: SpatialShard) -> SpatialShard:
        return padded_by(plan, x, list(layer.padding), mode, float(getattr(layer, "value", 0.0)))

    return padded


LAYERS: Mapping[type[nn.Module], Layer] = {
    **WINDOWS,
    **dict.fromkeys(_BATCH_NORMS, batch_norm),
    **dict.fromkeys(_INSTANCE_NORMS, instance_norm),
    **dict.fromkeys(_DROPOUTS, _dropout),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **{kind: _pad(mode) for mode, kinds in _PADS.items() for kind in kinds},
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.LocalResponseNorm: _local_response_norm,
    nn.PReLU: _prelu,
    nn.Linear: _linear,
    nn.Flatten: _flatten,
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.Softmax2d: _softmax_2d,
    nn.Identity: lambda plan, layer, x: x,
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
