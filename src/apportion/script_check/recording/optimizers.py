"""Records each optimizer step: the gradients before it, the weights after it, learning rates and training state.

torch's global hooks see every optimizer that subclasses its own. An optimizer that calls ``super().step()`` has them
called twice, of which the outer call counts. ``plain_optimizers.py`` adds those of other classes. The steps of
schedulers are counted as well: a warm-up that is advanced twice for each optimizer step has the rates of one with twice
the rate, and only the count distinguishes them.
"""

from __future__ import annotations

import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from apportion.script_check.recording.constants import Replay
from apportion.script_check.recording.contributions import Contributions
from apportion.script_check.recording.modules import Networks, gathered
from apportion.script_check.recording.names import variable_of
from apportion.script_check.recording.recorder import Finished, Recorder
from apportion.script_check.recording.tensors import digest, local_bytes, placements, set_values, values
from apportion.script_check.recording.wrappers import Flattening, Wrappers


class ScheduleSteps:
    """The number of steps that schedulers have made, by optimizer."""

    def __init__(self) -> None:
        self._made = weakref.WeakKeyDictionary[Any, int]()

    def add(self, optimizer: Any) -> None:
        """After a step of a scheduler of an optimizer, or of an object that holds it, as accelerate's does."""
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        self._made[optimizer] = self._made.get(optimizer, 0) + 1

    def count(self, optimizer: Any) -> int:
        """Returns the number of steps that the schedulers of an optimizer have made."""
        try:
            return self._made.get(optimizer, 0)
        except TypeError:  # of another class than torch's, which has no weak references
            return 0


def _watch_schedulers(recorder: Recorder) -> ScheduleSteps:
    """Watch ``step`` of torch's schedulers."""
    steps, step = ScheduleSteps(), LRScheduler.step

    @wraps(step)
    def counted(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        if recorder.active:
            steps.add(self.optimizer)

    LRScheduler.step = counted  # type: ignore[method-assign]
    return steps


MOMENTA = ("momentum", "betas")
"""What else than the rate a schedule changes in a group of parameters, as that of one cycle does."""

_BEFORE_CLOSURE = ("rates", "momenta", "weights_before", "stateful", "generators")
"""What is recorded of a step before a closure is called, as the closure or the step may change it."""


@dataclass(frozen=True)
class Watches:
    """What else is watched of an optimizer's parameters."""

    contributions: Contributions
    wrappers: Wrappers
    flattening: Flattening


class OptimizerSteps:
    """The optimizer steps of this rank."""

    def __init__(
        self, recorder: Recorder, networks: Networks, watches: Watches, schedules: ScheduleSteps, replay: Replay | None
    ) -> None:
        self._recorder, self._networks, self._replay = recorder, networks, replay
        self._contributions, self._wrappers = watches.contributions, watches.wrappers
        self._flattening, self._schedules = watches.flattening, schedules
        self._ignored = False
        self._depth = dict[int, int]()
        self._numbers = dict[int, int]()
        self._made = dict[int, int]()
        self._before = dict[str, Any]()
        self._rates = list[dict[str, Any]]()
        self._alive = list[Any]()
        self._variables = dict[int, tuple[Tensor, str | None]]()
        self.begun = 0
        """The number of steps begun."""

    def before(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> tuple[Any, Any] | None:
        """Before a step: its gradients. Where the step is given a closure, which computes them, they are recorded once
        it has; returns the arguments with such a closure."""
        self._depth[id(optimizer)] = depth = self._depth.get(id(optimizer), 0) + 1
        if depth > 1 or not self._recorder.active:
            return None
        self._ignored = _makes_state(self._recorder)
        if self._ignored:
            return None
        self.begun += 1
        given = _with_closure(args, kwargs or {}, lambda closure: self._closure_recorder(optimizer, closure))
        if given is None:
            self._record_gradients(optimizer)
            made = not self._ignored
        else:
            made = self._replay is None or self._replay.last
            if made:
                self._check_last(optimizer)
        # After the rates of the script itself were recorded, and before a closure computes with those fed.
        if made:
            self._feed_rates(optimizer, self._number(optimizer))
        return given

    def _record_gradients(self, optimizer: Any, known: Mapping[str, Any] | None = None) -> None:
        """Record what an optimizer is given, once its gradients are computed. ``known``: what was observed before."""
        self._ignored = self._replay is not None and not self._replay.step(optimizer)
        if self._ignored:
            return
        self._check_last(optimizer)
        number = self._number(optimizer)
        self._wrappers.before_step(number)
        with gathered(self._networks.roots(), gradients=True):
            self._before = {**self.state_before(optimizer), **(known or {})}
            self._record_contributions(optimizer, number)
        # Until the step is complete, a backward belongs to the line search of the optimizer.
        self._contributions.stepping = True

    def _check_last(self, optimizer: Any) -> None:
        """Raise Finished where an optimizer has made the last step that is recorded."""
        if self._made.get(self._number(optimizer), 0) >= self._recorder.plan["steps"]:
            raise Finished

    def _closure_recorder(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a closure after whose first call the gradients are recorded; later ones belong to a line search."""
        self._before = self.state_before(optimizer)  # in case that the closure is not called
        # The gradients are those after the first call of the closure; all else is as it was before, since a closure may
        # draw numbers or change the rate.
        known = {key: self._before[key] for key in _BEFORE_CLOSURE}
        begun = False

        @wraps(closure)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            nonlocal begun
            loss = closure(*args, **kwargs)
            if not begun:
                begun = True
                self._record_gradients(optimizer, known)
            return loss

        return recorded

    def before_plain(self, optimizer: Any) -> None:
        """Before a step of an optimizer that torch's hooks do not see. Raises Finished after the last one."""
        self._check_last(optimizer)
        self._record_contributions(optimizer, self._number(optimizer))
        self._rates = []

    def state_before(self, optimizer: Any) -> dict[str, Any]:
        """Returns what is recorded of an optimizer before a step."""
        number = self._numbers.get(id(optimizer), len(self._numbers))
        parameters = dict(self._parameters(optimizer, number))
        sampled = self._networks.sampled
        return {
            "optimizer": number,
            "type": getattr(optimizer, "kind", type(optimizer).__name__),
            "rates": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "schedule_steps": self._schedules.count(optimizer),
            "momenta": [{key: group[key] for key in MOMENTA if key in group} for group in optimizer.param_groups],
            "gradients": {name: None if p.grad is None else values(p.grad, sampled) for name, p in parameters.items()},
            "placements": {name: placements(p) for name, p in parameters.items() if isinstance(p, DTensor)},
            "state_shards": _state_shards(parameters, optimizer),
            "evaluating": dict(self._networks.evaluating),
            "decays": [float(group["weight_decay"]) for group in optimizer.param_groups if "weight_decay" in group],
            "trainable": {n: p.requires_grad for root in self._networks.roots() for n, p in root.parameters()},
            "forwards": self._networks.forwards,
            "weights_before": fingerprint(optimizer),
            "stateful": any(optimizer.state.get(parameter) for parameter in parameters.values()),
            "flattened": [name for name, p in parameters.items() if self._flattening.is_stale(optimizer, p)],
            "made_at": self._flattening.made_at(optimizer),
            "generators": generators(),
            "site": self._recorder.site(),
        }

    def after(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """After a step: its weights."""
        self._depth[id(optimizer)] -= 1
        if self._depth[id(optimizer)] or not self._recorder.active or self._ignored:
            return
        self._contributions.stepping = False
        with gathered(self._networks.roots(), gradients=True):
            self.record_step(optimizer, self._before)
        self._feed_weights(optimizer)

    def record_step(self, optimizer: Any, before: dict[str, Any]) -> None:
        """Record a step, ``before``: what ``state_before`` returned."""
        number = self._number(optimizer)
        for group, own in zip(optimizer.param_groups, self._rates, strict=False):
            group.update(own)  # as a schedule may compute the next rate from this one
        self._rates = []
        sampled = self._networks.sampled
        self._made[number] = self._made.get(number, 0) + 1
        self._recorder.step += 1
        self._recorder.emit(
            "step",
            **{**before, "optimizer": number},
            number=self._made[number],
            weights_after=fingerprint(optimizer),
            weights={name: values(p, sampled) for name, p in self._parameters(optimizer, number)},
            buffers={name: values(b, sampled) for root in self._networks.roots() for name, b in root.buffers()},
            state=_state(dict(self._parameters(optimizer, number)), optimizer),
        )

    def _record_contributions(self, optimizer: Any, number: int) -> None:
        parameters = dict(self._parameters(optimizer, number))
        self._contributions.before_step(number, self._made.get(number, 0) + 1, parameters)

    def _number(self, optimizer: Any) -> int:
        if id(optimizer) not in self._numbers:
            self._numbers[id(optimizer)] = len(self._numbers)
            self._alive.append(optimizer)  # so that no other gets its id
        return self._numbers[id(optimizer)]

    def _parameters(self, optimizer: Any, number: int) -> Iterator[tuple[str, Tensor]]:
        position = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._networks.name(parameter) or self._variable(parameter) or f"optimizer{number}.{position}"
                yield name, parameter
                position += 1

    def _variable(self, parameter: Tensor) -> str | None:
        known = self._variables.get(id(parameter))
        if known is None or known[0] is not parameter:
            name = variable_of(parameter, self._recorder.user_frames())
            known = self._variables[id(parameter)] = (parameter, name)  # held, so that no other gets its id
        return known[1]

    def _feed_rates(self, optimizer: Any, number: int) -> None:
        """Takes the learning rates and momenta of the pass that this one is fed from, so that a difference between the
        schedules is found as such and not in every weight."""
        self._rates = []
        feed = self._recorder.feed
        steps = feed.rates.get(number, []) if feed is not None else []
        made = self._made.get(number, 0)
        if made < len(steps) and len(steps[made]) == len(optimizer.param_groups):
            momenta = [each for each in feed.momenta.get(number, [])[made : made + 1] if each]
            fed = zip(optimizer.param_groups, steps[made], *momenta, strict=True)
            for group, rate, *more in fed:
                self._rates.append({key: group[key] for key in ("lr", *MOMENTA) if key in group})
                group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
                group.update({key: value for each in more for key, value in each.items() if key in group})

    def _feed_weights(self, optimizer: Any) -> None:
        """Goes on with the weights of the pass that this one is fed from, so that the gradients of each step can be
        compared by themselves."""
        number = self._number(optimizer)
        feed = self._recorder.feed
        fed = feed.weights_after.get(number, []) if feed is not None else []
        if self._made[number] > len(fed):
            return
        for name, parameter in self._parameters(optimizer, number):
            set_values(parameter, fed[self._made[number] - 1].get(name))


def _with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the arguments of a step with its closure changed; None where it has none. The first one is the
    optimizer."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": change(kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):
        return (args[0], change(args[1]), *args[2:]), kwargs
    return None


def _makes_state(recorder: Recorder) -> bool:
    """Whether torch makes a step of its own, with zero gradients and rates, that an optimizer has a state to load."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not recorder.is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_filename.endswith(os.path.join("distributed", "checkpoint", "state_dict.py")):
            return True
        frame = frame.f_back
    return False


def fingerprint(optimizer: Any) -> str:
    """Returns a digest of the weights of an optimizer as this rank holds them, which shows where a run has resumed."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return digest("".join(digest(local_bytes(parameter)) for parameter in parameters).encode())


def generators() -> dict[str, str]:
    """Returns a digest of the state of each generator of random numbers on the CPU."""
    state: Any = np.random.get_state()
    return {
        "torch": digest(torch.get_rng_state()),
        "python": digest(repr(random.getstate()).encode()),
        "numpy": digest(np.asarray(state[1]).tobytes() + str(state[2:]).encode()),
    }


def _state(parameters: dict[str, Tensor], optimizer: Any) -> dict[str, dict[str, float]]:
    """The norm of each tensor of an optimizer's state, by parameter; sharded ones are left out."""
    return {
        name: {
            key: float(value.detach().double().norm())
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and not isinstance(value, DTensor)
        }
        for name, parameter in parameters.items()
    }


def _state_shards(parameters: dict[str, Tensor], optimizer: Any) -> dict[str, dict[str, str]]:
    """A digest of what this rank holds of each sharded tensor of an optimizer's state, by parameter; those that do not
    vary, as before the first step, are left out."""
    found = dict[str, dict[str, str]]()
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, DTensor) and any(placement.is_shard() for placement in value.placements):
                local = value.to_local()
                if local.numel() > 1 and bool((local != local.flatten()[0]).any()):
                    found.setdefault(name, {})[key] = digest(local_bytes(value))
    return found


def install(recorder: Recorder, networks: Networks, watches: Watches, replay: Replay | None) -> OptimizerSteps:
    """Watch the steps of every optimizer of torch's kind."""
    steps = OptimizerSteps(recorder, networks, watches, _watch_schedulers(recorder), replay)
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)
    return steps
