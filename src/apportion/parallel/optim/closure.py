"""Optimizers that evaluate the loss themselves, as L-BFGS does: the closure they call, and the state they keep.

Their state is not one tensor a slot: L-BFGS keeps lists of directions, counts, and the last loss, all beside its first
parameter. Tensors are named by their place (``old_dirs.3``); the rest is plain, and says where they belong.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apportion.core.rng import fork_rng
from apportion.core.torch_private import remove_step_hooks, version_of

TRIED_NUMBERS = 4_000_000
"""The number of parameters up to which an optimizer is tried on copies of them; of more, stand-ins are tried."""
_TENSOR = "tensor"


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's ``step`` must be given a function that evaluates the loss and the gradient
    anew: it says so, as L-BFGS, or it is not torch's own and fails without one, as sharpness-aware minimization does.
    That is tried on a copy, whose step hooks are not called."""
    step = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None or closure.default is inspect.Parameter.empty:
        return closure is not None
    return not step.__module__.startswith("torch.optim.") and not _steps(optimizer) and _steps(optimizer, closure=True)


def _steps(optimizer: Optimizer, *, closure: bool = False) -> bool:
    """Return whether a copy of the optimizer makes a step with a gradient of zeros, with or without a closure."""
    try:
        with fork_rng(), torch.enable_grad():
            tried: Any = object.__new__(type(optimizer))
            # torch's own copy leaves attributes out.
            tried.__dict__.update(copy.deepcopy(optimizer.__dict__, _stand_ins(optimizer)))
            remove_step_hooks(tried)
            parameters = [p for group in tried.param_groups for p in group["params"]]

            def evaluated() -> Tensor:
                for p in parameters:
                    p.grad = torch.zeros_like(p)
                return torch.zeros((), requires_grad=True).sum()

            evaluated()
            tried.step(evaluated) if closure else tried.step()
    except Exception:
        return False
    return True


def copies_to_try(parameters: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return parameters on which an optimizer may be tried: copies, or, of more than TRIED_NUMBERS, zeros of at most
    two in each dimension, so that a trial of a large network takes neither its memory nor its time."""
    if sum(p.numel() for p in parameters) <= TRIED_NUMBERS:
        return [nn.Parameter(p.detach().clone(), p.requires_grad) for p in parameters]
    return [nn.Parameter(p.new_zeros([min(n, 2) for n in p.shape]), p.requires_grad) for p in parameters]


def _stand_ins(optimizer: Optimizer) -> dict[int, Any]:
    """Return what a deep copy of an optimizer has in the place of its parameters, by their ids."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {id(p): made for p, made in zip(parameters, copies_to_try(parameters), strict=True)}


class Closure:
    """A closure that returns the loss, with its gradient in ``p.grad``: the one that was just computed, for as long as
    the optimizer has left weights and gradients as they were, and then computed again."""

    def __init__(self, loss: Tensor, parameters: list[Any], again: Callable[[], Tensor], *, torchs: bool) -> None:
        """``torchs``: the optimizer is one of torch's, which ask for the loss before they change anything."""
        self._loss: Tensor | None = loss
        self._parameters, self._again = parameters, again
        self._before = None if torchs else self._now()

    def __call__(self) -> Tensor:
        loss, self._loss = self._loss, None
        if loss is not None and (self._before is None or self._before == self._now()):
            return loss
        for p in self._parameters:
            p.grad = None
        return self._again()

    def _now(self) -> list[Any]:
        """What tells whether weights or gradients were written to; through ``.data`` torch does not count it."""
        gradients = [p.grad for p in self._parameters]
        norms = [torch.linalg.vector_norm(p.detach()).item() for p in self._parameters]
        versions = [(id(g), None if g is None else version_of(g)) for g in gradients]
        return [versions, [version_of(p) for p in self._parameters], norms]


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
