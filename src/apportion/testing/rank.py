"""The program of a rank, and of the reference: makes the network, calls the step on its rows, and records it.

The process is forked for this one trial, so what it changes of torch (element types, dropout, hooks) ends with it.
The recorded events are those of a checked script (``script_check/record.py``), so that the same comparisons read them.
"""

from __future__ import annotations

import os
import pickle
import random
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from apportion.comm.channel import Lines
from apportion.core.torch_private import compiler_is_imported
from apportion.core.tree import cast
from apportion.runtime.worker.entry import described
from apportion.script_check.recording import precision, randomness
from apportion.script_check.recording.functions import Functions
from apportion.script_check.recording.names import plain
from apportion.script_check.recording.optimizers import generators
from apportion.script_check.recording.plan import PassPlan
from apportion.script_check.recording.precision import widened
from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import LARGEST_WHOLE, values, whole
from apportion.testing.transfer import unpacked
from apportion.testing.trial import RankPlace, StepTrial

TARGET = f"{__name__}:run"
SEED = 20_011
DEFAULT_OPTIMIZER = partial(torch.optim.SGD, lr=0.01)


def run(sock: socket.socket, payload: bytes) -> int:
    """Try the step in one process, and report each call to the test's process; returns the exit status."""
    lines = Lines(sock)
    place, data = pickle.loads(payload)
    _print_to(Path(place.folder, f"rank{place.rank}.log"))
    attempt = _Attempt(place, lines)
    try:
        attempt.make(data)
        lines.send({"kind": "finished"})
    except BaseException as error:
        lines.send({**described(error), "doing": attempt.doing})
    while lines.receive() is not None:  # ends when the test has heard all ranks: an early exit would fail the others
        pass
    return 0


def _print_to(path: Path) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


class _Attempt:
    """One process's part of a trial. ``doing``: what it does at present, in words."""

    def __init__(self, place: RankPlace, lines: Lines) -> None:
        self.place, self._lines = place, lines
        self.doing = "while it loaded the step"

    def make(self, data: bytes) -> None:
        place = self.place
        recorder = Recorder(asdict(_plan(place)), place.rank)
        precision.install(recorder)
        randomness.install(recorder)
        _leave_losses_unscaled()
        if compiler_is_imported():  # as it was not, a variable of the environment has it do nothing
            torch.compiler.set_stance("force_eager")
        trial: StepTrial = unpacked(data)  # outside of the mode, which would have it read float32 bytes as float64
        with Functions(recorder):
            self.doing = "while it joined the process group"
            device = _join(place)
            model, optimizer = self._prepared(trial, device)
            recording = StepRecording(recorder, model)
            if place.weights is not None:
                recording.set_weights(pickle.loads(Path(place.weights).read_bytes()))
            recording.begin()
            self._report()
            self._call(trial, model, optimizer, recorder, device)

    def _prepared(self, trial: StepTrial, device: torch.device) -> tuple[nn.Module, Any]:
        _seed(self.place.rank)
        self.doing = "in model"
        model = trial.model if isinstance(trial.model, nn.Module) else trial.model()
        if not isinstance(model, nn.Module):
            raise ValueError(f"model() returned {_kind(model)}: it returns a torch.nn.Module")
        refuse_unusable(model)
        model = _in_float64(model).to(device)
        optimizer = None
        if trial.wrap is not None and not (self.place.alone and trial.reference is not None):
            self.doing = "in wrap"
            model, optimizer = _wrapped(trial.wrap(model))
        if optimizer is None:
            self.doing = "in optimizer"
            optimizer = (trial.optimizer or DEFAULT_OPTIMIZER)(model.parameters())
        elif trial.reference is not None and trial.optimizer is None:
            raise ValueError(
                "wrap returned an optimizer of its own, and reference= is called without wrap: give optimizer=, a "
                "function that makes the same optimizer from the parameters of one process"
            )
        if not hasattr(optimizer, "step"):
            raise ValueError(
                f"optimizer(parameters) returned {_kind(optimizer)}: it returns an optimizer, such as torch.optim.AdamW"
            )
        return model, optimizer

    def _call(
        self, trial: StepTrial, model: nn.Module, optimizer: Any, recorder: Recorder, device: torch.device
    ) -> None:
        place = self.place
        step = trial.reference if place.alone and trial.reference is not None else trial.step
        rows = cast(trial.rows, device, torch.float64)
        for number in range(trial.steps):
            self.doing = f"in step {number + 1}"
            own = trial.division
            part = own.batch(rows, number) if place.alone else own.part(rows, number, place.rank)
            made, before = recorder.step, generators()
            loss = step(model, optimizer, part)
            recorder.emit(
                "call",
                number=number + 1,
                loss=_number(loss),
                returned=_kind(loss),
                made=recorder.step - made,
                drew=[name for name, state in generators().items() if state != before[name]],
            )
            self._report()

    def _report(self) -> None:
        self._lines.send({"kind": "progress"})


def _plan(place: RankPlace) -> PassPlan:
    return PassPlan(
        target="",
        arguments=(),
        module=False,
        folder=place.source,
        record=place.folder,
        ranks=place.ranks,
        steps=0,
        epoch_batches=0,
        memory=sys.maxsize,
    )


def _join(place: RankPlace) -> torch.device:
    """Opens the process group; its store is a file of the pass, so that no port has to be free."""
    device = torch.device("cpu")
    if "nccl" in place.backend:
        device = torch.device("cuda", place.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        place.backend,
        store=dist.FileStore(  # type: ignore[attr-defined]
            str(Path(place.folder, "store")), place.ranks
        ),
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=place.wait),
    )
    return device


def _leave_losses_unscaled() -> None:
    """Has every GradScaler do nothing, as autocast does: float64 needs no scale, and torch has no kernel for it."""
    begin = torch.amp.GradScaler.__init__

    @wraps(begin)
    def disabled(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
        begin(self, *args[:5], **{**kwargs, "enabled": False})

    torch.amp.GradScaler.__init__ = disabled  # type: ignore[method-assign]


def _seed(rank: int) -> None:
    """Seeds each rank differently, as processes are that nothing has seeded."""
    torch.manual_seed(SEED + rank)
    np.random.seed(SEED + rank)
    random.seed(SEED + rank)


def refuse_unusable(model: nn.Module) -> None:
    """Raise ValueError for a network that cannot be compared."""
    if next(model.parameters(), None) is None:
        raise ValueError(
            f"model {type(model).__name__} has no parameters: the comparison is of gradients and weights; give the "
            "network that the step trains"
        )


def _in_float64(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = widened(parameter.data)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, widened(buffer))
    return model


def _wrapped(result: Any) -> tuple[nn.Module, Any]:
    model, optimizer = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"wrap(model) returned {_kind(result)}: it returns the model to train, or (model, optimizer); a function "
            "that changes the model in place ends with `return model`"
        )
    flat = [type(each).__name__ for each in model.modules() if type(each).__name__ == "FullyShardedDataParallel"]
    if flat:
        raise ValueError(
            "wrap(model) uses FullyShardedDataParallel, whose flat shards have no names to compare them by: use "
            "torch.distributed.fsdp.fully_shard"
        )
    return model, optimizer


def _number(loss: Any) -> float | None:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(whole(loss))
    return float(loss) if isinstance(loss, int | float) else None


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


LABEL = "model"


class StepRecording:
    """The optimizer steps that this process makes."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder, self._model = recorder, model
        self._sampled = sum(parameter.numel() for parameter in model.parameters()) > LARGEST_WHOLE
        self._optimizers = list[Optimizer]()
        self._made = dict[int, int]()
        self._depth = dict[int, int]()
        self._before = dict[str, Any]()

    def begin(self) -> None:
        """Record the weights, and every step from now on."""
        self._recorder.emit(
            "network",
            label=LABEL,
            weights={name: values(tensor) for name, tensor in self.tensors()},
            trainable=[name for name, parameter in self.parameters() if parameter.requires_grad],
            modules={f"{LABEL}.{plain(name)}": type(each).__name__ for name, each in self._model.named_modules()},
        )
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The names and parameters of the network."""
        for name, parameter in self._model.named_parameters():
            yield f"{LABEL}.{plain(name)}", parameter

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The names, parameters and buffers of the network."""
        yield from self.parameters()
        yield from self._buffers()

    def set_weights(self, weights: dict[str, Any]) -> None:
        """Set the parameters and buffers to values by name, as far as the names and shapes are the same."""
        with torch.no_grad():
            for name, tensor in self.tensors():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if name in weights and weights[name].shape == tuple(local.shape):
                    local.copy_(torch.as_tensor(weights[name]))

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self._model.named_buffers():
            yield f"{LABEL}.{plain(name)}", buffer

    def _stepped(self, optimizer: Optimizer, number: int) -> dict[str, Tensor]:
        """The parameters of the network, and those that this optimizer changes beside them."""
        found = dict(self.parameters())
        own = {id(parameter) for parameter in found.values()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        others = {f"optimizer{number}.{n}": p for n, p in enumerate(held) if id(p) not in own}
        return {**found, **others}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] = depth = self._depth.get(id(optimizer), 0) + 1
        if depth > 1:  # torch calls the hooks again where a subclass calls super().step()
            return
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        number = next(n for n, each in enumerate(self._optimizers) if each is optimizer)
        self._before = {
            "optimizer": number,
            "type": type(optimizer).__name__,
            "rates": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "gradients": {
                name: None if parameter.grad is None else values(parameter.grad, self._sampled)
                for name, parameter in self._stepped(optimizer, number).items()
            },
            "site": self._recorder.site(),
        }

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] -= 1
        if self._depth[id(optimizer)]:
            return
        number = self._before["optimizer"]
        self._made[number] = self._made.get(number, 0) + 1
        self._recorder.step += 1
        self._recorder.emit(
            "step",
            **self._before,
            number=self._made[number],
            weights={n: values(p, self._sampled) for n, p in self._stepped(optimizer, number).items()},
            buffers={n: values(b, self._sampled) for n, b in self._buffers()},
        )
