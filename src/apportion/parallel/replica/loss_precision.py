"""A loss in the precision of its model: the tensors that it keeps are cast, and nothing of the user's is changed.

A network that is trained or proved in float64 gives outputs in float64, and torch does not take class weights in
float32 for them. Tensors are found where a loss may keep them: in a module, an object, a partial, the closure, the
defaults and the globals of a function. What leads to such a tensor is made anew; everything else is shared, so that a
loss which counts its calls goes on counting.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

DEPTH = 12
"""The number of objects that are followed into one another."""
_Loss = Callable[..., Any]


def loss_in_precision(loss: _Loss, dtype: torch.dtype) -> _Loss:
    """Returns the loss with the floating tensors that it keeps cast to this dtype; itself, where there is nothing to
    cast. A part that is trained is left as it is: it may belong to the model, which is cast by itself."""
    found: _Loss = _Casting(dtype).cast(loss, DEPTH)
    return found


class _Globals(dict[str, Any]):
    """The globals of a function, of which some have another value."""

    def __init__(self, others: dict[str, Any], changed: dict[str, Any]) -> None:
        super().__init__({**changed, "__builtins__": others.get("__builtins__", __builtins__)})
        self._others = others

    def __missing__(self, name: str) -> Any:
        return self._others[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._others

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (it asks this very function)


class _Casting:
    """Casts values, each once, so that what two of them share they still share."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._done: dict[int, tuple[Any, Any]] = {}
        """The values that were cast, kept alive, and what became of them, by their ids."""

    def cast(self, value: Any, depth: int) -> Any:
        if id(value) in self._done:
            return self._done[id(value)][1]
        self._done[id(value)] = value, value  # what leads back to itself stays
        found = value if depth == 0 else self._cast(value, depth - 1)
        self._done[id(value)] = value, found
        return found

    def _cast(self, value: Any, depth: int) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, functools.partial):
            changed = [self.cast(part, depth) for part in (value.func, value.args, value.keywords)]
            same = changed[0] is value.func and changed[1] is value.args and changed[2] is value.keywords
            return value if same else functools.partial(changed[0], *changed[1], **changed[2])
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            owner = self.cast(value.__self__, depth)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if type(value) in (list, tuple):
            parts = [self.cast(part, depth) for part in value]
            return value if _same(parts, value) else type(value)(parts)
        if type(value) is dict:
            parts = [self.cast(part, depth) for part in value.values()]
            return value if _same(parts, value.values()) else dict(zip(value, parts, strict=True))
        return self._object(value, depth) if _may_keep_tensors(value) else value

    def _tensor(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype is self._dtype or tensor.requires_grad:
            return tensor
        found = tensor.to(self._dtype)
        return nn.Parameter(found, requires_grad=False) if isinstance(tensor, nn.Parameter) else found

    def _object(self, value: Any, depth: int) -> Any:
        if isinstance(value, nn.Module) and any(p.requires_grad for p in value.parameters()):
            return value
        parts = self.cast(value.__dict__, depth)
        if parts is value.__dict__:
            return value
        found = object.__new__(type(value))
        found.__dict__.update(parts)
        return found

    def _function(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        code = function.__code__
        cells = [self._cell(cell, depth) for cell in function.__closure__ or ()]
        defaults, options = (self.cast(given, depth) for given in (function.__defaults__, function.__kwdefaults__))
        changed = {}
        for name in () if _writes_globals(code) else _names(code):
            kept = function.__globals__.get(name)
            elsewhere = isinstance(kept, types.FunctionType) and kept.__globals__ is not function.__globals__
            if kept is not None and not elsewhere and (found := self.cast(kept, depth)) is not kept:
                changed[name] = found
        same = _same(cells, function.__closure__ or ()) and not changed
        if same and defaults is function.__defaults__ and options is function.__kwdefaults__:
            return function
        names = _Globals(function.__globals__, changed) if changed else function.__globals__
        found = types.FunctionType(code, names, function.__name__, defaults, tuple(cells) or None)
        found.__kwdefaults__ = options
        found.__dict__.update(function.__dict__)
        return functools.wraps(function)(found)  # type: ignore[return-value]

    def _cell(self, cell: Any, depth: int) -> Any:
        try:
            kept = cell.cell_contents
        except ValueError:  # nothing is in it yet
            return cell
        found = self.cast(kept, depth)
        return cell if found is kept else types.CellType(found)


def _same(found: Any, before: Any) -> bool:
    return all(a is b for a, b in zip(found, before, strict=True))


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names that some code, and the functions that it makes, may look for among its globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _writes_globals(code: types.CodeType) -> bool:
    """Tells whether some code assigns to a global, which has to be that of its own module."""
    return any(instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for instruction in dis.get_instructions(code))


def _may_keep_tensors(value: Any) -> bool:
    """Tells whether a value is a module, or an object of a class of the user's."""
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, type | types.ModuleType | torch.Generator | Optimizer) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "apportion", "functools")
