"""One process's whole copy of the network with its optimizers, on which strategies that do not cut the model build."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from apportion.comm.group import Alone, Group, collective
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.json_data import from_plain, to_plain
from apportion.core.rng import seed_everything
from apportion.core.sampler import mix
from apportion.core.strategy import State
from apportion.core.torch_private import mark_stepped
from apportion.core.workload import Workload
from apportion.parallel.optim import closure
from apportion.parallel.replica.carried_state import Carry
from apportion.parallel.replica.forward_state import ForwardState
from apportion.parallel.replica.initial_model import fresh_model

SETTLE_SECONDS = 2.0
"""The seconds that a request for the state in the middle of an update waits for the update to end."""
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Replica:
    """The model of a workload, and everything that an update changes.

    ``prepare`` may swap layers of the fresh model before its optimizers are made and it is compiled.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        rank: int,
        device: torch.device,
        prepare: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:
        self.workload, self.rank, self.device = workload, rank, device
        seed_everything(workload.seed)
        self.model = fresh_model(workload, device, self.input_dtype)
        prepare(self.model)
        self.names = {p: name for name, p in self.model.named_parameters()}
        self.optimizers = self._make_optimizers()
        self.searching = frozenset(n for n, o in self.optimizers.items() if closure.needs_closure(o))
        """The optimizers that evaluate the loss themselves."""
        self._refuse_search()
        self.schedules: dict[str, LRScheduler] = {}
        self.scaler = torch.amp.GradScaler(device.type) if workload.precision == "float16" else None
        self.carry = Carry(workload.carry, device, workload.dtype) if workload.carry is not None else None
        self._seen = Carry(workload.carry, device, workload.dtype) if workload.carry is not None else None
        if workload.compile:
            self.model.compile()
        self.step = 0
        self.seconds = 0.0
        """The seconds spent in updates, in all."""
        self._rng = _Reseed(workload.seed, rank, device)
        self._trainable = [p for p in self.model.parameters() if p.requires_grad]
        self._owned = {
            name: [p for p in self._trainable if any(p is q for g in optimizer.param_groups for q in g["params"])]
            for name, optimizer in self.optimizers.items()
        }
        owned = {id(p) for parameters in self._owned.values() for p in parameters}
        self._idle = [p for p in self._trainable if id(p) not in owned]
        self._frozen = [
            p
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for p in group["params"]
            if not p.requires_grad
        ]
        """The parameters that an optimizer has, and that did not ask for a gradient when the step was built."""
        self.settled = threading.Condition()
        """A condition that is held while the state is copied, or while what is copied changes."""
        self.show: Callable[[], None] = lambda: None
        """A function that is called before the optimizers' state is read."""
        self.share = 1.0
        """The weight of every loss that goes back: for a replica that computes a part of the batch, its part."""
        self.updating = False
        """True if an update has changed something that is not committed yet."""
        self.forward = ForwardState(self.model, self.trainable())
        self._training = [m for m in self.model.modules() if m.training]

    def _make_optimizers(self) -> Mapping[str, Optimizer]:
        made = self.workload.optimizer(list(self.model.named_parameters()))
        optimizers = {"": made} if isinstance(made, Optimizer) else dict(made)
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                foreign = [p for p in group["params"] if p not in self.names]
                if foreign:
                    raise ValueError(
                        f"{type(optimizer).__name__} was given a tensor of shape {tuple(foreign[0].shape)} that is no "
                        "parameter of the model: build the optimizer from the parameters that it is called with"
                    )
        if len(optimizers) > 1 and self.workload.update is None:
            raise ValueError(
                f"{len(optimizers)} optimizers need update=(step, batch) -> values, which says when each steps"
            )
        return optimizers

    def _refuse_search(self) -> None:
        for name in self.searching:
            kind = type(self.optimizers[name]).__name__
            for what, given in (
                (f"clip_grad_norm={self.workload.clip_grad_norm}", self.workload.clip_grad_norm is not None),
                ('precision="float16"', self.workload.precision == "float16"),
                ("update=", self.workload.update is not None),
            ):
                if given:
                    raise ValueError(f"{what} does not go with {kind}, which evaluates the loss itself")

    def start_schedules(self, total_steps: int) -> None:
        """Make the learning-rate schedules, now that the number of updates is known; before the first step."""
        self.forward.note()
        schedule = self.workload.schedule
        if schedule is None:
            return
        for name, optimizer in self.optimizers.items():
            made: Any = schedule(optimizer, total_steps)
            if isinstance(made, ReduceLROnPlateau):
                raise ValueError(
                    "ReduceLROnPlateau needs a metric, and the schedule is stepped once an update without one: "
                    "use a schedule of the step alone (StepLR, CosineAnnealingLR, OneCycleLR, LambdaLR)"
                )
            self.schedules[name] = made

    def may_thaw(self) -> None:
        """Count parameters as trained that are frozen now and given to an optimizer: where one process has all
        gradients, they may get one at any step."""
        frozen = {id(p) for p in self._frozen}
        self._trainable = [p for p in self.model.parameters() if p.requires_grad or id(p) in frozen]
        for name, optimizer in self.optimizers.items():
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._owned[name] = [p for p in self._trainable if id(p) in own]
        self._frozen = []

    def trainable(self, optimizer: str | None = None) -> list[nn.Parameter]:
        """The parameters that updates change, of one optimizer or of all, in the model's order."""
        if optimizer is not None:
            return self._owned[optimizer]
        idle = {id(p) for p in self._idle}
        return [p for p in self._trainable if id(p) not in idle]

    # Forward

    def outputs(self, batch: Batch) -> Any:
        """The model's outputs for a training batch."""
        if self.carry is None:
            return tree.call(self.model, batch.inputs)
        outputs, state = tree.call(self.model, batch.inputs, self.carry.take(batch))
        self.carry.put(state)
        return outputs

    def autocast(self) -> Any:
        """The context of every forward pass, as the workload's precision asks; no context costs nothing."""
        dtype = _AUTOCAST.get(self.workload.precision)
        return _NOTHING if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def reseed(self, step: int) -> None:
        """Seed the draws inside the model by the seed and the step, so that a step can be repeated: torch's by the rank
        too (dropout), those of ``random`` and numpy not (a layer that is left out is left out everywhere)."""
        self._rng(step)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The workload's loss, checked to be a single number."""
        assert self.workload.loss is not None
        loss = self.workload.loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the loss gave {shape}, which must be one number: the mean over the batch")
        return loss.reshape(())

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add weight times the gradient of the loss to ``p.grad``."""
        weight *= self.share
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(None if weight == 1.0 else torch.full_like(loss, weight))
        if self._frozen:
            self._refuse_thawed()

    def _refuse_thawed(self) -> None:
        for p in self._frozen:
            if p.grad is not None:
                raise ValueError(
                    f"{self.names[p]} was frozen when the training began and has a gradient now, and which gradients "
                    "the ranks sum is settled at the beginning: let model= return it with requires_grad=True and "
                    "freeze it in the forward for as long as it should stand, or use single_device"
                )

    def gradient(self, loss: Tensor, weight: float, optimizer: str) -> None:
        """Set ``p.grad`` of one optimizer's parameters alone to weight times the gradient of the loss."""
        if optimizer not in self.optimizers:
            raise ValueError(f"optimizer={optimizer!r} must be one of {', '.join(map(repr, self.optimizers))}")
        parameters = [p for p in self.trainable(optimizer) if p.requires_grad]
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        gradients = torch.autograd.grad(
            loss, parameters, None if weight == 1.0 else torch.full_like(loss, weight), allow_unused=True
        )
        for p, gradient in zip(parameters, gradients, strict=True):
            # Rows without a loss term: a mean of nothing is a NaN, which 0 does not undo.
            p.grad = torch.zeros_like(gradient) if weight == 0.0 and gradient is not None else gradient

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that floating tensors become: float64 where it is asked for, of everything; None: they stay as the
        user made them."""
        return torch.float64 if self.workload.precision == "float64" else None

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        """The outputs in evaluation mode. A carried state of its own follows the rows of the evaluation set."""
        for module in self._training:
            module.training = False
        try:
            with self.autocast():
                if self._seen is None:
                    return tree.call(self.model, batch.inputs)
                outputs, state = tree.call(self.model, batch.inputs, self._seen.take(batch))
                self._seen.put(state)
                self._seen.commit()
                return outputs
        finally:
            for module in self._training:
                module.training = True

    # Update

    def apply(self, optimizer: str) -> None:
        """Make one update by this optimizer with the gradients in ``p.grad``, and then remove them."""
        if optimizer in self.searching:
            kind = type(self.optimizers[optimizer]).__name__
            raise ValueError(
                f"{kind} evaluates the loss several times an update, which this strategy does not: use map_reduce"
            )
        began = time.perf_counter()
        stepped, parameters = self.optimizers[optimizer], self.trainable(optimizer)
        if self.scaler is not None:
            self.scaler.unscale_(stepped)
        if self.workload.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.workload.clip_grad_norm)
        with self.settled:
            self.updating = True
            if self.scaler is not None:
                self.scaler.step(stepped)
                self.scaler.update()
            else:
                stepped.step()
        if self.schedules:
            self.schedules[optimizer].step()
        for p in parameters:
            p.grad = None
        self.seconds += time.perf_counter() - began

    def search(self, optimizer: str, evaluate: Callable[[], Tensor]) -> None:
        """Make one update by an optimizer that evaluates the loss, and the gradients in ``p.grad``, as often as it
        likes."""
        with self.settled:
            self.updating = True
        self.optimizers[optimizer].step(evaluate)  # type: ignore[arg-type] # a tensor is a float to it
        if self.schedules:
            self.schedules[optimizer].step()
        for p in self.trainable(optimizer):
            p.grad = None

    def commit(self) -> None:
        """End the step: what a forward pass changes (buffers, carried state) counts from here on."""
        for p in self._idle:  # that no optimizer was given: what gathers there is nobody's
            p.grad = None
        with self.settled:
            self.step += 1
            self.keep_buffers()
            if self.carry is not None:
                self.carry.commit()
            self.updating = False
            self.settled.notify_all()

    def advance(self) -> None:
        """Take note of an update that was made elsewhere: the schedules go on, and the step ends."""
        for name, schedule in self.schedules.items():
            mark_stepped(self.optimizers[name])  # a schedule warns without
            schedule.step()
        self.commit()

    def catch_up(self, step: int) -> None:
        """Take note of every update up to this step that was made elsewhere: the schedules go on, and the step ends."""
        if self.step >= step:
            return
        for name, schedule in self.schedules.items():
            mark_stepped(self.optimizers[name])
            for _ in range(step - self.step):
                schedule.step()
        self.step = step - 1
        self.commit()

    def keep_buffers(self) -> None:
        """Commit what the forward passes so far have changed."""
        self.forward.commit()

    def roll_back(self) -> None:
        """Undo what a forward pass after the last update has changed."""
        self.forward.roll_back()

    def again(self, step: int) -> None:
        """Prepare another part of the same batch: its forward begins with what that of the first began with, and leaves
        out the same layers. A step changes once what a forward changes."""
        self.forward.again()
        self.decide(step)

    def decide(self, step: int) -> None:
        """Seed Python's and numpy's generators so that they give what they gave the first part of the batch of this
        step."""
        self._rng.decide(step)

    def sit(self, rank: int) -> None:
        """Give this process another rank."""
        self.rank = self._rng.rank = rank

    # State

    @collective
    def state(self, group: Group | None = None, rows: int | None = None) -> State:
        """The state, in copies; with a carried state, called by all ranks of the group, each saying how many of its
        carried rows are its own."""
        self.forward.settle()
        return self._state({} if self.carry is None else self.carry.gather(group or Alone(), rows))

    def committed(self) -> State | None:
        """The state after the last update, asked from another thread; None where an update is being made and does not
        end soon: with several optimizers it lasts from the first one's step to the last one's."""
        with self.settled:
            if not self.settled.wait_for(lambda: not self.updating, SETTLE_SECONDS) or self.forward.strayed:
                return None
            return self._state({} if self.carry is None else self.carry.gather(Alone(), None))

    def _state(self, carry: dict[str, Tensor]) -> State:
        self.show()
        return State(
            step=self.step,
            model={k: v.detach().clone() for k, v in self._committed_model().items()},
            optimizer={k: v.detach().clone() for k, v in self.slots()},
            carry=carry,
            settings=self.settings(),
            buffers={k: v.clone() for k, v in self.forward.beside().items()},
        )

    def _committed_model(self) -> dict[str, Tensor]:
        committed = self.forward.copies()
        return {name: committed.get(name, tensor) for name, tensor in self.model.state_dict().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a state would hold copies of, as they are, by the names of ``State.tensors``."""
        self.show()
        model = {f"model/{name}": tensor.detach() for name, tensor in self._committed_model().items()}
        return model | {f"optimizer/{name}": tensor for name, tensor in self.slots()}

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the optimizers' state by name, as they are."""
        for owner, optimizer in self.optimizers.items():
            parameters: Mapping[Any, Mapping[str, Any]] = optimizer.state
            for p, slots in parameters.items():
                for slot, value in slots.items():
                    if not closure.can_be_kept(value):
                        raise ValueError(
                            f"{type(optimizer).__name__} keeps {slot} of {self.names[p]} as a {type(value).__name__}: "
                            "only optimizers whose state is tensors, numbers and lists of them can be saved"
                        )
                    for name, tensor in closure.tensors(slot, value):
                        yield f"{owner}/{self.names[p]}/{name}".lstrip("/"), tensor

    def settings(self) -> dict[str, Any]:
        """The part of the state that is not tensors, as plain JSON."""
        groups = {
            name: [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]
            for name, optimizer in self.optimizers.items()
        }
        schedules = {name: schedule.state_dict() for name, schedule in self.schedules.items()}
        settings = {"groups": to_plain(groups, "optimizer"), "schedules": to_plain(schedules, "schedule")}
        plain = {name: self._plain_slots(optimizer) for name, optimizer in self.optimizers.items()}
        if any(plain.values()):
            settings["slots"] = to_plain(plain, "optimizer")
        if self.scaler is not None:
            settings["scaler"] = to_plain(self.scaler.state_dict(), "loss scale")
        return settings

    def _plain_slots(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """The part of the optimizer's state that is not tensors, by parameter."""
        state: Mapping[Any, Mapping[str, Any]] = optimizer.state
        rests = {self.names[p]: closure.rest(slots) for p, slots in state.items()}
        return {name: rest for name, rest in rests.items() if rest}

    def load(self, state: State, rows: slice) -> None:
        """Go on from a state; ``rows``: this rank's lanes of a carried one."""
        with self.settled:  # somebody may be copying the state that was
            self._load(state, rows)

    def _load(self, state: State, rows: slice) -> None:
        self.forward.make_room(state.model)
        self.model.load_state_dict(state.model)
        groups = from_plain(state.settings["groups"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(self._optimizer_state(name, optimizer, state, groups[name]))
        schedules = from_plain(state.settings["schedules"])
        for name, schedule in self.schedules.items():
            schedule.load_state_dict(schedules[name])
        if self.scaler is not None:
            self.scaler.load_state_dict(from_plain(state.settings["scaler"]))
        if self.carry is not None:
            self.carry.load(state.carry, rows)
        self.step = state.step
        self.forward.loaded(state.buffers)
        self.updating = False

    def _optimizer_state(self, owner: str, optimizer: Optimizer, state: State, groups: list[Any]) -> dict[str, Any]:
        """The state in the optimizer's own form, with parameters by number."""
        numbers: dict[str, int] = {}
        numbered = []
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            indices = []
            for p in group["params"]:
                indices.append(numbers.setdefault(self.names[p], len(numbers)))
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


def called(workload: Workload, model: nn.Module, batch: Batch, device: torch.device) -> Any:
    """The outputs of a model for a batch with which a recurrent state begins."""
    dtype = _AUTOCAST.get(workload.precision)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        if workload.carry is None:
            return tree.call(model, batch.inputs)
        return tree.call(model, batch.inputs, tree.cast(workload.carry(len(batch)), device, workload.dtype))


class _Reseed:
    """Seeds every generator that the model may draw from: one number a step, cheaper than torch.manual_seed."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._seed, self.rank = seed, rank
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self._generators.append(torch.cuda.default_generators[device.index or 0])

    def __call__(self, step: int) -> None:
        number = mix(self._seed, step, self.rank)
        for generator in self._generators:
            generator.manual_seed(number)
        self.decide(step)

    def decide(self, step: int) -> None:
        """Seed the generators of Python and numpy, the same on every rank."""
        number = mix(self._seed, step) & 0xFFFFFFFF
        random.seed(number)
        np.random.seed(number)


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_NOTHING = _Nothing()
