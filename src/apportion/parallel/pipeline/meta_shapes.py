"""The results of modules and functions without their computation: tensors of the meta device, with shapes and no
numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apportion.core import torch_private


class CannotRun(ValueError):
    """A network whose own forward cannot be computed in stretches."""


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from leaves(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from leaves(getattr(value, one.name, None))


def _meta(value: Any) -> Any:
    """A tensor or a device, exchanged for one of the meta device; any other value as it is."""
    if isinstance(value, Tensor):
        return value if value.is_meta and not isinstance(value, nn.Parameter) else value.detach().to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Nested tuples, lists and dicts like the given ones, of what the function makes of the values in them."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, function) for v in value))
    if type(value) in (tuple, list):
        return type(value)(mapped(v, function) for v in value)
    if type(value) is dict:
        return {k: mapped(v, function) for k, v in value.items()}
    return function(value)


def on_meta(func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
    args, kwargs = mapped((args, kwargs), _meta)
    kwargs = {k: "meta" if k == "device" else v for k, v in kwargs.items() if k != "generator"}
    with torch.no_grad(), torch.device("meta"):
        if func is Tensor.view and not any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
            func = Tensor.reshape  # the strides of the tensors that have numbers may be others
        return func(*args, **kwargs)


def fresh(result: Any, given: Sequence[Tensor]) -> Any:
    """The result with new tensors of the meta device, which share nothing with others, for all that were not given."""
    known = {id(t) for t in given}

    def convert(t: Any) -> Any:
        if not isinstance(t, Tensor) or id(t) in known:
            return t
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    if isinstance(result, tuple) and not hasattr(result, "_fields") and type(result) is not tuple:
        return tuple(map(convert, result))  # what torch returns of sorting and the like
    return mapped(result, convert)


@dataclass(frozen=True)
class Alike:
    """A tensor of the shape and type of some of the tensors that its module is given, by their numbers."""

    given: tuple[int, ...]


def alike(result: Any, given: Sequence[Tensor]) -> Any | None:
    """The result of a module, with an ``Alike`` in the place of each tensor; None where that says less than there
    is."""
    plain = True

    def convert(value: Any) -> Any:
        nonlocal plain
        if value is None:
            return None
        found = tuple(
            i
            for i, t in enumerate(given)
            if isinstance(value, Tensor) and t is not value and t.shape == value.shape and t.dtype == value.dtype
        )
        plain = plain and bool(found)
        return Alike(found)

    like = mapped(result, convert)
    return like if plain and like is not None else None


def _as_given(like: Any, given: Sequence[Tensor]) -> Any | None:
    """New tensors of the meta device, shaped like the given ones; None where those that had one shape no longer
    have."""
    one_shape = True

    def convert(value: Any) -> Any:
        nonlocal one_shape
        if not isinstance(value, Alike):
            return value
        shapes = {given[i].shape for i in value.given}
        one_shape = one_shape and len(shapes) == 1
        return torch.empty_like(given[value.given[0]], device="meta", requires_grad=False)

    found = mapped(like, convert)
    return found if one_shape else None


def shapes_of(module: nn.Module, name: str, args: Any, kwargs: Any, like: Any | None = None) -> Any:
    """The result of a module, in tensors of the meta device. ``like``: the result that it gave when it was recorded,
    for a module that decides by the numbers it is given, as one that sends rows to experts. Its forward hooks see the
    result that is made here: they may keep it, and the forward may take it from them."""
    hooks = torch_private.forward_hooks_of(module)
    kept = dict(hooks)
    hooks.clear()
    try:
        result = _shapes_of(module, name, args, kwargs, like)
    finally:
        hooks.update(kept)
    for number, hook in kept.items():
        with_kwargs = number in torch_private.forward_hooks_with_kwargs_of(module)
        changed = hook(module, args, kwargs, result) if with_kwargs else hook(module, args, result)
        result = result if changed is None else changed
    return result


def _shapes_of(module: nn.Module, name: str, args: Any, kwargs: Any, like: Any | None) -> Any:
    state = {k: _meta(t) for k, t in (*module.named_parameters(), *module.named_buffers())}
    copies: dict[int, Any] = {}

    def convert(value: Any) -> Any:
        if value is None or isinstance(value, Tensor | torch.device | bool | int | float | str | nn.Module):
            return _meta(value)
        copies[id(value)] = copy.deepcopy(value)  # what it changes in there is for the rank that calls it
        return copies[id(value)]

    try:
        with torch.no_grad(), torch.device("meta"):
            own_args, own_kwargs = mapped((args, kwargs), convert)
            found = torch.func.functional_call(module, state, own_args, own_kwargs)
    except Exception as error:
        if like is not None and (as_given := _as_given(like, list(leaves((args, kwargs))))) is not None:
            return as_given
        raise CannotRun(
            f"what {name} ({type(module).__name__}) gives has a shape that depends on the numbers it is given, which "
            "another stage does not have: use tensor_parallel, or data_parallel"
        ) from error
    given = [*leaves((own_args, own_kwargs))]
    back = {id(c): o for o, c in ((v, copies[id(v)]) for v in _opaque((args, kwargs), copies))}
    return _fresh_structure(found, back, given, list(leaves((args, kwargs))))


def _opaque(value: Any, copies: Mapping[int, Any]) -> list[Any]:
    found: list[Any] = []
    mapped(value, lambda v: found.append(v) if id(v) in copies else None)
    return found


def _fresh_structure(found: Any, back: Mapping[int, Any], given: Sequence[Tensor], originals: Sequence[Tensor]) -> Any:
    """The result that was found, with the caller's own objects and tensors where these are given back."""
    same = {id(g): o for g, o in zip(given, originals, strict=False)}

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return same.get(id(value)) if id(value) in same else fresh(value, ())
        return back.get(id(value), value)

    if is_dataclass(found) and not isinstance(found, type):
        for each in fields(found):
            setattr(found, each.name, mapped(getattr(found, each.name), convert))
        return found
    if isinstance(found, Mapping) and type(found) is not dict:
        for key in list(found):
            found[key] = mapped(found[key], convert)  # type: ignore[index]
        return found
    return mapped(found, convert)
