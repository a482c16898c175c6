"""Changes of shape on strips, which move no value to another rank, or move values to where they are wanted."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from apportion.parallel.spatial.call_arguments import Call, arguments, function_of, image_of, unflat
from apportion.parallel.spatial.conv import pad_across
from apportion.parallel.spatial.geometry import Window, outputs_of, strip, wanted_by
from apportion.parallel.spatial.placements import SpatialPlan
from apportion.parallel.spatial.strip import SpatialShard, fetched, padded, redistributed

_PARTS = {"chunks": "parts", "split_size": "parts", "split_size_or_sections": "parts"}


def aligned(plan: SpatialPlan, value: Any, first: SpatialShard) -> Any:
    """The rows of a value that go with this rank's rows of ``first``."""
    from_right = first.dim - first.own.dim()
    if isinstance(value, SpatialShard):
        if value.dim - value.own.dim() != from_right or value.length != first.length or value.flat != first.flat:
            raise ValueError(f"{value.describe()} does not go with {first.describe()}")
        if value.flat and [*value.own.shape[1 : value.dim], *value.own.shape[value.dim + 1 :]] != [
            *first.own.shape[1 : first.dim],
            *first.own.shape[first.dim + 1 :],
        ]:
            raise ValueError("two flattened images go together only where they are alike: flatten them later")
        return redistributed(value, first.bounds, plan.group).own
    if not isinstance(value, Tensor) or value.dim() == 0:
        return plan.used_on_strips(value)
    if first.flat:
        raise ValueError("only numbers go with an image that was flattened: flatten it later")
    if value.dim() < -from_right or value.shape[from_right] == 1:
        return plan.used_on_strips(value)
    if value.shape[from_right] != first.length:
        raise ValueError(f"a tensor of shape {tuple(value.shape)} does not go with {first.describe()}")
    rows = strip(first.bounds, plan.group.rank)
    return plan.used_on_strips(value).narrow(value.dim() + from_right, rows.start, rows.n)


def shape(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The shape and similar facts of the whole tensor: ``x.shape``, ``x.size()``, ``x.dtype``."""
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


def flatten(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Compute ``flatten(x, 1)``, put off until flat values are needed."""
    given = arguments("input start_dim end_dim", args, kwargs, start_dim=0, end_dim=-1)
    x, start, end = image_of(given), given["start_dim"], given["end_dim"]
    dims = len(x.shape)
    if start % dims != 1 or end % dims != dims - 1:
        raise ValueError(
            f"flatten({start}, {end}) of {x.describe()} would mix rows of several ranks: flatten from 1 on"
        )
    return _flat(x)


def _flat(x: SpatialShard) -> SpatialShard:
    """Put off the flattening; but not where each rank has some of the rows that stay rows."""
    return (
        SpatialShard(x.own.flatten(1), 0, x.bounds) if x.dim == 0 else SpatialShard(x.own, x.dim, x.bounds, flat=True)
    )


def view(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Compute ``x.view(n, -1)``, where it flattens."""
    x, *sizes = args
    sizes = sizes or list(kwargs.values())
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = list(sizes[0])
    batch, features = x.shape[0], x.shape[1:].numel()
    if len(sizes) != 2 or sizes[0] not in (batch, -1) or sizes[1] not in (features, -1) or sizes == [-1, -1]:
        raise ValueError(f"{call}({', '.join(map(str, sizes))}) of {x.describe()} may mix rows of several ranks")
    return _flat(x)


def permute(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Permute dimensions: the one that is cut goes to another place."""
    x, *order = args
    order = order or list(kwargs.values())
    dims = [d % x.own.dim() for d in (order[0] if len(order) == 1 else order)]
    return SpatialShard(unflat(x).own.permute(dims), dims.index(x.dim), x.bounds)


def transpose(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    given = arguments("input dim0 dim1", args, kwargs)
    x, first, second = image_of(given), given["dim0"], given["dim1"]
    order = list(range(x.own.dim()))
    order[first], order[second] = order[second], order[first]
    return permute(plan, call, (x, order), {})


def getitem(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Take slices, as in ``x[:, :, ::2, ::2]``."""
    x, index = args
    if isinstance(x, tuple | list) and isinstance(index, int | slice):  # of several: what chunk() gives
        return x[index]
    if not isinstance(x, SpatialShard):
        raise ValueError("a part of an image says which elements are taken: only slices are known to be safe")
    index = index if isinstance(index, tuple) else (index,)
    at = next((n for n, i in enumerate(index) if i is Ellipsis), None)
    if at is not None:
        index = (*index[:at], *[slice(None)] * (x.own.dim() - len(index) + 1), *index[at + 1 :])
    if not all(isinstance(i, slice) for i in index):
        raise ValueError(f"{x.describe()} is taken apart by {index}: only slices are known to be safe")
    unflat(x)
    own = [slice(None) if d == x.dim else i for d, i in enumerate(index)]
    x = SpatialShard(x.own[tuple(own)], x.dim, x.bounds)
    if len(index) <= x.dim or index[x.dim] == slice(None):
        return x
    start, stop, step = index[x.dim].indices(x.length)
    window = Window(1, step, 1, -start)
    made = outputs_of(window, x.bounds, len(range(start, stop, step)))
    rows = fetched(x, wanted_by(window, x.bounds, made), plan.group)
    every = [slice(None)] * x.dim + [slice(None, None, step)]
    return SpatialShard(rows[tuple(every)], x.dim, made)


def pad(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Compute ``functional.pad`` on a strip."""
    given = arguments("input pad mode value", args, kwargs, mode="constant", value=None)
    return padded_by(plan, image_of(given), list(given["pad"]), given["mode"], given["value"] or 0.0)


def padded_by(plan: SpatialPlan, x: SpatialShard, numbers: list[int], mode: str, value: float) -> SpatialShard:
    """Pad an image by numbers, two a dimension, that begin with the last dimension."""
    pairs = {unflat(x).own.dim() - 1 - at // 2: (numbers[at], numbers[at + 1]) for at in range(0, len(numbers), 2)}
    before, after = pairs.pop(x.dim, (0, 0))
    for dim, pair in pairs.items():
        if any(pair):
            x = x.like(pad_across(x.own, dim, pair, mode, value))
    if not any(numbers):
        return x.like(x.own.clone())
    return padded(x, before, after, plan.group, mode=mode, value=value) if before or after else x


def concatenate(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SpatialShard:
    """Compute ``torch.cat`` along a dimension that is not cut."""
    given = arguments("tensors dim", args, kwargs, dim=0)
    parts, dim = given["tensors"], given["dim"]
    first = next(p for p in parts if isinstance(p, SpatialShard))
    if first.flat or dim % first.own.dim() == first.dim or dim % first.own.dim() == 0:
        raise ValueError(f"{first.describe()} is put together with others along dimension {dim}, across ranks")
    return first.like(torch.cat([_rows(plan, p, first) for p in parts], dim))


def _rows(plan: SpatialPlan, part: Tensor | SpatialShard, first: SpatialShard) -> Tensor:
    """The rows of a part that go with this rank's rows of ``first``; a single row does not stand for all."""
    if isinstance(part, Tensor) and part.dim() == first.own.dim() and part.shape[first.dim] == first.length:
        rows = strip(first.bounds, plan.group.rank)
        return plan.used_on_strips(part).narrow(first.dim, rows.start, rows.n)  # type: ignore[no-any-return]
    return aligned(plan, part, first)  # type: ignore[no-any-return]


def chunk(plan: SpatialPlan, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[SpatialShard, ...]:
    """Compute ``chunk`` or ``split`` along a dimension that is not cut."""
    named = {_PARTS.get(name, name): value for name, value in kwargs.items()}
    given = arguments("input parts dim", args, named, dim=0)
    x, dim = image_of(given), given["dim"]
    if x.flat or dim % x.own.dim() in (x.dim, 0):
        raise ValueError(f"{x.describe()} would be taken apart along dimension {dim}, across ranks")
    return tuple(x.like(part) for part in function_of(call)(x.own, given["parts"], dim=dim))


def known_calls() -> dict[Any, Call]:
    """The function that computes each known change of shape on strips, by torch's function or by the name of a
    method."""
    calls: dict[Any, Call] = {getattr: shape}
    for function, names in (
        (shape, ("size", "dim", "ndimension")),
        (flatten, ("flatten", torch.flatten)),
        (view, ("view", "reshape", torch.reshape)),
        (permute, ("permute", torch.permute)),
        (transpose, ("transpose", torch.transpose)),
        (getitem, (operator.getitem,)),
        (pad, (functional.pad,)),
        (concatenate, (torch.cat, torch.concat, torch.concatenate)),
        (chunk, ("chunk", "split", torch.chunk, torch.split)),
    ):
        calls |= dict.fromkeys(names, function)
    return calls
