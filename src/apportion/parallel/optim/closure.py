"""Optimizers that evaluate the loss themselves, as L-BFGS does: the closure they call, and the state they keep.

Their state is not one tensor a slot: L-BFGS keeps lists of directions, counts, and the last loss, all beside its first
parameter. Tensors are named by their place (``old_dirs.3``); the rest is plain, and says where they belong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_TENSOR = "tensor"


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's ``step`` must be given a function that evaluates the loss and the gradient
    anew."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class Closure:
    """A closure that returns the loss, with its gradient in ``p.grad``: at first the one that was just computed, then
    computed again."""

    def __init__(self, loss: Tensor, parameters: list[Any], again: Callable[[], Tensor]) -> None:
        self._loss: Tensor | None = loss
        self._parameters, self._again = parameters, again

    def __call__(self) -> Tensor:
        if self._loss is not None:
            loss, self._loss = self._loss, None
            return loss
        for p in self._parameters:
            p.grad = None
        return self._again()


def can_be_kept(value: Any) -> bool:
    """Return whether a value consists of tensors, numbers, None, and lists of them."""
    if isinstance(value, list):
        return all(map(can_be_kept, value))
    return value is None or isinstance(value, Tensor | bool | int | float)


def tensors(slot: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a slot, by name."""
    if isinstance(value, Tensor):
        yield slot, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from tensors(f"{slot}.{i}", item)


def rest(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one parameter's slots hold beside plain tensors, with a mark where a tensor belongs in a list."""
    # In one order: an optimizer adds slots as it goes, and those that were loaded lie in another one.
    return {
        slot: _marked(value) for slot, value in sorted(slots.items()) if value is not None and not _is_tensor(value)
    }


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _marked(value: Any) -> Any:
    if isinstance(value, list):
        return [_marked(item) for item in value]
    return _TENSOR if _is_tensor(value) else value


def put_together(named: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return one parameter's slots, from its tensors by name and the rest."""
    whole: dict[str, Any] = {name: t for name, t in named.items() if name.partition(".")[0] not in plain}
    return whole | {slot: _unmarked(slot, value, named) for slot, value in plain.items()}


def _unmarked(name: str, value: Any, named: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unmarked(f"{name}.{i}", item, named) for i, item in enumerate(value)]
    return named[name] if value == _TENSOR else value
