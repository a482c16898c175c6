"""The parameters that updates change (``TrainedParameters``), and the optimizers of a replica with their schedules and
the loss scale: made, stepped, saved and loaded (``ReplicaOptimizers``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from apportion.core.average import WeightAverage
from apportion.core.json_data import from_plain, to_plain
from apportion.core.rng import seeded_rng
from apportion.core.schedules import EpochSchedule, MetricSchedule
from apportion.core.strategy import State
from apportion.core.torch_private import mark_stepped, remove_step_hooks
from apportion.core.workload import Workload
from apportion.parallel.optim import closure


@final
class TrainedParameters:
    """The parameters that asked for a gradient when the step was built, and that an optimizer has."""

    def __init__(
        self, model: nn.Module, optimizers: Mapping[str, Optimizer], names: Mapping[nn.Parameter, str]
    ) -> None:
        self._model, self._optimizers, self._names = model, optimizers, names
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._owned = {
            name: [p for p in self._trainable if any(p is q for g in optimizer.param_groups for q in g["params"])]
            for name, optimizer in optimizers.items()
        }
        owned = {id(p) for parameters in self._owned.values() for p in parameters}
        self.idle = [p for p in self._trainable if id(p) not in owned]
        """The parameters that get gradients, and that no optimizer was given."""
        self.frozen = [
            p
            for optimizer in optimizers.values()
            for group in optimizer.param_groups
            for p in group["params"]
            if not p.requires_grad
        ]
        """The parameters that an optimizer has, and that did not ask for a gradient when the step was built."""

    def may_thaw(self) -> None:
        """Count parameters as trained that are frozen now and given to an optimizer: where one process has all
        gradients, they may get one at any step."""
        frozen = {id(p) for p in self.frozen}
        self._trainable = [p for p in self._model.parameters() if p.requires_grad or id(p) in frozen]
        for name, optimizer in self._optimizers.items():
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._owned[name] = [p for p in self._trainable if id(p) in own]
        self.frozen = []

    def trainable(self, optimizer: str | None = None) -> list[nn.Parameter]:
        """The parameters that updates change, of one optimizer or of all, in the model's order."""
        if optimizer is not None:
            return self._owned[optimizer]
        idle = {id(p) for p in self.idle}
        return [p for p in self._trainable if id(p) not in idle]

    def refuse_thawed(self) -> None:
        """Raise ValueError where a parameter that was frozen has got a gradient."""
        for p in self.frozen:
            if p.grad is not None:
                raise ValueError(
                    f"{self._names[p]} was frozen when the training began and has a gradient now, and which gradients "
                    "the ranks sum is settled at the beginning: let model= return it with requires_grad=True and "
                    "freeze it in the forward for as long as it should stand, or use single_device"
                )


@final
class ReplicaOptimizers(dict[str, Optimizer]):
    """The optimizers of one model by name. ``names``: what their parameters are called in a state."""

    def __init__(
        self, workload: Workload, model: nn.Module, names: Mapping[nn.Parameter, str], device: torch.device
    ) -> None:
        super().__init__(self._made(workload, model))
        self._workload, self._names = workload, names
        self.searching = frozenset(n for n, o in self.items() if closure.needs_closure(o))
        """The optimizers that evaluate the loss themselves."""
        self._refuse_search()
        self.schedules: dict[str, LRScheduler | EpochSchedule | MetricSchedule] = {}
        self.scaler = torch.amp.GradScaler(device.type) if workload.precision == "float16" else None

    @staticmethod
    def _made(workload: Workload, model: nn.Module) -> dict[str, Optimizer]:
        made, own = workload.make_optimizer(list(model.named_parameters())), set(model.parameters())
        optimizers = {"": made} if isinstance(made, Optimizer) else dict(made)
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                foreign = [p for p in group["params"] if p not in own]
                if foreign:
                    raise ValueError(
                        f"{type(optimizer).__name__} was given a tensor of shape {tuple(foreign[0].shape)} that is not "
                        "a parameter of the model: build the optimizer from the parameters that it is called with"
                    )
        if len(optimizers) > 1 and workload.update is None:
            raise ValueError(
                f"{len(optimizers)} optimizers need update=(step, batch) -> values, which says when each steps"
            )
        return optimizers

    def _refuse_search(self) -> None:
        for name in self.searching:
            kind = type(self[name]).__name__
            for what, given in (
                (f"clip_grad_norm={self._workload.clip_grad_norm}", self._workload.clip_grad_norm is not None),
                ('precision="float16"', self._workload.precision == "float16"),
                ("update=", self._workload.update is not None),
            ):
                if given:
                    raise ValueError(f"{what} does not go with {kind}, which evaluates the loss itself")

    def refuse_searching(self, name: str | None = None) -> None:
        """Raise ValueError where an optimizer (of this name, or any) evaluates the loss itself."""
        for one in self.searching if name is None else self.searching & {name}:
            raise ValueError(
                f"{type(self[one]).__name__} evaluates the loss several times an update, which this strategy does not: "
                "use map_reduce or single_device"
            )

    def start_schedules(self, total_steps: int, steps_per_epoch: int) -> None:
        """Make the learning-rate schedules, now that the number of updates is known."""
        for name, optimizer in self.items():
            made = self._workload.make_schedule(optimizer, total_steps, steps_per_epoch)
            if made is not None:
                self.schedules[name] = made

    def must_be_storable(self) -> None:
        """Raise ValueError where a checkpoint cannot hold the settings of an optimizer or of a schedule."""
        try:
            self.settings()
        except ValueError as error:
            raise ValueError(
                f"{error}; leave it out of what state_dict() gives, as torch's LambdaLR leaves out its functions"
            ) from None
        self._try_slots()

    def _try_slots(self) -> None:
        """Raise ValueError where an optimizer of the user's own keeps what a checkpoint cannot hold: it makes an update
        of copies, or of small stand-ins for many parameters."""
        if all(type(optimizer).__module__.startswith("torch.optim") for optimizer in self.values()):
            return
        found: list[Optimizer] = []
        with seeded_rng(self._workload.seed), suppress(Exception):
            named = [*zip(self._names.values(), closure.copies_to_try([*self._names]), strict=True)]
            made = self._workload.make_optimizer(named)
            tried = [made] if isinstance(made, Optimizer) else [*made.values()]
            for _, p in named:
                p.grad = torch.zeros_like(p)
            found = [] if any(one is own for one in tried for own in self.values()) else tried
            for optimizer in found:
                remove_step_hooks(optimizer)  # which may count their calls
                optimizer.step()
        for optimizer in found:
            self._must_keep(optimizer, {p: name for name, p in named})

    def must_hold_slots(self) -> None:
        """Raise ValueError where an optimizer keeps what a checkpoint cannot hold."""
        for optimizer in self.values():
            self._must_keep(optimizer, self._names)

    @staticmethod
    def _must_keep(optimizer: Optimizer, names: Mapping[Any, str]) -> None:
        state: Mapping[Any, Mapping[str, Any]] = optimizer.state
        for p, slots in state.items():
            for slot, value in slots.items():
                if not closure.can_be_kept(value):
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {slot} of {names[p]} as a {type(value).__name__}: only "
                        "optimizers whose state is tensors, numbers and lists of them can be saved"
                    )

    # An update

    def unscale_and_clip(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        """Make the gradients of this optimizer's parameters those that it is to see."""
        if self.scaler is not None:
            self.scaler.unscale_(self[name])
        if self._workload.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._workload.clip_grad_norm)

    def step(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        """Make the update of one optimizer, which has these parameters."""
        if self.scaler is not None:
            before = self.scaler.get_scale()
            self.scaler.step(self[name])
            self.scaler.update()
            if self.scaler.get_scale() < before:  # the gradient has overflowed, and nothing was updated
                return
        else:
            self[name].step()
        self.take_average(name, parameters)

    def take_average(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        """Take the weights after an update of one optimizer into their average, where the workload asks for one."""
        if isinstance(self._workload.average, WeightAverage):
            self._workload.average.after(self[name], parameters)

    def advance(self, steps: int) -> None:
        """Let the schedules go on by ``steps`` updates that were made elsewhere."""
        for name, schedule in self.schedules.items():
            mark_stepped(self[name])  # a schedule warns without
            for _ in range(steps):
                schedule.step()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Step the schedules that follow a metric."""
        for schedule in self.schedules.values():
            if isinstance(schedule, MetricSchedule):
                schedule.evaluated(metrics[schedule.metric])

    def by_metric(self) -> dict[str, Any]:
        """The state of the schedules that follow a metric, as plain JSON: a rank that was not there lacks it."""
        followed = {name: s.state_dict() for name, s in self.schedules.items() if isinstance(s, MetricSchedule)}
        found: dict[str, Any] = to_plain(followed, "schedules")
        return found

    def follow(self, by_metric: Mapping[str, Any]) -> None:
        """Take the state of the schedules that follow a metric from another rank."""
        for name, state in from_plain(by_metric).items():
            self.schedules[name].load_state_dict(state)

    # State

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the optimizers' state by name, as they are."""
        for owner, optimizer in self.items():
            self._must_keep(optimizer, self._names)
            parameters: Mapping[Any, Mapping[str, Any]] = optimizer.state
            for p, slots in parameters.items():
                for slot, value in slots.items():
                    for name, tensor in closure.tensors(slot, value):
                        yield f"{owner}/{self._names[p]}/{name}".lstrip("/"), tensor

    def settings(self) -> dict[str, Any]:
        """The part of the state that is not tensors, as plain JSON."""
        groups = {
            name: [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]
            for name, optimizer in self.items()
        }
        schedules = {name: schedule.state_dict() for name, schedule in self.schedules.items()}
        settings = {"groups": to_plain(groups, "optimizer"), "schedules": to_plain(schedules, "schedule")}
        plain = {name: self._plain_slots(optimizer) for name, optimizer in self.items()}
        if any(plain.values()):
            settings["slots"] = to_plain(plain, "optimizer")
        if self.scaler is not None:
            settings["scaler"] = to_plain(self.scaler.state_dict(), "loss scale")
        return settings

    def _plain_slots(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """The part of the optimizer's state that is not tensors, by parameter."""
        state: Mapping[Any, Mapping[str, Any]] = optimizer.state
        rests = {self._names[p]: closure.rest(slots) for p, slots in state.items()}
        return {name: rest for name, rest in rests.items() if rest}

    def load(self, state: State) -> None:
        """Go on from the part of a state that is the optimizers'."""
        groups = from_plain(state.settings["groups"])
        for name, optimizer in self.items():
            groups[name] = [_as_now(*pair) for pair in zip(groups[name], optimizer.param_groups, strict=True)]
            optimizer.load_state_dict(self._optimizer_state(name, optimizer, state, groups[name]))
            self._restore_scalars(name, optimizer, state)
        schedules = from_plain(state.settings["schedules"])
        for name, schedule in self.schedules.items():
            schedule.load_state_dict(_as_now(schedules[name], schedule.state_dict()))
        if self.scaler is not None:
            self.scaler.load_state_dict(from_plain(state.settings["scaler"]))

    def _restore_scalars(self, owner: str, optimizer: Optimizer, state: State) -> None:
        """Gives the scalars among the slots the type that they were saved in. torch casts them to that of the
        parameter, so that NAdam's product of momenta, which is float32 beside weights in float64, would be another
        number after the next update."""
        parameters: Mapping[Any, dict[str, Any]] = optimizer.state
        for p, slots in parameters.items():
            for slot, value in slots.items():
                saved = state.optimizer.get(f"{owner}/{self._names[p]}/{slot}".lstrip("/"))
                if saved is None or saved.ndim or not p.ndim or not isinstance(value, Tensor):
                    continue
                if saved.dtype != value.dtype:
                    slots[slot] = saved.to(value.device, copy=True)

    def _optimizer_state(self, owner: str, optimizer: Optimizer, state: State, groups: list[Any]) -> dict[str, Any]:
        """The state in the optimizer's own form, with parameters by number."""
        numbers: dict[str, int] = {}
        numbered = []
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            indices = []
            for p in group["params"]:
                indices.append(numbers.setdefault(self._names[p], len(numbers)))
            numbered.append({**saved, "params": indices})
        slots: dict[int, dict[str, Any]] = {}
        for key, tensor in state.optimizer.items():
            name, _, slot = key.rpartition("/")
            name = name.removeprefix(f"{owner}/") if owner else name
            if name in numbers:
                slots.setdefault(numbers[name], {})[slot] = tensor.clone()
        plain = from_plain(state.settings["slots"]) if "slots" in state.settings else {}
        for name, rest in plain.get(owner, {}).items():
            if name in numbers:
                slots[numbers[name]] = closure.put_together(slots.get(numbers[name], {}), rest)
        return {"state": slots, "param_groups": numbered}


def _as_now(saved: Any, now: Any) -> Any:
    """A saved value in the form of the one that is in its place now: a number that is kept as a tensor is saved as a
    number, which another type would round in another way."""
    if isinstance(now, Tensor) and now.ndim == 0 and isinstance(saved, bool | int | float):
        return torch.full_like(now, saved)
    if isinstance(saved, dict) and isinstance(now, dict):
        return {name: _as_now(value, now.get(name)) for name, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(now, list | tuple) and len(saved) == len(now):
        return type(saved)(_as_now(*pair) for pair in zip(saved, now, strict=True))
    return saved
