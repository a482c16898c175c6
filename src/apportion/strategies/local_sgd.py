"""local_sgd: replicas train on batches of their own, and go on from the average of their weights every so many steps.

Papers: McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data" (FedAvg), 2017; Stich, "Local SGD Converges Fast and Communicates Little", 2019; Douillard et al.,
"DiLoCo", 2023 (the outer momentum); Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed
Training Using Delayed Averaging", 2020 (``overlap``). Related: Zhang, Choromanska and LeCun, "Deep learning with
Elastic Averaging SGD", 2015, which pulls the replicas towards the average instead; Douillard et al., "Streaming DiLoCo
with overlapping communication", 2025, which sends a fragment of the weights at a time.

::

    rank 0   batch 0, 2, 4, ...  step step step \\             / step step ...
                                                  average of w
    rank 1   batch 1, 3, 5, ...  step step step /             \\ step step ...
                                 |--- every ---|

Approximate: between two averages the replicas drift apart. With ``every=1`` and plain SGD the average is the
synchronous step on the batches of all replicas together, where these are of one size.

Price: ``t_batch = (t_step + (n + 2) * bytes(weights, slots) / bandwidth / every) / n`` on one host: n batches are
computed at once; once a round each replica writes to memory that all share, one of them adds n contributions up, and
each reads. Between hosts a round costs one sum of the weights, as a step of data_parallel does: ``2 (h - 1) / h *
bytes(weights)`` that each of h hosts sends. Slots are in it only with ``slots="averaged"``.

``overlap=True``: the sum goes on while the next round is computed. At the end of that each replica goes on from the
average of the round before and what it has learnt since. Wins between hosts where the sum takes as long as several
steps, up to ``every`` of them: it then takes no time. Costs accuracy, since each average is a round older, and one more
copy of the weights. A few bytes still go round before each sum, so that a rank waits there for the slowest one. On one
host, where memory is the way, there is nothing to hide.

Wins where the way between the workers is slow, or their speeds differ: a late replica holds up nobody on one host.
Loses where the gradient's way is cheap: data_parallel then learns more from as many examples.

A worker's death loses its steps since it last gave a contribution, ``every`` at most. Its replacement does that round
again, from the last average; where it is not replaced, those batches are gone. With ``overlap=True`` the run goes back
to its last checkpoint, and on several hosts it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Literal, Self, final

from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.replica_digest import Replicated
from apportion.core.sampler import DataShard
from apportion.core.strategy import Recoverable, State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cost import Cost
from apportion.cost_model.placement import Placement
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies import local_sgd
from apportion.errors import StateLost
from apportion.parallel.averaging.contribution import Contribution, Outer, ReplicaTensors
from apportion.parallel.averaging.reference import simulated
from apportion.parallel.averaging.rounds import AveragingRound, Exchange
from apportion.parallel.averaging.shared import SharedAverage, can_share
from apportion.parallel.averaging.together import Together
from apportion.parallel.replica.forward_state import moved
from apportion.parallel.replica.replica import called
from apportion.parallel.replica.single_process import OneDeviceStep


@final
@dataclass(frozen=True, repr=False)
class LocalSgd(Strategy):
    """Each worker trains a replica; their weights are averaged at intervals."""

    exact = False
    survives = True

    every: int = 16
    """The number of steps of a replica between two averages."""
    outer: Literal["average", "nesterov"] = "average"
    """The use that is made of the mean: the new weights, or the direction of an outer step with momentum (DiLoCo)."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    slots: Literal["kept", "averaged"] = "kept"
    """The place of the optimizer's state: each replica's own, or averaged as the weights are."""
    overlap: bool = False
    """True: the average of a round travels while the next round is computed, and is taken at the end of that one."""

    def __post_init__(self) -> None:
        self._must_be_whole("every", unit="step")
        if self.outer not in ("average", "nesterov"):
            raise ValueError(f'outer={self.outer!r} must be "average" or "nesterov"')
        if not self.outer_lr > 0:
            raise ValueError(f"outer_lr={self.outer_lr} must be above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum={self.outer_momentum} must be at least 0 and below 1")
        if self.slots not in ("kept", "averaged"):
            raise ValueError(f'slots={self.slots!r} must be "kept" or "averaged"')
        if self.overlap and self.slots == "averaged":
            raise ValueError(
                'slots="averaged" with overlap=True: their mean would come a round late, when each replica has gone on '
                'with its own; use slots="kept", or overlap=False'
            )

    @property
    def _outer(self) -> Outer | None:
        return Outer(self.outer_lr, self.outer_momentum) if self.outer == "nesterov" else None

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[Self]:
        if layout.ranks > 1:
            yield from (cls(every=every) for every in (1, 8, 32))

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        _refuse_carried(profile.carries)
        kind = local_sgd.AveragingKind(self.outer == "nesterov", self.slots == "averaged", self.overlap)
        return local_sgd.cost(profile, layout, kind, every=self.every)

    def build(self, workload: Workload, world: World) -> Step:
        _refuse_carried(workload.carry is not None)
        return LocalSgdStep(workload, world, self)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        averaged = self.slots == "averaged"
        return simulated(workload, world_size, self.every, self._outer, averaged_slots=averaged, overlap=self.overlap)


def _refuse_carried(carries: bool) -> None:
    if carries:
        raise ValueError(
            "local_sgd deals out whole batches in turn, and a recurrent state that is carried along needs the one "
            "before: use data_parallel"
        )


@final
class LocalSgdStep(OneDeviceStep, Recoverable):
    """Trains this rank's replica, and averages it with the others."""

    def __init__(self, workload: Workload, world: World, strategy: LocalSgd) -> None:
        super().__init__(workload, world.device, rank=world.rank)
        if "outer" in self.optimizers:
            raise ValueError('an optimizer called "outer" is local_sgd\'s own: give yours another name')
        self._averages_slots, self._late = strategy.slots == "averaged", strategy.overlap
        first, model = self.source.at(0), self.model
        beside = moved(model, self._replica.trainable(), lambda: called(workload, model, first, world.device))
        self._frame = ReplicaTensors(self._replica, strategy._outer, beside)
        self._exchange = self._make_exchange(world, strategy)
        self.lockstep = isinstance(self._exchange, Together)
        self._average = self._frame.new()
        """The average that this round began with."""
        self._begun = self._average.weights
        """What the changes of this round count from: the average, or, where averages come late, the parameters that
        this replica began the round with."""
        if strategy.overlap:
            many = len(self._frame.parameters)
            self._begun = [w.clone() for w in self._average.weights[:many]]
        self._turning = Lock()
        """A lock that is held while the average is written, and by whatever copies it."""
        self._round: AveragingRound | None = None
        self._made = self._rows = self._examples = self._scheduled = 0
        self._met = False
        """True once this round's contribution is in an average."""
        self._settings: dict[int, dict[str, Any]] = {}
        """The optimizers' settings by the number of batches handed out: those of the last average, and later ones."""
        self._sit(world)

    def _make_exchange(self, world: World, strategy: LocalSgd) -> Exchange:
        every, total = strategy.every, self.source.total
        if can_share(world) and not strategy.overlap:
            return SharedAverage(self._frame, world, every=every, total=total)
        averages = self._averages_slots
        return Together(self._frame, world, every=every, total=total, averages_slots=averages, late=strategy.overlap)

    def _sit(self, world: World) -> None:
        world.group()  # connected here, since all ranks come by
        self._world, self.rank = world, world.rank
        self.data_shard = DataShard(world.rank, world.size, whole_batches=True)
        self._replica.sit(world.rank)
        self.source.sit(world.rank)

    @property
    def done(self) -> int:
        return self._round.done if self._round is not None else self._replica.step

    # A round

    def take(self) -> Batch | None:
        if self._round is None:
            if self._world.generation == 0:
                self._begin({})
            self._go_on()
        while True:
            if self._met:
                self._go_on()
            assert self._round is not None
            if self._made < self._round.many:
                return self._batch_of(self._round.batch(self._made))
            if self._round.many == 0 and self._round.done >= self.source.total:
                self._exchange.leave()
                return None
            self._meet()

    def _batch_of(self, number: int) -> Batch:
        shard = self.data_shard
        assert shard is not None
        if number % shard.of == shard.index:  # in turn: what comes next can be loaded ahead
            return self.source.at(number // shard.of, shard)
        return self.source.at(number)

    def _begin(self, optimizer: Mapping[str, Tensor]) -> None:
        """Begins the first round on all ranks together, from what each has."""
        first = self._average
        _copy(self._frame.own(), (first.weights, first.counts))
        self._frame.write_slots(first)
        for p, place in zip(self._frame.parameters, first.momentum, strict=False):
            kept = optimizer.get(self._outer_name(p))
            place.zero_() if kept is None else place.copy_(kept)
        self._scheduled = self._replica.step
        self._exchange.begin(first, self._replica.step)

    def _outer_name(self, p: Any) -> str:
        return f"outer/{self._replica.names[p]}/momentum_buffer"

    def _go_on(self) -> None:
        """Begins a new round, from the last average."""
        joins = self._round is None
        with self._turning:
            round = self._round = self._exchange.take(self._average)
            self._advance(round.place(0))
            self._settings = {n: kept for n, kept in self._settings.items() if n >= round.done}
            self._settings[round.done + round.ahead] = self._replica.optimizers.settings()
        if self._late and not joins:
            self._take_late()
        else:
            _copy((self._average.weights, self._average.counts), self._frame.own())
            if self._late:
                _copy((self._average.weights[: len(self._begun)], []), (self._begun, []))
        if self._averages_slots or joins:
            self._take_slots()
        self._replica.keep_buffers()
        self._made, self._examples, self._met = 0, 0, False

    def _take_late(self) -> None:
        """Go on from the average, which lacks what this replica has learnt since, and from that. The buffers are those
        that this replica's own activations have made."""
        for p, begun, average in zip(self._frame.parameters, self._begun, self._average.weights, strict=False):
            begun.copy_(p.detach().sub_(begun.to(p.device)).add_(average.to(p.device)))

    def _take_slots(self) -> None:
        averaged, own = self._frame.named_slots(self._average), dict(self._replica.optimizers.slots())
        if averaged.keys() <= own.keys():
            for name, slot in averaged.items():
                own[name].copy_(slot)
            return
        # A replacement's optimizer has none yet.
        self._replica.keep_buffers()
        state = self._replica.state()
        self._replica.load(replace(state, optimizer={**own, **averaged}), slice(0, 0))

    def _meet(self) -> None:
        self._exchange.meet(self._write)
        self._met = True

    def _write(self, parts: Contribution) -> float:
        """Writes what this replica has learnt in this round."""
        _copy(self._frame.own(), (parts.weights, parts.counts))
        for change, begun in zip(parts.weights, self._begun, strict=False):
            change.sub_(begun.to(change.device))
        self._frame.write_slots(parts)
        return float(self._examples)

    def _advance(self, batches: int) -> None:
        """Advances the schedules to the batches that all replicas together have taken."""
        while self._scheduled < min(batches, self.source.total):
            self._replica.optimizers.advance(1)
            self._scheduled += 1

    # A step

    def backward(self, batch: Batch) -> Tensor:
        self._rows = len(batch)
        return super().backward(batch)

    def update(self) -> Mapping[str, Tensor]:
        values = super().update()
        self._count()
        return values

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        self._rows = len(batch)
        values = super().__call__(batch)
        if self._workload.update is not None:  # else ``update`` has counted
            self._count()
        return values

    def _count(self) -> None:
        """Counts one more step of this replica."""
        round = self._round
        assert round is not None, "step.take() gives the batches"
        self._made += 1
        self._examples += self._rows
        self._scheduled += 1  # by the update itself
        self._advance(round.place(self._made))
        if self._made == round.many:
            self._meet()
            self._go_on()

    # What others see: the average that this round began with

    def predict(self, batch: Batch) -> Any | None:
        if not len(batch):
            return None
        with self._averaged():
            return super().predict(batch)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Gives the model the weights of the average, until the context is left."""
        if not self._made and not self._late:  # it has them
            yield
            return
        weights, counts = self._frame.own()
        kept = [w.clone() for w in weights], [c.clone() for c in counts]
        _copy((self._average.weights, self._average.counts), (weights, counts))
        try:
            yield
        finally:
            _copy(kept, (weights, counts))

    def state_dict(self) -> State:
        with self._turning:
            if self._round is None:
                return super().state_dict()
            return self._state(self._round.done, self._exchange.mean_slots(self._average))

    def _state(self, done: int, slots: Mapping[str, Tensor]) -> State:
        average, optimizer = self._average, dict(slots)
        if done:
            outer = zip(self._frame.parameters, average.momentum, strict=False)
            optimizer |= {self._outer_name(p): momentum for p, momentum in outer}
        return State(
            step=done,
            model={k: t.detach().clone() for k, t in self._frame.model_state(average).items()},
            optimizer={k: t.clone() for k, t in optimizer.items()},
            settings=dict(self._settings[done]),
            buffers={k: t.clone() for k, t in self._frame.beside(average).items()},
        )

    def replicated(self) -> Iterable[Replicated]:
        if self.lockstep and self._round is not None:
            yield Replicated(self._world.group(), self._frame.model_state(self._average))

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._round = None
        self._begin(state.optimizer)
        self._go_on()

    def rejoin(self, world: World) -> None:
        exchange = self._exchange
        if not isinstance(exchange, SharedAverage):
            raise StateLost(
                "a worker was lost, and with overlap=True no memory outlives it that holds the average: go back to the "
                "last checkpoint, or use overlap=False"
            )
        if not exchange.begun:
            raise StateLost("a worker was lost before the first round: there is nothing to go on from")
        self._sit(world)
        exchange.sit(world)

    def committed(self) -> State | None:
        with self._turning:
            if self._round is None:
                return super().committed()
            # Without any other rank: where each keeps its own slots, those are this one's.
            return self._state(self._round.done, self._frame.named_slots(self._average))

    def close(self) -> None:
        self._exchange.close()
        super().close()

    def spent(self) -> Mapping[str, float]:
        return {**super().spent(), "waiting": self._exchange.waited}


Tensors = tuple[Sequence[Tensor], Sequence[Tensor]]


def _copy(source: Tensors, target: Tensors) -> None:
    """Copies weights and counts."""
    for mine, theirs in zip(source, target, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            b.copy_(a)
