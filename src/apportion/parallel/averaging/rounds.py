"""The rounds of replicas that train on their own, meet every few steps and go on from the average: which replica
does what in a round.

Batches are handed out whole and in turn. A round gives ``every`` of them to each replica; the last one may fall short.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from apportion.comm.group import collective, inherit_collectives
from apportion.parallel.averaging.contribution import Contribution, ReplicaTensors

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
    batch_count: int
    """The number of batches of the replica in this round."""
    ahead: int = 0
    """The number of batches handed out since that average, which are in none yet: those of the round before, where an
    average comes a round late."""
    given: tuple[int, ...] | None = None
    """The numbers of the replica's batches, where they do not follow from the first and the stride."""
    fresh: bool = False
    """True where the replica begins anew: it goes on with the average's optimizer slots, and keeps none of its own."""
    ended: bool = False
    """True where no round follows, though batches may be left."""
    unpushed: tuple[int, ...] = ()
    """The batches before the last one handed out that are in no average."""
    limit: int | None = None
    """The number of batches of the training, which no schedule passes, where replicas make batches that others were
    assigned before."""

    def batch(self, number: int) -> int:
        """Return the number of one of the replica's batches."""
        return self.first + number * self.stride if self.given is None else self.given[number]

    def place(self, made: int) -> int:
        """Return how many batches all replicas together have behind them when this one has made ``made``: the
        learning-rate schedules are there. The schedules of a replica that is late are where its own batches are."""
        place = (self.first if self.stride == 1 else min(self.done + self.ahead, self.first)) + made * self.stride
        return place if self.limit is None else min(place, self.limit - (self.batch_count - made))


def assigned_round(done: int, index: int, of: int, every: int, total: int) -> AveragingRound:
    """Return the round of replica ``index`` out of ``of``, when ``done`` of the ``total`` batches have been handed
    out."""
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

    _frame: ReplicaTensors

    def __init_subclass__(cls) -> None:
        inherit_collectives(cls)

    @abstractmethod
    @collective
    def start(self, first: Contribution, done: int, unpushed: Sequence[int] = ()) -> None:
        """Set the average before the first round: the same on every rank, or rank 0's where it hands it out.
        ``unpushed``: the batches that it lacks, before its last one. Called by all."""

    @abstractmethod
    def next_round(self, into: Contribution) -> AveragingRound:
        """Return this replica's next round; the average that it begins with is written into ``into``. Called again
        before it has given its contribution, by this process or the next one in its place, it returns the same
        batches."""

    @abstractmethod
    def contribute(self, write: Write) -> None:
        """Give a contribution, and wait until it is in an average. Called again after an interruption."""

    def is_over(self, made: int, write: Write) -> bool:
        """Return whether this replica is to go on to the next round, though it has made no more than ``made`` of its
        batches: since it was asked for what it has by now, and has given that, or was closed out."""
        return False

    @property
    @abstractmethod
    def waited(self) -> float:
        """The seconds spent waiting in all."""

    @collective
    def mean_slots(self, average: Contribution) -> dict[str, Tensor]:
        """Return the mean of the replicas' optimizer slots that belongs to an average, by name. Called by all ranks of
        an exchange that all ranks make at once."""
        return self._frame.named_slots(average)

    def finish(self) -> None:  # noqa: B027 (no replica waits)
        """Declare that this replica has nothing more to do."""

    def stop(self) -> bool:
        """Leave, unless all replicas wait for each other at the end of this round, the last one. Return whether this
        one has left."""
        self.finish()
        return True

    def close(self) -> None:  # noqa: B027 (there is nothing to let go of)
        """Let go of what the exchange holds besides memory."""
