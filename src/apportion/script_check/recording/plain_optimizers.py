"""Records the steps of optimizers that do not subclass torch's, and of updates that a script writes out by itself.

A class of the script that defines ``step`` and has ``zero_grad`` is taken for an optimizer where its ``step`` runs no
other optimizer's. A script that makes no optimizer at all, and changes tensors that have gradients in place, makes a
step from the first such change after a backward to the next backward.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apportion.script_check.recording.modules import Networks
from apportion.script_check.recording.optimizers import OptimizerSteps
from apportion.script_check.recording.recorder import Recorder

_CHANGES = {"__isub__", "__iadd__", "__imul__", "sub_", "add_", "mul_", "copy_", "addcdiv_", "addcmul_", "lerp_"}


class _PlainOptimizer:
    """What ``OptimizerSteps`` asks of an optimizer, for an object of another class. ``kind``: the name of that."""

    def __init__(self, kind: str, parameters: list[Tensor], optimizer: Any) -> None:
        self.kind, self.optimizer = kind, optimizer
        groups = getattr(optimizer, "param_groups", None)
        rate = getattr(optimizer, "lr", None)
        held: dict[str, Any] = {"params": parameters} | ({"lr": rate} if isinstance(rate, float) else {})
        self.param_groups = groups if isinstance(groups, list) else [held]
        self.state: dict[Any, Any] = {}


class PlainOptimizers:
    """The optimizers of other classes on this rank, and the updates without one."""

    def __init__(self, recorder: Recorder, networks: Networks, steps: OptimizerSteps) -> None:
        self._recorder, self._networks, self._steps = recorder, networks, steps
        self._known = dict[int, _PlainOptimizer]()
        self._wrappers = list[Any]()
        self._depth = 0
        self._written: _PlainOptimizer | None = None
        self._open: dict[str, Any] | None = None
        self.exist = False
        """Whether the script has made an optimizer of any class."""

    def wrapped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a ``step`` that is recorded."""

        @wraps(step)
        def recorded(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            ignored = self._depth or not self._recorder.active or any(each is optimizer for each in self._wrappers)
            plain = None if ignored else self._plain(optimizer)
            if plain is None:
                return step(optimizer, *args, **kwargs)
            self.exist = True
            begun, before = self._steps.begun, self._steps.state_before(plain)
            self._depth += 1
            try:
                result = step(optimizer, *args, **kwargs)
            finally:
                self._depth -= 1
            # Torch's hooks have seen a step meanwhile: this object wraps an optimizer of torch's kind.
            if self._steps.begun != begun:
                self._wrappers.append(optimizer)  # the optimizer that it holds has recorded the step
                return result
            self._steps.before_plain(plain)
            self._steps.record_step(plain, before)
            return result

        return recorded

    def before_change(self, name: str, target: Any) -> None:
        """Before a function that may change a tensor in place."""
        if name not in _CHANGES or self.exist or not isinstance(target, Tensor):
            return
        if self._open is not None:
            return
        parameters = self._with_gradients()
        if any(_is(target, each) for each in parameters):
            self._written = self._written or _PlainOptimizer("update without an optimizer", parameters, None)
            self._steps.before_plain(self._written)
            self._open = self._steps.state_before(self._written)
            # a script may sum and divide each gradient anywhere in its update, so only the weights are compared
            self._open["gradients"] = dict.fromkeys(self._open["gradients"])

    def close(self) -> None:
        """The update that is under way is complete."""
        if self._open is not None and self._written is not None:
            before, self._open = self._open, None
            self._steps.record_step(self._written, before)

    def _with_gradients(self) -> list[Tensor]:
        found = [p for root in self._networks.roots() for _, p in root.parameters() if p.grad is not None]
        return found or [tensor for tensor in self._variables() if tensor.grad is not None]

    def _variables(self) -> Iterator[Tensor]:
        seen = set[int]()
        for variables in (each for f in self._recorder.user_frames() for each in (f.f_locals, f.f_globals)):
            for tensor in (tensor for value in list(variables.values()) for tensor in _tensors(value)):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor

    def _plain(self, optimizer: Any) -> _PlainOptimizer | None:
        known = self._known.get(id(optimizer))
        if known is None:
            parameters = [t for value in vars(optimizer).values() for t in _tensors(value)]
            parameters = list({id(t): t for t in parameters}.values()) or self._with_gradients()
            if not parameters:
                return None
            known = self._known[id(optimizer)] = _PlainOptimizer(type(optimizer).__name__, parameters, optimizer)
        return known


def _is(target: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor is a parameter or its ``.data``."""
    if target is parameter:
        return True
    return target.shape == parameter.shape and target.data_ptr() == parameter.data_ptr()


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The trainable tensors of a variable."""
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield value
    elif isinstance(value, nn.Module):
        yield from (p for p in value.parameters() if p.requires_grad)
    elif depth < 3 and type(value) in (list, tuple, dict):
        for held in value.values() if isinstance(value, dict) else value:
            yield from _tensors(held, depth + 1)


def install(recorder: Recorder, networks: Networks, steps: OptimizerSteps) -> PlainOptimizers:
    """Watch the classes that the script defines, and ``backward``."""
    plain = PlainOptimizers(recorder, networks, steps)
    build = builtins.__build_class__

    def built(body: Any, name: str, *bases: Any, **kwargs: Any) -> Any:
        made = build(body, name, *bases, **kwargs)
        step = vars(made).get("step") if isinstance(made, type) else None
        if (
            callable(step)
            and hasattr(made, "zero_grad")
            and not issubclass(made, Optimizer | nn.Module)
            and not made.__module__.startswith("torch.")
        ):
            made.step = plain.wrapped(step)
        return made

    # As a class is built, before it can be subclassed or an instance keeps a reference to its step.
    builtins.__build_class__ = built  # type: ignore[assignment]
    make = Optimizer.__init__

    @wraps(make)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        plain.exist = True
        make(self, *args, **kwargs)

    Optimizer.__init__ = noted  # type: ignore[method-assign]
    backward = torch.Tensor.backward

    @wraps(backward)
    def closing(self: Tensor, *args: Any, **kwargs: Any) -> None:
        plain.close()
        backward(self, *args, **kwargs)

    torch.Tensor.backward = closing  # type: ignore[method-assign]
    return plain
