"""The interface of a strategy, and of what it builds: a step, which called with a batch makes one optimizer update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apportion.comm.group import collective, inherit_collectives
from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.fingerprint import fingerprint
from apportion.core.python_state.python_state import PythonState
from apportion.core.replica_digest import Replicated
from apportion.core.sampler import DataShard
from apportion.core.value import Value
from apportion.core.workload import Workload


class AcrossHosts:
    """The part of the interface of a strategy that is about several hosts."""

    survives: ClassVar[bool]
    """Does the strategy survive the loss of a worker on one host? Each says so itself."""

    @property
    def referenced_across_hosts(self) -> bool:
        """True where ``reference`` says what ranks on several hosts compute, too; False where what hosts send each
        other is changed on its way."""
        return True

    @property
    def recovers_across_hosts(self) -> bool:
        """True where those that are left of a run on several hosts go on with what they have after the loss of a
        worker, too; False where what survives a worker lies in memory that all of them share, so that all begin again
        from the last checkpoint."""
        return self.survives

    @property
    def deals_parts(self) -> bool:
        """Does each rank open its own parts alone of a data set in parts, so that they may lie on several hosts? False:
        every rank opens all of them, which is possible on one host."""
        return False

    @property
    def comes_and_goes(self) -> bool:
        """May ranks that others have started come and go while the training goes on? Then they do not meet before it,
        rank 0 alone saves and evaluates, and a rank that begins learns from it where the training is."""
        return False


if TYPE_CHECKING:  # a run needs no prices
    from apportion.cost_model.cluster import Placement
    from apportion.cost_model.cost import Cost
    from apportion.cost_model.profile import Profile


PARTS = ("model", "optimizer", "carry", "buffers", "python")
"""The fields of a state that are tensors by name."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The whole state of a training after some number of updates: the same for any strategy and any world size."""

    step: int
    """The number of updates done."""
    model: dict[str, Tensor]
    """The ``state_dict()`` of the plain module, with its own keys and whole tensors."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """Whole optimizer slots by parameter: ``"layers.0.weight/momentum_buffer"``; with several optimizers
    ``"generator/layers.0.weight/exp_avg"``."""
    carry: dict[str, Tensor] = field(default_factory=dict)
    """The leaves of the carried recurrent state, all lanes: ``"0"``, ``"1"``, ..."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """The buffers that training has changed of those that ``state_dict()`` leaves out (``persistent=False``)."""
    python: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of the state that is kept in Python (attributes, histories): ``settings["python"]`` says where each
    belongs."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings as plain JSON: optimizer groups without their parameters, schedules, loss scale."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the network and its optimizers by a name that a person can read: ``model/...``,
        ``optimizer/...``, ``carry/...``, ``buffers/...``."""
        for part in PARTS[:4]:
            for name, tensor in getattr(self, part).items():
                yield f"{part}/{name}", tensor


class Held(NamedTuple):
    """The bytes of weights, optimizer slots and buffers."""

    shared: int
    """The bytes in memory that the ranks of the host have in common."""
    own: int
    """The bytes in this rank's own memory."""


def held(model: nn.Module, optimizers: Mapping[str, Optimizer], shared: memoryview | None = None) -> Held:
    """The bytes of what a rank trains, each block of memory counted once. ``shared``: memory whose contents are not the
    rank's own."""
    tensors = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers.values():
        states: Mapping[Any, Mapping[str, Any]] = optimizer.state
        tensors += [value for slots in states.values() for value in slots.values() if isinstance(value, Tensor)]
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    if shared is None:
        return Held(0, sum(blocks.values()))
    begin = torch.frombuffer(shared, dtype=torch.uint8).data_ptr()
    return Held(shared.nbytes, sum(n for at, n in blocks.items() if not begin <= at < begin + shared.nbytes))


class FollowsMetrics(Protocol):
    """The schedules of a rank, as far as an evaluation changes them."""

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Step the schedules that follow a metric."""

    def by_metric(self) -> dict[str, Any]:
        """The state of those schedules, as plain JSON."""

    def follow(self, by_metric: Mapping[str, Any]) -> None:
        """Take that state from another rank."""


class Step(ABC):
    """One optimizer update, made by this rank's part of the world.

    A step takes a batch, goes backward, updates, predicts, and gives and takes its state: these are abstract. The rest
    is for steps that have it; one that goes on after the loss of a worker is ``Recoverable``, too.

    The state changes in ``update`` alone: whatever interrupts ``backward`` leaves the last update whole.
    """

    rank: int
    device: torch.device
    model: nn.Module
    """The network of this rank, or its part of the network, for ``Workload.update``."""
    optimizers: Mapping[str, Optimizer]
    """The optimizers by name; the only one is called "" where the factory gave no names."""
    source: BatchSource
    """The source of every batch of the training."""
    data_shard: DataShard | None
    """The examples that this rank takes, read again before every step. None: it takes no batches (see ``serve``)."""
    lockstep: bool = True
    """Do all ranks make the same steps together? False: each goes its own way, no step waits for another rank, and
    rank 0 alone evaluates and saves (``predict`` and ``state_dict`` are called by it alone)."""
    ends_together: bool = True
    """Do all ranks wait for each other at the end of a run? False: the step knows by itself when the last update is
    made, and a rank that is lost keeps no other rank waiting."""
    whole: bool = False
    """Does every rank take whole batches, of which one rank has the outputs? This is the case where the network is
    split."""

    def __init_subclass__(cls) -> None:
        inherit_collectives(cls)

    @property
    @abstractmethod
    def done(self) -> int:
        """The number of updates that the state has behind it, whichever rank made them."""

    def take(self) -> Batch | None:
        """Return this rank's next batch; None where no more are left."""
        assert self.data_shard is not None, "a rank without batches calls step.serve()"
        return self.source.at(self.done, self.data_shard) if self.done < self.source.total else None

    @abstractmethod
    def backward(self, batch: Batch) -> Tensor | None:
        """Accumulate the gradient of this rank's rows, weighted by their count, and return its mean loss (None: no
        rows)."""

    @abstractmethod
    def update(self) -> Mapping[str, Tensor]:
        """Make one optimizer update with the gradients of all ranks, and return the named values of the whole global
        batch (``{"loss": ...}``), each a detached tensor of one element, the same on every rank."""

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        """Call ``backward``, then ``update``; or the workload's own ``update``. Returns the named values of the global
        batch."""
        self.backward(batch)
        return self.update()

    @abstractmethod
    @collective
    def predict(self, batch: Batch) -> Any | None:
        """Outputs for this rank's rows, in evaluation mode; called by all ranks. None where the batch has no rows
        here, or another rank holds the outputs."""

    @abstractmethod
    @collective
    def state_dict(self) -> State:
        """The whole state, in the plain model's names; the tensors are copies. Called by all ranks."""

    @abstractmethod
    @collective
    def load_state_dict(self, state: State) -> None:
        """Go on from a state that any strategy at any world size gave. Called by all ranks."""

    # What a step may have besides

    def minimize(self, loss: Tensor, batch: Batch, *, optimizer: str = "") -> Tensor:
        """Make one update of that optimizer's parameters along the gradient of the loss, a mean over this rank's rows;
        the other parameters get no gradient. For ``Workload.update``. Returns the detached loss, unchanged."""
        raise ValueError("minimize() is for update=, which this strategy does not go with: use data_parallel")

    def looked(self) -> None:  # noqa: B027 (where nothing is kept nothing can be put back)
        """End some calls of ``predict``: what their forward passes have changed of buffers, and of parameters that no
        optimizer has, is put back as the last update left it."""

    @property
    def schedules(self) -> FollowsMetrics | None:
        """The learning-rate schedules of this rank, where they can follow a metric of the evaluation; None: they
        cannot."""
        return None

    def leave(self) -> None:  # noqa: B027 (no rank waits for it in the common case)
        """Take no more batches on this rank for now."""

    def stop(self) -> bool:
        """Make no more steps on this rank. Returns False where the others wait for its last ones: it must make them."""
        return True

    def serve(self) -> None:  # noqa: B027 (nothing to do is the common case)
        """Do what a rank without batches does until the end."""

    def log(self) -> tuple[Any, ...]:
        """Return what the steps have written down so far, for ``Strategy.reference``. Called between steps."""
        return ()

    @property
    def python(self) -> PythonState | None:
        """The state that this rank keeps in Python, beside the tensors of the network; None: it is not looked for."""
        return None

    def committed(self) -> State | None:
        """The state after the last update, asked from another thread while ``backward`` may be running, without any
        other rank; None where that cannot be had."""
        return None

    @collective
    def replicated(self) -> Iterable[Replicated]:
        """The tensors that the last update has left equal on this rank and others, each in a memory of its own; the
        same groups in the same order on all of their ranks. Called by all ranks, between steps."""
        return ()

    def spent(self) -> Mapping[str, float]:
        """Seconds so far in ``loading``, ``waiting`` (in collectives) and ``updating``; the rest is computing."""
        return {"loading": self.source.seconds, "waiting": 0.0, "updating": 0.0}

    @property
    def cuts(self) -> tuple[str, ...] | None:
        """The names of the layers that stages begin with, wherever the times of the layers have had the network cut:
        what is proved of a run is cut there too, and so is the run where it goes on. None where there are no stages."""
        return None

    @property
    def parameters(self) -> int:
        """The number of parameters that the plain model has."""
        return sum(p.numel() for p in self.model.parameters())

    def fingerprint(self, workload: Workload) -> dict[str, Any]:
        """The plain JSON that a run which goes on from this one's checkpoints must have in common with it."""
        return fingerprint(workload, self.model, self.optimizers, self.source.deal)

    def held(self) -> Held:
        """The bytes of the weights, optimizer slots and buffers by where they are in memory, now."""
        return held(self.model, self.optimizers)

    def close(self) -> None:  # noqa: B027 (there is nothing to let go of where all is this process's own)
        """Let go of what the step holds: groups, memory."""


class Recoverable(ABC):
    """A step that goes on after the loss of a worker: a mix-in, for the steps of strategies that survive it."""

    def __init_subclass__(cls) -> None:
        inherit_collectives(cls)

    @abstractmethod
    @collective
    def rejoin(self, world: World) -> None:
        """Go on in a world whose membership has changed, from the last update that is whole; what was begun after it
        is forgotten, and done again with the same draws. Called by all ranks of that world: by those that were there
        before after ``MembershipChanged``, by a replacement right after ``build``."""


class Strategy(Value, AcrossHosts, ABC):
    """The way in which the work of a step is divided. Concrete ones are ``@final @dataclass(frozen=True)``, one file
    each in ``strategies/``; the fields are their parameters, and the file's name is how they are written."""

    one_process: ClassVar[bool] = False
    """Has the strategy nothing to divide among workers?"""
    splits: ClassVar[bool] = False
    """Does the strategy divide one network among its workers, so that ``of=`` can have replicas of them?"""
    divides_batches: ClassVar[bool] = True
    """Is the loss of a batch put together from those of its parts, each with the weight of its loss terms?"""
    imports: ClassVar[tuple[str, ...]] = ()
    """The modules of apportion or torch that take long to import, and that each of several ranks needs."""
    survives: ClassVar[bool] = False
    """Can a run go on after the loss of a worker, since the steps are ``Recoverable``? False: it ends, and resumes."""

    def __init_subclass__(cls) -> None:
        inherit_collectives(cls)

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Does one step equal the one-device step? Where no field decides that, a class attribute ``exact = True``."""

    def replays(self, workers: int) -> bool:
        """Is what the strategy computes known only from what its steps write down (``Step.log``)?"""
        return False

    def ranks(self, workers: int) -> int:
        """The number of processes for this many workers that take batches (servers are additional)."""
        return workers

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[Self]:
        """A few values of the strategy that are worth a price on this layout; none where it has nothing to do there."""
        if cls.one_process == (layout.ranks == 1):
            yield cls()

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        """The predicted cost of a step on this layout; a pure function. ValueError says why the strategy cannot run
        this network, or there."""
        raise ValueError(f"{self} has no price yet")

    @abstractmethod
    @collective
    def build(self, workload: Workload, world: World) -> Step:
        """Build this rank's part of the step. Called inside each process, by all ranks of the world."""

    @abstractmethod
    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        """Compute what this strategy must compute: the whole model's state after each step, in one process. ``log``: of
        a run that is to be done again; then the one state that it must have ended with. A proof holds an exact strategy
        to one device, whatever this gives."""


class RecordedCuts(tuple[str, ...]):
    """Layers before which an earlier start of a run has cut its network. Unlike those that the user names they are
    left aside where the network has no such layers: it is another one by then, which its fingerprint shows."""


def cut_at(strategy: Strategy, cuts: Sequence[str]) -> Strategy:
    """Returns the same strategy with its stages cut before these recorded layers, unless the user has cut it."""
    own: Any = strategy
    changes: dict[str, Any] = {}
    if cuts and getattr(own, "cuts", ()) is None:
        changes = {"cuts": RecordedCuts(cuts)}
    elif (of := getattr(own, "of", None)) is not None:
        changes = {"of": cut_at(of, cuts)}
    found: Strategy = replace(own, **changes) if changes else strategy
    return found


def batches(step: Step, *, stop: int | None = None, loaders: int = 0) -> Iterator[Batch]:
    """The batches of a training as this rank takes them: ``for batch in batches(step): step(batch)``; from where its
    state is, to the end or until this many updates are done.

    ``step.data_shard`` is read again before each one, so a strategy may change its rank's share as it goes.
    ``loaders``: the number of processes that load what comes next.
    """
    step.source.must_act(step)
    step.source.load_ahead(loaders)
    try:
        while (stop is None or step.done < stop) and (batch := step.take()) is not None:
            yield batch
    finally:
        step.leave()
        step.source.close()
