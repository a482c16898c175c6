"""The two modes of a network, and networks whose ``train()`` and ``eval()`` do more than torch's.

torch's own set ``training`` of every module and nothing else, and so does this package, without a call. A network may
override them: to keep a layer in evaluation mode, to draw in evaluation too, or to make what evaluation computes from
its weights (branches folded into one, an update of low rank added to the weight). Such a network is called as a loop of
one's own calls it: ``train()`` before the first step and after an evaluation, ``eval()`` before it. A module that is in
evaluation mode as ``model=`` returns it stays so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

_draws: WeakSet[nn.Module] = WeakSet()
"""The modules that are in training mode while the network is evaluated, as its ``eval()`` has it."""
_makes: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()
"""The networks whose ``train()`` or ``eval()`` change more than modes: whose method, and what it changes."""
_begun: WeakSet[nn.Module] = WeakSet()
"""The modules with methods of their own that were called already: a part of a network is not begun again."""


def overriding(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that have a ``train`` or an ``eval`` of their own."""
    plain = nn.Module.train, nn.Module.eval
    return [
        module
        for module in modules
        if (type(module).train, type(module).eval) != plain or not module.__dict__.keys().isdisjoint(("train", "eval"))
    ]


def begin_training(model: nn.Module) -> None:
    """Put a fresh network into training mode by its own ``train()``, where it has one, and learn what its ``eval()``
    does. A network that ``model=`` returns in evaluation mode stays in it."""
    own = overriding(model.modules())
    if not model.training or all(module in _begun for module in own):
        return
    still = [module for module in model.modules() if not module.training]
    before = _Contents(model)
    try:
        model.eval()
        draws = [module for module in model.modules() if module.training]
        changed = before.changed(model)
        model.train()
        changed = changed or before.changed(model)
    except Exception as error:
        raise ValueError(
            f"{_named(own[0])} of the network that model= returns raises {type(error).__name__}: {error}; it is called "
            "before the first step, as before an evaluation: let it work on a network that has just been made"
        ) from error
    before.put_back(model)
    for module in still:
        module.eval()
    _begun.update(own)
    _draws.update(draws)
    if changed is not None:
        _makes[model] = _named(own[0]), changed


def made_by_modes(model: nn.Module) -> tuple[str, str] | None:
    """Return whose ``train()`` and ``eval()`` change more than modes, and what they change; None where a network has
    torch's own, or where they set modes alone."""
    return _makes.get(model)


def refuse_making(model: nn.Module, why: str) -> None:
    """Raise ValueError where a network makes something of its weights in ``train()`` or ``eval()``. ``why``: what a
    rank has of the weights."""
    if (found := made_by_modes(model)) is not None:
        method, what = found
        raise ValueError(
            f"{method} changes {what}, and {why}: compute it in the forward where self.training is False, or use "
            "data_parallel or single_device"
        )


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put those of the modules that train into evaluation mode meanwhile, without a call."""
    training = [module for module in modules if module.training and module not in _draws]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def evaluating_as_written(model: nn.Module) -> Iterator[None]:
    """Call ``eval()`` of a network, and ``train()`` afterwards, which may change its weights: on copies of them, so
    that the weights are afterwards what they were, to the bit, and no thread that shares them sees a change."""
    still = [module for module in model.modules() if not module.training]
    own = [(p, p.data) for p in model.parameters()]
    for p, values in own:
        p.data = values.clone()
    try:
        model.eval()
        yield
    finally:
        model.train()
        for module in still:
            module.eval()
        for p, values in own:
            p.data = values


class _Contents:
    """What a network holds: its tensors, and the attributes of its modules, ``training`` left out."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {
            name: (t, t.detach().clone()) for name, t in (*model.named_parameters(), *model.named_buffers())
        }
        self._attributes = _attributes(model)

    def changed(self, model: nn.Module) -> str | None:
        """Return the name of something that is not as it was; None where all is."""
        now = dict((*model.named_parameters(), *model.named_buffers()))
        for name, (tensor, values) in self._tensors.items():
            if now.get(name) is not tensor or not torch.equal(tensor, values):
                return name
        if added := now.keys() - self._tensors.keys():
            return min(added)
        attributes = _attributes(model)
        for name in sorted({*attributes, *self._attributes}):
            before, after = self._attributes.get(name, _NOTHING), attributes.get(name, _NOTHING)
            if before is not after and not _equal(before, after):
                return name
        return None

    def put_back(self, model: nn.Module) -> None:
        """Give the tensors the values that they had: a sum and a difference are not the number that there was."""
        for tensor, values in self._tensors.values():
            if tensor.shape == values.shape:
                tensor.data.copy_(values)


_NOTHING = object()
_OF_TORCH = frozenset(nn.Module().__dict__)


def _attributes(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if name not in _OF_TORCH
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False  # made anew: it may be made of weights
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:
        return False


def _named(module: nn.Module) -> str:
    own = next((n for n in ("train", "eval") if getattr(type(module), n) is not getattr(nn.Module, n)), "train")
    return f"{type(module).__name__}.{own}()"
