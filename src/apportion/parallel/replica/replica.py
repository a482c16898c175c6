"""One process's whole copy of the network with its optimizers, on which strategies that do not cut the model build."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apportion.comm.group import Alone, Group, collective
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.modes import evaluating, evaluating_as_written, made_by_modes
from apportion.core.python_state.leaves import load_tensors, tensors_of
from apportion.core.python_state.python_state import PythonState
from apportion.core.python_state.search import Search
from apportion.core.rng import mix, seed_everything
from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.core.workload_rules import checked_loss, refuse_without_gradient
from apportion.parallel.optim.replica_optimizers import ReplicaOptimizers, TrainedParameters
from apportion.parallel.replica.carried_state import Carry
from apportion.parallel.replica.forward_state import ForwardState
from apportion.parallel.replica.initial_model import fresh_model


def refuse_trained_loss(loss: Callable[..., Any] | None, model: nn.Module) -> None:
    """Raise ValueError where the loss keeps tensors that ask for a gradient and are not the model's: an optimizer is
    made of the model's parameters, so that they would stay as they are without a word."""
    if loss is None:
        return
    own = {id(p) for p in model.parameters()}
    for name, tensor in _trained(loss):
        if id(tensor) not in own:
            raise ValueError(
                f"loss= keeps {name} of shape {tuple(tensor.shape)}, which asks for a gradient, and the optimizer has "
                "the parameters of the model alone: if it is to be trained, make it a part of the model, whose forward "
                "returns what the loss needs of it; if not, call requires_grad_(False) on it"
            )


def _trained(loss: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a loss can reach and that ask for a gradient, by name."""
    search = Search()
    search.visit("loss", loss)
    for value in list(search.seen.values()):
        if isinstance(value, nn.Module):
            yield from ((f"{type(value).__name__}.{n}", p) for n, p in value.named_parameters() if p.requires_grad)
    for value in list(search.seen.values()):
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            yield "a parameter" if isinstance(value, nn.Parameter) else "a tensor", value
    for scope in search.scopes:
        for key in scope.names():
            value = scope.mapping.get(key)
            if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
                yield scope.name.partition(".")[2] + f".{key}" if "." in scope.name else key, value


SETTLE_SECONDS = 2.0
"""The seconds that a request for the state in the middle of an update waits for the update to end."""
_CALLED = ("loss", "update", "collate", "augment", "count", "carry")
"""The fields of a workload that are called as it trains."""
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
        data: Any = None,
        prepare: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:
        """Make the model and its optimizers. ``data``: the data set whose rows are trained on here."""
        self.workload, self.rank, self.device = workload, rank, device
        seed_everything(workload.seed)
        self.model = fresh_model(workload, device, self.input_dtype)
        self.python = PythonState(workload.caches)
        """What the training keeps in Python, beside the tensors of the network."""
        self.python.watch(model=self.model, data=data, **{name: getattr(workload, name) for name in _CALLED})
        refuse_trained_loss(workload.loss, self.model)
        prepare(self.model)
        self.names = {p: name for name, p in self.model.named_parameters()}
        self.optimizers = ReplicaOptimizers(workload, self.model, self.names, device)
        self.carry = Carry(workload.carry, device, workload.dtype) if workload.carry is not None else None
        self._seen = Carry(workload.carry, device, workload.dtype) if workload.carry is not None else None
        if workload.compile:
            self.model.compile()
        self.step = 0
        self.seconds = 0.0
        """The seconds spent in updates, in all."""
        self._rng = _Reseed(workload.seed, rank, device)
        self.trained = TrainedParameters(self.model, self.optimizers, self.names)
        self.settled = threading.Condition()
        """A condition that is held while the state is copied, or while what is copied changes."""
        self.show: Callable[[], None] = lambda: None
        """A function that is called before the optimizers' state is read."""
        self.partly = False
        """True where the model is a part of the network, of which other ranks have the rest."""
        self.share = 1.0
        """The weight of every loss that goes back: for a replica that computes a part of the batch, its part."""
        self.updating = False
        """True if an update has changed something that is not committed yet."""
        self.forward = ForwardState(self.model, self.trainable())
        self._training = [m for m in self.model.modules() if m.training]

    def start_schedules(self, total_steps: int, steps_per_epoch: int) -> None:
        """Make the learning-rate schedules, now that the number of updates is known; before the first step."""
        self.forward.mark_unchanged()
        self.optimizers.start_schedules(total_steps, steps_per_epoch)
        for name, optimizer in self.optimizers.items():
            self.python.watch(**{f"optimizer {name}".rstrip(): optimizer})
        self.optimizers.must_be_storable()
        for name, schedule in self.optimizers.schedules.items():
            self.python.watch(**{f"schedule {name}".rstrip(): schedule})
        self.python.reset()

    def trainable(self, optimizer: str | None = None) -> list[nn.Parameter]:
        """The parameters that updates change, of one optimizer or of all, in the model's order."""
        return self.trained.trainable(optimizer)

    # Forward

    def outputs(self, batch: Batch) -> Any:
        """The model's outputs for a training batch."""
        if self.carry is None:
            return tree.call(self.model, batch.inputs)
        outputs, state = tree.call(self.model, batch.inputs, self.carry.initial_state(batch))
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
        return checked_loss(self.workload.loss(outputs, targets)).reshape(())

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add weight times the gradient of the loss to ``p.grad``."""
        weight *= self.share
        if not loss.requires_grad:
            refuse_without_gradient(self.model)
        if self.optimizers.scaler is not None:
            loss = self.optimizers.scaler.scale(loss)
        (loss if weight == 1.0 else loss * weight).backward()  # the same bits from its gradient would import sympy
        if self.trained.frozen:
            self.trained.refuse_thawed()

    def gradient(self, loss: Tensor, weight: float, optimizer: str) -> None:
        """Set ``p.grad`` of one optimizer's parameters alone to weight times the gradient of the loss."""
        if optimizer not in self.optimizers:
            raise ValueError(f"optimizer={optimizer!r} must be one of {', '.join(map(repr, self.optimizers))}")
        parameters = [p for p in self.trainable(optimizer) if p.requires_grad]
        if self.optimizers.scaler is not None:
            loss = self.optimizers.scaler.scale(loss)
        loss = loss if weight == 1.0 else loss * weight
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
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
        if made_by_modes(self.model) is None:
            with evaluating(self._training):
                return self._predicted(batch)
        with self.settled, evaluating_as_written(self.model):  # a copy of the state is of what is trained
            return self._predicted(batch)

    def _predicted(self, batch: Batch) -> Any:
        with self.autocast():
            if self._seen is None:
                return tree.call(self.model, batch.inputs)
            outputs, state = tree.call(self.model, batch.inputs, self._seen.initial_state(batch))
            self._seen.put(state)
            self._seen.commit()
            return outputs

    # Update

    def apply(self, optimizer: str) -> None:
        """Make one update by this optimizer with the gradients in ``p.grad``, and then remove them."""
        self.optimizers.refuse_searching(optimizer)
        began = time.perf_counter()
        optimizers, parameters = self.optimizers, self.trained.trainable(optimizer)
        optimizers.unscale_and_clip(optimizer, parameters)
        with self.settled:
            self.updating = True
            optimizers.step(optimizer, parameters)
        if optimizers.schedules:
            optimizers.schedules[optimizer].step()
        for p in parameters:
            p.grad = None
        self.seconds += time.perf_counter() - began

    def search(self, optimizer: str, evaluate: Callable[[], Tensor]) -> None:
        """Make one update by an optimizer that evaluates the loss, and the gradients in ``p.grad``, as often as it
        likes."""
        with self.settled:
            self.updating = True
        self.optimizers[optimizer].step(evaluate)  # type: ignore[arg-type] # a tensor is a float to it
        self.optimizers.take_average(optimizer, self.trained.trainable(optimizer))
        if self.optimizers.schedules:
            self.optimizers.schedules[optimizer].step()
        for p in self.trained.trainable(optimizer):
            p.grad = None

    def commit(self) -> None:
        """End the step: what a forward pass changes (buffers, carried state) counts from here on."""
        for p in self.trained.idle:  # no optimizer has these parameters, or uses their gradients
            p.grad = None
        with self.settled:
            self.step += 1
            if self.step == 1:
                self.optimizers.must_hold_slots()
            self.keep_buffers()
            if self.carry is not None:
                self.carry.commit()
            self.updating = False
            self.settled.notify_all()

    def advance(self) -> None:
        """Take note of an update that was made elsewhere: the schedules go on, and the step ends."""
        self.optimizers.advance(1)
        self.commit()

    def catch_up(self, step: int) -> None:
        """Take note of every update up to this step that was made elsewhere: the schedules go on, and the step ends."""
        if self.step >= step:
            return
        self.optimizers.advance(step - self.step)
        self.step = step - 1
        self.commit()

    def keep_buffers(self) -> None:
        """Commit what the forward passes so far have changed."""
        self.forward.commit()
        self.python.commit()

    def roll_back(self) -> None:
        """Undo what a forward pass after the last update has changed."""
        self.forward.roll_back()
        self.python.roll_back()

    def put_back(self) -> None:
        """Undo what passes that were only to look have changed."""
        self.forward.put_back()
        self.python.put_back()

    def begin_batch(self, *, first: bool = False) -> None:
        """Begin a pass over a batch in parts. ``first``: no pass has been made yet."""
        self.forward.begin_batch(first=first)
        if not first:
            self.python.begin()

    def again(self, step: int) -> None:
        """Prepare another part of the same batch: its forward begins with what that of the first began with, and leaves
        out the same layers. A step changes once what a forward changes."""
        self.forward.again()
        self.python.again()
        self.decide(step)

    def decide(self, step: int) -> None:
        """Seed Python's and numpy's generators so that they give what they gave the first part of the batch of this
        step."""
        self._rng.decide(step)

    def set_rank(self, rank: int) -> None:
        """Give this process another rank."""
        self.rank = self._rng.rank = rank

    # State

    @collective
    def state(self, group: Group | None = None, rows: int | None = None) -> State:
        """The state, in copies; with a carried state, called by all ranks of the group, each saying how many of its
        carried rows are its own."""
        self.forward.settle()
        self.python.settle()
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
        python, tensors = self.python.record()
        return State(
            step=self.step,
            model={k: v.detach().clone() for k, v in self._committed_model().items()},
            optimizer={k: v.detach().clone() for k, v in self.optimizers.slots()},
            carry=carry,
            python=tensors,
            settings={**self.optimizers.settings(), "python": python},
            buffers={k: v.clone() for k, v in self.forward.extra_buffers().items()},
        )

    def _committed_model(self) -> dict[str, Tensor]:
        committed = self.forward.copies()
        return {name: committed.get(name, tensor) for name, tensor in tensors_of(self.model).items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a state would hold copies of, as they are, by the names of ``State.tensors``."""
        self.show()
        model = {f"model/{name}": tensor.detach() for name, tensor in self._committed_model().items()}
        return model | {f"optimizer/{name}": tensor for name, tensor in self.optimizers.slots()}

    def load(self, state: State, rows: slice) -> None:
        """Go on from a state; ``rows``: this rank's lanes of a carried one."""
        with self.settled:  # somebody may be copying the state that was
            self._load(state, rows)

    def _load(self, state: State, rows: slice) -> None:
        self.forward.make_room(state.model)
        load_tensors(self.model, state.model)
        self.optimizers.load(state)
        if self.carry is not None:
            self.carry.load(state.carry, rows)
        self.step = state.step
        self.forward.loaded(state.buffers)
        self.load_python(state)
        self.updating = False

    def load_python(self, state: State) -> None:
        """Go on from the part of a state that is kept in Python."""
        if "python" in state.settings:
            self.python.load(state.settings["python"], state.python, partly=self.partly)
        else:
            self.python.load_unrecorded(state.step)


def called(workload: Workload, model: nn.Module, batch: Batch, device: torch.device) -> Any:
    """The outputs of a model for a batch with which a recurrent state begins."""
    dtype = _AUTOCAST.get(workload.precision)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        if workload.carry is None:
            return tree.call(model, batch.inputs)
        return tree.call(model, batch.inputs, tree.cast(workload.carry(len(batch)), device, workload.dtype))[0]


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
