"""The operations of a model's own Python code that may run on strips, and how each runs: element by element, over a
dimension, or as a change of shape (``shapes.py``).

Everything that is not listed is refused: it may look at rows that another rank has.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from apportion.cost_model.elementwise import ACTIVATIONS
from apportion.parallel.spatial import shapes
from apportion.parallel.spatial.call_arguments import Call, arguments, function_of, image_of, in_place, name_of
from apportion.parallel.spatial.geometry import strip
from apportion.parallel.spatial.placements import SpatialPlan
from apportion.parallel.spatial.shapes import aligned
from apportion.parallel.spatial.strip import SpatialShard, summed

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


def elementwise(holding: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Apply the function to this rank's rows of every tensor."""
    everything = (*args, *kwargs.values())
    first = next((a for a in everything if isinstance(a, SpatialShard)), None)
    if first is None or "out" in kwargs:
        raise ValueError("it is known of tensors one by one, not of several together, nor with out=")
    if isinstance(everything[0], Tensor) and in_place(call):
        raise ValueError("it would write a strip into a tensor that every rank has: write it as a new tensor")
    own = {name: aligned(holding, a, first) for name, a in kwargs.items()}
    y: Tensor = function_of(call)(*(aligned(holding, a, first) for a in args), **own)
    return SpatialShard(y, y.dim() + first.dim - first.own.dim(), first.bounds, flat=first.flat)


def softmax(holding: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Compute a softmax or log-softmax along a dimension that is not cut."""
    names = "input dim _stacklevel dtype" if call in _SOFTMAX else "input dim dtype"
    given = arguments(names, args, kwargs, dim=None, dtype=None)
    x, dim = image_of(given), given["dim"]
    if dim is None or x.flat or dim % x.own.dim() == x.dim:
        raise ValueError(f"it looks along the dimension of {x.held()}")
    return x.like(function_of(call)(x.own, dim=dim, dtype=given["dtype"]))


def mean(holding: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
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
            raise ValueError(f"{x.held()} was flattened: only the mean over all of it is known")
        y = mean(holding, call, (SpatialShard(x.own, x.dim, x.bounds), range(1, dims)), {})
        return y.unsqueeze(1) if keep else y
    over = sorted({d % dims for d in (asked if not isinstance(asked, int) else (asked,))})
    if x.dim not in over:
        y = function_of(call)(x.own, over, keepdim=keep)
        return SpatialShard(y, x.dim if keep else x.dim - sum(d < x.dim for d in over), x.bounds)
    many = torch.Size([x.shape[d] for d in over]).numel()
    total = summed(x.own.sum(over, keepdim=keep), holding.group)
    return total / many if averaged else total


def dropout(holding: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Drop elements or channels by the draws for the whole image, which are those of one device; each rank takes those
    of its rows.

    The whole mask is drawn: torch fills a mask from one stream of numbers, which can be entered at its beginning only,
    and each example's rows of this rank lie between those of others.
    """
    given = arguments("input p training inplace", args, kwargs, p=0.5, training=True, inplace=False)
    x, p = image_of(given), given["p"]
    by_channel = name_of(call) in ("dropout1d", "dropout2d", "dropout3d")
    if by_channel and x.flat:
        raise ValueError(f"{x.held()} was flattened, and has no channels to drop")
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
        rows = strip(x.bounds, holding.group.rank)
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
