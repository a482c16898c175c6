"""What modules and functions give, without computing it: tensors of the meta device, with shapes and no numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


class CannotRun(ValueError):
    """A network whose own forward cannot be computed in stretches."""


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors of tuples, lists, dicts and dataclasses in each other."""
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
    """The same on the meta device."""
    if isinstance(value, Tensor):
        return value if value.is_meta and not isinstance(value, nn.Parameter) else value.detach().to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(v, function) for v in value))
    if type(value) in (tuple, list):
        return type(value)(_mapped(v, function) for v in value)
    if type(value) is dict:
        return {k: _mapped(v, function) for k, v in value.items()}
    return function(value)


def on_meta(func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
    args, kwargs = _mapped((args, kwargs), _meta)
    kwargs = {k: "meta" if k == "device" else v for k, v in kwargs.items() if k != "generator"}
    with torch.no_grad(), torch.device("meta"):
        return func(*args, **kwargs)


def fresh(result: Any, given: Sequence[Tensor]) -> Any:
    """Tensors that share nothing with others."""
    known = {id(t) for t in given}

    def one(t: Any) -> Any:
        if not isinstance(t, Tensor) or id(t) in known:
            return t
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    if isinstance(result, tuple) and not hasattr(result, "_fields") and type(result) is not tuple:
        return tuple(map(one, result))  # what torch returns of sorting and the like
    return _mapped(result, one)


def shapes_of(module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
    """What a module gives, of the meta device."""
    state = {k: _meta(t) for k, t in (*module.named_parameters(), *module.named_buffers())}
    copies: dict[int, Any] = {}

    def one(value: Any) -> Any:
        if value is None or isinstance(value, Tensor | torch.device | bool | int | float | str | nn.Module):
            return _meta(value)
        copies[id(value)] = copy.deepcopy(value)  # what it changes in there is for the rank that calls it
        return copies[id(value)]

    try:
        with torch.no_grad(), torch.device("meta"):
            own_args, own_kwargs = _mapped((args, kwargs), one)
            found = torch.func.functional_call(module, state, own_args, own_kwargs)
    except Exception as error:
        raise CannotRun(
            f"what {name} ({type(module).__name__}) gives has a shape that depends on the numbers it is given, which "
            "another stage does not have"
        ) from error
    given = [*leaves((own_args, own_kwargs))]
    back = {id(c): o for o, c in ((v, copies[id(v)]) for v in _opaque((args, kwargs), copies))}
    return _fresh_structure(found, back, given, list(leaves((args, kwargs))))


def _opaque(value: Any, copies: Mapping[int, Any]) -> list[Any]:
    found: list[Any] = []
    _mapped(value, lambda v: found.append(v) if id(v) in copies else None)
    return found


def _fresh_structure(found: Any, back: Mapping[int, Any], given: Sequence[Tensor], originals: Sequence[Tensor]) -> Any:
    """What was found, with the caller's own objects and tensors where it is these that are given back."""
    same = {id(g): o for g, o in zip(given, originals, strict=False)}

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return same.get(id(value)) if id(value) in same else fresh(value, ())
        return back.get(id(value), value)

    if is_dataclass(found) and not isinstance(found, type):
        for each in fields(found):
            setattr(found, each.name, _mapped(getattr(found, each.name), one))
        return found
    if isinstance(found, Mapping) and type(found) is not dict:
        for key in list(found):
            found[key] = _mapped(found[key], one)  # type: ignore[index]
        return found
    return _mapped(found, one)
