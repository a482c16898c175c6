"""The description of what a worker process is given to do."""

from __future__ import annotations

import copyreg
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from apportion.core import fast_paths, tree
from apportion.core.address import load_workload
from apportion.core.data.sent_rows import SentRows
from apportion.core.policy import Policy
from apportion.core.strategy import Strategy
from apportion.core.workload import Workload
from apportion.parallel.replica.initial_model import in_precision
from apportion.parallel.replica.loss_precision import loss_in_precision
from apportion.runtime.proof.coarse_rounding import moved

MANY_STEPS = 1_000_000
"""The number of steps that a schedule is given where steps are only timed: it may refuse to go on where it takes the
training to be over."""


def _module(module: Any) -> Any:
    return importlib.import_module, (module.__name__,)


# A function that names `torch` and has something of its own called `ops` or `classes` takes these along when it is
# pickled by value, and they are modules of a type that pickle does not know.
for _kind in (type(torch.ops), type(torch.classes)):
    copyreg.pickle(_kind, _module)


class WorkerJob(Protocol):
    """The part of a job that a worker process has to know before it becomes a rank."""

    @property
    def threads(self) -> int:
        """The number of threads that torch computes with."""

    @property
    def device(self) -> str | None:
        """The type of the device, such as "cpu"; None: the best that the host has."""

    @property
    def replaceable(self) -> bool:
        """True where workers may be lost and replaced."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A workload under a strategy, and what to do with it."""

    workload: Workload | str
    """The workload itself, or its address: then each process imports it anew."""
    strategy: Strategy
    launcher: str = "local"
    """The launcher, as it is written."""
    threads: int = 1
    device: str | None = None
    loaders: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the workload to replace, for example ``{"steps": 100}``."""
    run_dir: str | None = None
    """The directory that the run writes to; None: nothing is written."""
    resume: bool = False
    policy: Policy = field(default_factory=Policy)
    address: str | None = None
    """The address where the workload can be found again."""
    prove: bool = False
    """True where the run is to ask, before its first step, whether it is proved."""
    reprove: bool = False
    """True where a cached proof is not reused."""

    replaceable: bool = False
    """True where workers may be lost and replaced."""
    workers: int = 1
    """The number of workers at the start, which ``reference`` is given; a spare prepares for the share of one of
    these."""
    proof: bool = False
    """True for a proof: dropout is off and named, and what else draws is found."""
    rows: int = 0
    """The examples in a batch of a proof, in the place of the workload's; 0: the workload's own."""
    short: bool = False
    """True for a proof on the beginnings of the sequences."""
    rare: tuple[int, ...] = ()
    """The rows that the rows of a proof are to have among them, the rarest first."""
    lengths: tuple[int, ...] = ()
    """The lengths of the parts of the data, where they are known: a proof then opens no part to know them."""
    sent: SentRows | None = None
    """The rows of the parts of the data that were sent to this host, in the place of the workload's data; None:
    those."""
    cut: int = 0
    """The number of steps that a proof makes, with the short last batch of an epoch among them; 0: the steps as they
    come."""
    gradients: bool = False
    """True for a proof with plain SGD of rate 1 in the place of each optimizer."""
    nudge: float = 0.0
    """The relative amount by which every initial weight is moved, up or down: it shows how far rounding alone leads
    astray."""
    jitter: float = 0.0
    """The relative amount by which every gradient of every step is moved, up or down: it shows how far rounding leads
    astray."""
    coarse: bool = False
    """True for a proof where every result of an operation in a type that is coarser than the precision is moved,
    too."""
    plain: tuple[str, ...] = field(default_factory=fast_paths.chosen)
    """The fast paths that each process leaves for the plain ones (``plain_paths``)."""

    def open(self) -> Workload:
        """Returns the workload, imported where it is an address, with the changes; what this process builds from now on
        takes the plain paths that the job names."""
        fast_paths.switch_off(self.plain)
        workload = replace(self.as_written(), **self.changes)
        if workload.precision == "float64":
            workload = _in_float64(workload)
        if self.sent is not None:
            workload = replace(workload, data=self.sent)
        if self.proof:
            workload = self._as_proved(workload)
        if not self.nudge and not self.jitter:
            return workload
        return replace(workload, model=_Nudged(workload.model, self.nudge, self.jitter))

    def _as_proved(self, workload: Workload) -> Workload:
        from apportion.runtime.proof.proof_workload import (
            divided_evenly,
            few_rows,
            moving,
            short_sequences,
            with_plain_sgd,
        )

        workload = moving(workload)
        if self.rows or self.cut:
            workload = few_rows(
                workload, self.rows or workload.update_size, self.cut, self.workers, self.lengths, self.rare
            )
        if self.short:
            workload = short_sequences(workload)
        if not self.strategy.exact and not self.strategy.replays(self.workers):
            workload = divided_evenly(workload, self.workers)
        return with_plain_sgd(workload) if self.gradients else workload

    def as_written(self) -> Workload:
        """Returns the workload without the changes."""
        return load_workload(self.workload) if isinstance(self.workload, str) else self.workload


def _in_float64(workload: Workload) -> Workload:
    """Returns the workload with what its loss keeps cast as its model is."""
    loss, update = (
        None if kept is None else loss_in_precision(kept, torch.float64) for kept in (workload.loss, workload.update)
    )
    return (
        workload if loss is workload.loss and update is workload.update else replace(workload, loss=loss, update=update)
    )


@dataclass(frozen=True)
class _Nudged:
    """Makes a model with every weight moved by one rounding, or so, and every gradient."""

    make: Callable[[], nn.Module]
    nudge: float
    jitter: float

    def __call__(self) -> nn.Module:
        model = self.make()
        if self.nudge < torch.finfo(torch.float32).eps:
            model = in_precision(model, torch.float64)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(moved(p, self.nudge, generator))
        for p in model.parameters():
            if p.requires_grad and self.jitter:
                p.register_hook(lambda gradient: moved(gradient, self.jitter, generator))
        if self.jitter:
            model.register_forward_hook(_Jitter(self.jitter, generator))
        return model


@dataclass(frozen=True)
class _Jitter:
    """Moves the gradient of every element of what a model gives: a sum over the rows of which next to nothing is left
    is then as far from itself as another order of the sum may have it."""

    relative: float
    generator: torch.Generator

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for tensor in tree.tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: moved(gradient, self.relative, self.generator))
