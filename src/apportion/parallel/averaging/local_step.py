"""The step of a replica that trains on batches of its own and goes on from the average of all at intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, final

from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.python_state.leaves import refuse_other_extra_state
from apportion.core.replica_digest import Replicated
from apportion.core.sampler import DataShard
from apportion.core.strategy import Recoverable, State
from apportion.core.workload import Workload
from apportion.errors import StateLost
from apportion.parallel.averaging.collective_average import CollectiveAverage
from apportion.parallel.averaging.contribution import Contribution, Outer, ReplicaTensors
from apportion.parallel.averaging.coordinator import OpenRounds, Refuse
from apportion.parallel.averaging.exchange import OpenExchange
from apportion.parallel.averaging.rounds import AveragingRound, Exchange
from apportion.parallel.averaging.shared import SharedAverage, can_share
from apportion.parallel.replica.forward_state import moved_tensors
from apportion.parallel.replica.replica import called
from apportion.parallel.replica.step import OneDeviceStep


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """What is given of the averages."""

    every: int
    """The number of steps of a replica between two of them."""
    outer: Outer | None
    """The optimizer that makes a step of the mean; None: the mean is where all go on."""
    averages_slots: bool
    """True where the optimizers' slots are averaged too."""
    late: bool
    """True where an average comes a round late."""
    deadline: float | None
    """The seconds that a round takes at most among ranks that have not met; None, and among those that have: everyone
    is waited for, but for late ones on one host."""


@final
class LocalSgdStep(OneDeviceStep, Recoverable):
    """Trains this rank's replica, and averages it with the others."""

    def __init__(self, workload: Workload, world: World, averaging: Averaging) -> None:
        super().__init__(workload, world.device, rank=world.rank)
        if "outer" in self.optimizers:
            raise ValueError('an optimizer called "outer" is local_sgd\'s own: give yours another name')
        self._averages_slots, self._late = averaging.averages_slots, averaging.late
        first, model = self.source.at(0), self.model
        beside = moved_tensors(model, self._replica.trainable(), lambda: called(workload, model, first, world.device))
        self._frame = ReplicaTensors(self._replica, averaging.outer, beside)
        self._exchange = self._make_exchange(world, averaging)
        self.lockstep = isinstance(self._exchange, CollectiveAverage)
        self._average = self._frame.new()
        """The average that this round began with."""
        self._round_start = self._average.weights
        """What the changes of this round count from: the average, or, where averages come late, the parameters that
        this replica began the round with."""
        if self._late:
            count = len(self._frame.parameters)
            self._round_start = [w.clone() for w in self._average.weights[:count]]
        self._average_lock = Lock()
        """A lock that is held while the average is written, and by whatever copies it."""
        self._round: AveragingRound | None = None
        self._made = self._rows = self._examples = self._scheduled = 0
        self._contributed = False
        """True once this round's contribution is in an average."""
        refuse_other_extra_state(self.model, "local_sgd")
        self._replica.python.apart = "kept by each worker for itself between two averages"
        self._settings: dict[int, dict[str, Any]] = {}
        """The optimizers' settings by the number of batches handed out: those of the last average, and later ones."""
        self._first_settings = self._replica.optimizers.settings()
        """The optimizers' settings before any step."""
        self._join_world(world)

    def _make_exchange(self, world: World, averaging: Averaging) -> Exchange:
        every, total, averages = averaging.every, self.source.total, self._averages_slots
        if averaging.deadline is not None and world.unmet is not None:
            size, deadline = world.unmet.size, averaging.deadline
            rounds = OpenRounds(every=every, total=total, deadline=deadline, averages_slots=averages, size=size)
            return OpenExchange(self._frame, world, rounds)
        if can_share(world) and not self._late:
            return SharedAverage(self._frame, world, every=every, total=total)
        return CollectiveAverage(self._frame, world, every=every, total=total, averages_slots=averages, late=self._late)

    def _join_world(self, world: World) -> None:
        world.group()  # connected here, since all ranks come by
        self._world, self.rank = world, world.rank
        place = (0, 1) if isinstance(self._exchange, OpenExchange) else (world.rank, world.size)  # it is sent numbers
        self.data_shard = DataShard(*place, whole_batches=True)
        self._replica.set_rank(world.rank)
        self.source.set_rank(world.rank)

    @property
    def done(self) -> int:
        return self._round.done if self._round is not None else self._replica.step

    # A round

    def take(self) -> Batch | None:
        if self._round is None:
            if not self._world.under_way:
                self._start_rounds({})
            self._begin_round()
        while True:
            if self._contributed or self._exchange.is_over(self._made, self._write):
                self._begin_round()
            assert self._round is not None
            if self._made < self._round.batch_count:
                return self._batch_of(self._round.batch(self._made))
            if self._round.batch_count == 0 and (self._round.ended or self._round.done >= self.source.total):
                self._exchange.finish()
                return None
            self._contribute()

    def _batch_of(self, number: int) -> Batch:
        shard = self.data_shard
        assert shard is not None
        if number % shard.of == shard.index:  # in turn: what comes next can be loaded ahead
            return self.source.at(number // shard.of, shard)
        return self.source.at(number)

    def _start_rounds(self, optimizer: Mapping[str, Tensor], unpushed: Sequence[int] = ()) -> None:
        """Begins the first round on all ranks together, from what each has."""
        first = self._average
        _copy(self._frame.weights_and_counts(), (first.weights, first.counts))
        self._frame.write_slots(first)
        for p, place in zip(self._frame.parameters, first.momentum, strict=False):
            momentum = optimizer.get(self._outer_name(p))
            place.zero_() if momentum is None else place.copy_(momentum)
        self._scheduled = self._replica.step
        self._exchange.start(first, self._replica.step, unpushed)

    def _outer_name(self, p: Any) -> str:
        return f"outer/{self._replica.names[p]}/momentum_buffer"

    def _begin_round(self) -> None:
        """Begins a new round, from the last average."""
        joins, before = self._round is None, self._round
        # A checkpoint may be read in another thread: it must find the average and the settings of one and the same
        # round.
        with self._average_lock:
            round = self._round = self._exchange.next_round(self._average)
            if round.fresh and not joins:  # it counts as one that has just come
                self._go_back(self._first_settings, 0, {})
            elif before is not None and round.given is not None and self._scheduled > round.done:
                self._go_back(self._settings[before.done], before.done)
            self._advance(round.place(0))
            self._settings = {n: settings for n, settings in self._settings.items() if n >= round.done}
            self._settings[round.done + round.ahead] = self._replica.optimizers.settings()
        if self._late and not joins:
            self._apply_late_average()
        else:
            _copy((self._average.weights, self._average.counts), self._frame.weights_and_counts())
            if self._late:
                _copy((self._average.weights[: len(self._round_start)], []), (self._round_start, []))
        if self._averages_slots or joins or round.fresh:
            self._load_slots(fresh=round.fresh)
        self._replica.keep_buffers()
        self._made, self._examples, self._contributed = 0, 0, False

    def _go_back(self, settings: dict[str, Any], scheduled: int, slots: dict[str, Tensor] | None = None) -> None:
        """Set the schedules back to where they were after ``scheduled`` batches: not all that were assigned are in the
        average. ``slots``: those that the optimizers go on with; None: their own."""
        # A schedule cannot step backwards, so that it is loaded as it was at that place.
        self._replica.keep_buffers()
        state = self._replica.state()
        state = replace(state, settings={**settings, "python": state.settings["python"]})
        self._replica.load(state if slots is None else replace(state, optimizer=slots), slice(0, 0))
        self._scheduled = scheduled

    def _apply_late_average(self) -> None:
        """Go on from the average, which lacks what this replica has learnt since, and from that. The buffers are those
        that this replica's own activations have made."""
        for p, begun, average in zip(self._frame.parameters, self._round_start, self._average.weights, strict=False):
            begun.copy_(p.detach().sub_(begun.to(p.device)).add_(average.to(p.device)))

    def _load_slots(self, *, fresh: bool) -> None:
        """Take the slots of the average. ``fresh``: those that it lacks are forgotten."""
        averaged, own = self._frame.named_slots(self._average), dict(self._replica.optimizers.slots())
        if averaged.keys() == own.keys() or (not fresh and averaged.keys() < own.keys()):
            for name, slot in averaged.items():
                own[name].copy_(slot)
            return
        # A replacement's optimizer has none yet.
        self._replica.keep_buffers()
        state = self._replica.state()
        self._replica.load(replace(state, optimizer=averaged if fresh else {**own, **averaged}), slice(0, 0))

    def _contribute(self) -> None:
        self._exchange.contribute(self._write)
        self._contributed = True

    def _write(self, parts: Contribution) -> float:
        """Writes what this replica has learnt in this round."""
        _copy(self._frame.weights_and_counts(), (parts.weights, parts.counts))
        for change, begun in zip(parts.weights, self._round_start, strict=False):
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
        self._rows = batch.averaged_rows
        return super().backward(batch)

    def update(self) -> Mapping[str, Tensor]:
        values = super().update()
        self._count_step()
        return values

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        self._rows = batch.averaged_rows
        values = super().__call__(batch)
        if self._workload.update is not None:  # else ``update`` has counted
            self._count_step()
        return values

    def _count_step(self) -> None:
        """Counts one more step of this replica."""
        round = self._round
        assert round is not None, "step.take() gives the batches"
        self._made += 1
        self._examples += self._rows
        self._scheduled += 1  # by the update itself
        self._advance(round.place(self._made))
        if self._made == round.batch_count:
            self._contribute()
            self._begin_round()

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
        weights, counts = self._frame.weights_and_counts()
        own = [w.clone() for w in weights], [c.clone() for c in counts]
        _copy((self._average.weights, self._average.counts), (weights, counts))
        try:
            yield
        finally:
            _copy(own, (weights, counts))

    def state_dict(self) -> State:
        with self._average_lock:
            if self._round is None:
                return super().state_dict()
            return self._state(self._round.done, self._exchange.mean_slots(self._average))

    def _state(self, done: int, slots: Mapping[str, Tensor]) -> State:
        average, optimizer = self._average, dict(slots)
        if done:
            outer = zip(self._frame.parameters, average.momentum, strict=False)
            optimizer |= {self._outer_name(p): momentum for p, momentum in outer}
        python, tensors = self._replica.python.record()
        settings = {**self._settings[done], "python": python}
        if self._round is not None and self._round.given is not None:
            settings["unpushed"] = list(self._round.unpushed)
        return State(
            step=done,
            model={k: t.detach().clone() for k, t in self._frame.model_state(average).items()},
            optimizer={k: t.clone() for k, t in optimizer.items()},
            settings=settings,
            buffers={k: t.clone() for k, t in self._frame.extra_buffers(average).items()},
            python=tensors,
        )

    def stop(self) -> bool:
        return self._exchange.stop()

    def replicated(self) -> Iterable[Replicated]:
        if self.lockstep and self._round is not None:
            yield Replicated(self._world.group(), self._frame.model_state(self._average))

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._round = None
        self._start_rounds(state.optimizer, state.settings.get("unpushed", ()))
        self._begin_round()

    def rejoin(self, world: World) -> None:
        exchange = self._exchange
        if not isinstance(exchange, SharedAverage):
            raise StateLost(
                "a worker was lost, and with overlap=True no memory outlives it that holds the average: go back to the "
                "last checkpoint, or use overlap=False"
            )
        if not exchange.has_average:
            raise StateLost("a worker was lost before the first round: there is nothing to go on from")
        self._join_world(world)
        exchange.join(world)

    def committed(self) -> State | None:
        with self._average_lock:
            if self._round is None:
                return super().committed()
            # Without any other rank: where each keeps its own slots, those are this one's.
            return self._state(self._round.done, self._frame.named_slots(self._average))

    def log(self) -> tuple[Any, ...]:
        log = self._exchange.log() if isinstance(self._exchange, OpenExchange) else None
        return () if log is None else (log,)

    def introduce(self, given: Mapping[str, Any], refuse: Refuse) -> None:
        """Say, before the first round, what this rank was given to train; ``refuse`` says on rank 0 why another rank,
        which was given something else, may not take part."""
        assert isinstance(self._exchange, OpenExchange), "deadline= is given"
        self._exchange.introduce(given, refuse)

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
