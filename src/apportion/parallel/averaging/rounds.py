"""The rounds of replicas that train on their own, meet every so many steps and go on from the average: which replica
does what in a round.

Batches are handed out whole and in turn. A round gives ``every`` of them to each replica; the last one may fall short.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from apportion.comm.group import collective, inherit_collectives
from apportion.comm.world import World
from apportion.parallel.averaging.contribution import Contribution, ReplicaTensors, average, copy_parts

LATE_ROUNDS = 3.0
"""The multiple of the median round that a late replica's round takes at least."""
LATE_SECONDS = 0.5
"""The least seconds that a late replica's round takes: what is shorter is due to the machine, not to the replica."""


@dataclass(frozen=True)
class AveragingRound:
    """The batches of a replica until it next meets the others."""

    done: int
    """The number of batches handed out before the average that it begins with."""
    first: int
    """The number of the replica's first batch in this round."""
    stride: int
    """The distance between the numbers of the replica's batches."""
    many: int
    """The number of batches of the replica in this round."""

    def batch(self, number: int) -> int:
        """Return the number of one of the replica's batches."""
        return self.first + number * self.stride

    def place(self, made: int) -> int:
        """Return how many batches all replicas together have behind them when this one has made so many: the
        learning-rate schedules are there. The schedules of a replica that is late are where its own batches are."""
        return (self.first if self.stride == 1 else min(self.done, self.first)) + made * self.stride


def dealt(done: int, index: int, of: int, every: int, total: int) -> AveragingRound:
    """Return the round of the index-th of so many replicas, when so many of the total have been handed out."""
    first = done + index
    left = max(0, -(-(total - first) // of))
    return AveragingRound(done, first, of, min(every, left))


def is_late(seconds: float, rounds: Sequence[float]) -> bool:
    """Return whether a replica has taken too long for its round. ``rounds``: the seconds that each of the replicas took
    for its last."""
    return bool(rounds) and seconds > max(LATE_SECONDS, LATE_ROUNDS * float(np.median(rounds)))


Write = Callable[[Contribution], float]
"""A function that writes the contribution, and returns the number of examples that it is from."""


class Exchange(ABC):
    """The place where replicas exchange contributions for an average."""

    def __init_subclass__(cls) -> None:
        inherit_collectives(cls)

    @abstractmethod
    @collective
    def begin(self, first: Contribution, done: int) -> None:
        """Set the average before the first round: the same on every rank. Called by all."""

    @abstractmethod
    def take(self, into: Contribution) -> AveragingRound:
        """Return this replica's next round; the average that it begins with is written into ``into``. Called again
        before it has given its contribution, by this process or the next one in its place, it returns the same
        batches."""

    @abstractmethod
    def meet(self, write: Write) -> None:
        """Give a contribution, and wait until it is in an average. Called again after an interruption."""

    @property
    @abstractmethod
    def waited(self) -> float:
        """The seconds spent waiting in all."""

    def leave(self) -> None:  # noqa: B027 (nobody waits)
        """Declare that this replica has nothing more to do."""


@final
class Together(Exchange):
    """An exchange by a collective, which waits for every rank."""

    def __init__(self, frame: ReplicaTensors, world: World, *, every: int, total: int) -> None:
        self._frame, self._group, self._device = frame, world.group(), world.device
        self._every, self._total = every, total
        self._latest, self._next, self._own, self._received = (frame.new() for _ in range(4))
        self._done = 0

    def begin(self, first: Contribution, done: int) -> None:
        copy_parts(first, self._latest)
        self._done = done

    def take(self, into: Contribution) -> AveragingRound:
        copy_parts(self._latest, into)
        return dealt(self._done, self._group.rank, self._group.size, self._every, self._total)

    def meet(self, write: Write) -> None:
        examples = torch.tensor([write(self._own)], dtype=torch.float64, device=self._device)
        weights = self._group.all_gather(examples).flatten().tolist()
        average(self._frame, self._latest, self._next, self._given(weights), sum(weights))
        self._latest, self._next = self._next, self._latest
        self._done = min(self._total, self._done + self._every * self._group.size)

    def _given(self, weights: Sequence[float]) -> Iterator[tuple[float, Contribution]]:
        """Yield the contribution of every rank, one after the other, with its weight."""
        for rank, weight in enumerate(weights):
            if not weight:
                continue
            parts = self._own if rank == self._group.rank else self._received
            for tensor in (*parts.weights, *parts.counts, *parts.slots, parts.has):
                if tensor.numel() and self._group.size > 1:
                    sent = tensor.view(-1).view(torch.uint8).to(self._device)
                    self._group.broadcast(sent, source=rank)
                    tensor.view(-1).view(torch.uint8).copy_(sent)
            yield weight, parts

    @property
    def waited(self) -> float:
        return self._group.waited
