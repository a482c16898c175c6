"""A call as it stands in the model: its arguments by name, and which of them lie in strips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from apportion.parallel.strips_holding import Holding
from apportion.parallel.strips_tensor import Strip

Call = Callable[[Holding, Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""(holding, the function as it stands in the model, its arguments): strips among them, and what comes out."""

_NUMPYS = {"axis": "dim", "keepdims": "keepdim", "x": "input"}
"""Names that torch takes, too."""


def arguments(names: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """By name. What is not among these names may change what comes out, and is refused."""
    known = names.split()
    given = {_NUMPYS.get(name, name): value for name, value in kwargs.items()}
    strange = [*map(str, args[len(known) :]), *(f"{name}=" for name in given if name not in known)]
    if strange:
        raise ValueError(f"its argument {strange[0]} is not known on a strip")
    return defaults | dict(zip(known, args, strict=False)) | given


def image_of(given: Mapping[str, Any]) -> Strip:
    """The argument that is to be a strip."""
    x = given.get("input")
    if not isinstance(x, Strip):
        raise ValueError("one of its arguments is a part of an image, and its input is not")
    return x


def name_of(call: Any) -> str:
    """A function's name, or a method's."""
    return str(call if isinstance(call, str) else call.__name__)


def function_of(call: Any) -> Callable[..., Any]:
    """A function, or the method of its first argument."""
    if not isinstance(call, str):
        function: Callable[..., Any] = call
        return function
    return lambda x, *args, **kwargs: getattr(x, call)(*args, **kwargs)


def in_place(call: Any) -> bool:
    """Does it write into its first argument?"""
    if getattr(call, "__module__", "") == "_operator":
        return name_of(call) in ("iadd", "isub", "imul", "itruediv", "ipow")
    return name_of(call).endswith("_")


def unflat(x: Strip) -> Strip:
    """As an image."""
    if x.flat:
        raise ValueError(f"{x.held()} was flattened, and is used as an image")
    return x
