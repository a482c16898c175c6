"""What of a model's own Python code may run on strips, and how: element by element, or as a change of shape.

Everything that is not listed here is refused: it may look at rows that another rank has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from apportion.parallel.strips import Window, outputs_of, strip, wanted_by
from apportion.parallel.strips_holding import Holding
from apportion.parallel.strips_tensor import Strip, fetched, gathered, moved, nothing, padded, summed

Call = Callable[[Holding, Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""(holding, the function as it stands in the model, its arguments): strips among them, and what comes out."""

_NAMES = """
abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor
ceil clamp clamp_max clamp_min clip copysign cos cosh deg2rad div divide eq erf erfc exp exp2 expm1 floor floor_divide
fmod frac ge greater gt hypot isfinite isinf isnan ldexp le lerp less lgamma log log10 log1p log2 logaddexp logical_and
logical_not logical_or logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative positive
pow rad2deg reciprocal relu remainder round rsqrt rsub sgn sigmoid sign sin sinc sinh sqrt square sub subtract tan tanh
true_divide trunc where xlogy zeros_like ones_like
"""
_METHODS = "bfloat16 bool clone contiguous detach double float half int long to type type_as fill_ zero_ copy_"
_ACTIVATIONS = """
celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu sigmoid silu softplus
softshrink softsign tanh tanhshrink threshold
"""
_OPERATORS = """
abs add and_ eq floordiv ge gt inv invert le lt mod mul ne neg or_ pos pow sub truediv xor iadd isub imul itruediv ipow
"""


def _elementwise_calls() -> set[Any]:
    names, activations = _NAMES.split(), _ACTIVATIONS.split()
    calls: set[Any] = {getattr(operator, name) for name in _OPERATORS.split()}
    for place, known in ((torch, names), (functional, activations)):
        both = [*known, *(f"{name}_" for name in known)]
        calls |= {getattr(place, name) for name in both if hasattr(place, name)}
    return calls | {*names, *(f"{name}_" for name in names), *_METHODS.split()}


def arguments(names: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """By name."""
    return defaults | dict(zip(names.split(), args, strict=False)) | dict(kwargs)


def elementwise(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Strip:
    """The function of this rank's rows of every tensor."""
    first = next(a for a in (*args, *kwargs.values()) if isinstance(a, Strip))
    if isinstance(args[0], Tensor) and _in_place(call):
        raise ValueError("it would write a strip into a tensor that every rank has: write it as a new tensor")
    own = {name: aligned(holding, a, first) for name, a in kwargs.items()}
    y: Tensor = function_of(call)(*(aligned(holding, a, first) for a in args), **own)
    return Strip(y, y.dim() + first.dim - first.own.dim(), first.bounds, flat=first.flat)


def _in_place(call: Any) -> bool:
    name = call if isinstance(call, str) else call.__name__
    return name.endswith("_") or name in ("iadd", "isub", "imul", "itruediv", "ipow")


def function_of(call: Any) -> Callable[..., Any]:
    """A function, or the method of its first argument."""
    if not isinstance(call, str):
        function: Callable[..., Any] = call
        return function
    return lambda x, *args, **kwargs: getattr(x, call)(*args, **kwargs)


def aligned(holding: Holding, value: Any, first: Strip) -> Any:
    """This rank's rows of a value, as those of the first."""
    from_right = first.dim - first.own.dim()
    if isinstance(value, Strip):
        if value.dim - value.own.dim() != from_right or value.length != first.length or value.flat != first.flat:
            raise ValueError(f"{value.held()} does not go with {first.held()}")
        return moved(value, first.bounds, holding.group).own
    if not isinstance(value, Tensor) or value.dim() == 0:
        return holding.use(value)
    if first.flat:
        raise ValueError("only numbers go with an image that was flattened: flatten it later")
    if value.dim() < -from_right or value.shape[from_right] == 1:
        return holding.use(value)
    if value.shape[from_right] != first.length:
        raise ValueError(f"a tensor of shape {tuple(value.shape)} does not go with {first.held()}")
    rows = strip(first.bounds, holding.group.rank)
    return holding.use(value).narrow(value.dim() + from_right, rows.start, rows.n)


# Shapes


def shape(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Of the whole tensor: ``x.shape``, ``x.size()``, ``x.dtype``."""
    x, *rest = args
    if call is getattr:
        plain = {"shape": x.shape, "ndim": len(x.shape), "dtype": x.own.dtype, "device": x.own.device}
        if rest[0] not in plain:
            raise ValueError(f"its .{rest[0]} is not known on a strip")
        return plain[rest[0]]
    if call in ("dim", "ndimension"):
        return len(x.shape)
    dim = rest[0] if rest else kwargs.get("dim")
    return x.shape if dim is None else x.shape[dim]


def flatten(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Strip:
    """``flatten(x, 1)``: put off until someone needs it."""
    given = arguments("input start_dim end_dim", args, kwargs, start_dim=0, end_dim=-1)
    x, start, end = given["input"], given["start_dim"], given["end_dim"]
    dims = len(x.shape)
    if start % dims != 1 or end % dims != dims - 1:
        raise ValueError(f"flatten({start}, {end}) of {x.held()} would mix rows of several ranks: flatten from 1 on")
    return Strip(x.own, x.dim, x.bounds, flat=True)


def view(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Strip:
    """``x.view(n, -1)``, where it flattens."""
    x, *sizes = args
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = list(sizes[0])
    batch, features = x.shape[0], x.shape[1:].numel()
    if len(sizes) != 2 or sizes[0] not in (batch, -1) or sizes[1] not in (features, -1) or sizes == [-1, -1]:
        raise ValueError(f"{call}({', '.join(map(str, sizes))}) of {x.held()} may mix rows of several ranks")
    return Strip(x.own, x.dim, x.bounds, flat=True)


def permute(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Strip:
    """The dimension that is cut goes to another place."""
    x, *order = args
    dims = list(order[0]) if len(order) == 1 else list(order)
    dims = [d % x.own.dim() for d in (dims or kwargs["dims"])]
    return Strip(_unflat(x).own.permute(dims), dims.index(x.dim), x.bounds)


def transpose(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Strip:
    x, first, second = args
    order = list(range(x.own.dim()))
    order[first], order[second] = order[second], order[first]
    return permute(holding, call, (x, order), {})


def take(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``x[:, :, ::2, ::2]``: slices."""
    x, index = args
    if not isinstance(x, Strip):  # of several: what chunk() gives
        return x[index]
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (x.own.dim() - len(index) + 1), *index[at + 1 :])
    if not all(isinstance(i, slice) for i in index):
        raise ValueError(f"{x.held()} is taken apart by {index}: only slices are known to be safe")
    _unflat(x)
    own = [slice(None) if d == x.dim else i for d, i in enumerate(index)]
    x = Strip(x.own[tuple(own)], x.dim, x.bounds)
    if len(index) <= x.dim or index[x.dim] == slice(None):
        return x
    start, stop, step = index[x.dim].indices(x.length)
    window = Window(1, step, 1, -start)
    made = outputs_of(window, x.bounds, len(range(start, stop, step)))
    rows = fetched(x, wanted_by(window, x.bounds, made), holding.group)
    every = [slice(None)] * x.dim + [slice(None, None, step)]
    return Strip(rows[tuple(every)], x.dim, made)


def pad(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Strip:
    """``functional.pad``."""
    given = arguments("input pad mode value", args, kwargs, mode="constant", value=None)
    return padded_by(holding, given["input"], list(given["pad"]), given["mode"], given["value"] or 0.0)


def padded_by(holding: Holding, x: Strip, pairs: list[int], mode: str, value: float) -> Strip:
    """The pairs begin with the last dimension."""
    _unflat(x)
    at = 2 * (x.own.dim() - 1 - x.dim)
    pair, rest = pairs[at : at + 2], [*pairs[:at], *[0] * len(pairs[at : at + 2]), *pairs[at + 2 :]]
    if any(rest):
        if mode != "constant" and not x.own.numel():
            grown = [n + sum(rest[2 * i : 2 * i + 2]) for i, n in enumerate(reversed(x.own.shape))]
            x = x.like(nothing(grown[::-1], x.own))
        else:
            fill = {"value": value} if mode == "constant" else {}
            x = x.like(functional.pad(x.own, rest[: _shortest(rest, mode, x.own.dim())], mode=mode, **fill))
    return padded(x, pair[0], pair[1], holding.group, mode=mode, value=value) if any(pair) else x


def _shortest(pairs: list[int], mode: str, dims: int) -> int:
    """How many of the numbers torch takes: padding that is made of the image wants all of the image's dimensions."""
    return len(pairs) if mode == "constant" else 2 * (dims - 2)


def concatenate(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Strip:
    """``torch.cat`` along a dimension that is not cut."""
    parts = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = next(p for p in parts if isinstance(p, Strip))
    if first.flat or dim % first.own.dim() == first.dim or dim % first.own.dim() == 0:
        raise ValueError(f"{first.held()} is put together with others along dimension {dim}, across ranks")
    return first.like(torch.cat([aligned(holding, p, first) for p in parts], dim))


def chunk(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Strip, ...]:
    """``chunk`` and ``split`` along a dimension that is not cut."""
    x, many = args[:2] if len(args) > 1 else (args[0], next(v for n, v in kwargs.items() if n != "dim"))
    dim: int = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    if x.flat or dim % x.own.dim() in (x.dim, 0):
        raise ValueError(f"{x.held()} would be taken apart along dimension {dim}, across ranks")
    return tuple(x.like(part) for part in function_of(call)(x.own, many, dim=dim))


def softmax(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Strip:
    """Along a dimension that is not cut."""
    given = arguments("input dim", args, kwargs, dim=None)
    x: Strip = given["input"]
    dim = given["dim"]
    if dim is None or x.flat or dim % x.own.dim() == x.dim:
        raise ValueError(f"it looks along the dimension of {x.held()}")
    return x.like(function_of(call)(x.own, dim=dim))


def mean(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``mean`` and ``sum``: over the dimension that is cut it is a sum over the ranks, which all of them have then."""
    given = arguments("input dim keepdim dtype", args, kwargs, dim=None, keepdim=False)
    x, keep, averaged = given["input"], given["keepdim"], _name(call) == "mean"
    if given.get("dtype") is not None:
        raise ValueError("its dtype= is not known on a strip: convert the tensor first")
    dims = x.own.dim()
    asked = range(dims) if given["dim"] in (None, (), []) else given["dim"]
    if x.flat:
        if asked not in (1, -1, (1,), [1], (-1,), [-1]):
            raise ValueError(f"{x.held()} was flattened: only the mean over all of it is known")
        y = mean(holding, call, (Strip(x.own, x.dim, x.bounds), range(1, dims)), {})
        return y.unsqueeze(1) if keep else y
    over = sorted({d % dims for d in (asked if not isinstance(asked, int) else (asked,))})
    if x.dim not in over:
        y = function_of(call)(x.own, over, keepdim=keep)
        return Strip(y, x.dim if keep else x.dim - sum(d < x.dim for d in over), x.bounds)
    many = torch.Size([x.shape[d] for d in over]).numel()
    total = summed(x.own.sum(over, keepdim=keep), holding.group)
    return total / many if averaged else total


def dropout(holding: Holding, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Strip:
    """With the draws of the whole image, of which each rank takes its rows: those of one device."""
    given = arguments("input p training inplace", args, kwargs, p=0.5, training=True)
    x: Strip = given["input"]
    p = given["p"]
    if not given["training"] or p == 0.0:
        return x.like(x.own * 1.0) if not x.flat else x
    whole = list(Strip(x.own, x.dim, x.bounds).shape)
    if _name(call) in ("dropout1d", "dropout2d", "dropout3d"):  # whole channels
        whole[2:] = [1] * (len(whole) - 2)
    mask = call(torch.ones(whole, dtype=x.own.dtype, device=x.own.device), p, True)
    if mask.shape[x.dim] == x.length:
        rows = strip(x.bounds, holding.group.rank)
        mask = mask.narrow(x.dim, rows.start, rows.n)
    return Strip(x.own * mask, x.dim, x.bounds, flat=x.flat)


def whole(holding: Holding, x: Strip) -> Tensor:
    """On every rank, as the model sees it."""
    return gathered(x, holding.group)


def _unflat(x: Strip) -> Strip:
    if x.flat:
        raise ValueError(f"{x.held()} was flattened, and is used as an image")
    return x


def _name(call: Any) -> str:
    return str(call if isinstance(call, str) else call.__name__)


def known_calls() -> dict[Any, Call]:
    """By function, or by the name of a method."""
    calls: dict[Any, Call] = dict.fromkeys(_elementwise_calls(), elementwise)
    for function, names in (
        (shape, ("size", "dim", "ndimension")),
        (flatten, ("flatten", torch.flatten)),
        (view, ("view", "reshape", torch.reshape)),
        (permute, ("permute", torch.permute)),
        (transpose, ("transpose", torch.transpose)),
        (take, (operator.getitem,)),
        (pad, (functional.pad,)),
        (concatenate, (torch.cat, torch.concat, torch.concatenate)),
        (chunk, ("chunk", "split", torch.chunk, torch.split)),
        (softmax, ("softmax", "log_softmax", torch.softmax, torch.log_softmax)),
        (mean, ("mean", "sum", torch.mean, torch.sum)),
        (dropout, (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d)),
    ):
        calls |= dict.fromkeys(names, function)
    return calls | {getattr: shape, functional.softmax: softmax, functional.log_softmax: softmax}
