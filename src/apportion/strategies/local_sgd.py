"""local_sgd: replicas train on batches of their own, and go on from the average of their weights every few steps.

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

Wins where the way between the workers is slow, or their speeds differ: on one host a late replica delays no other.
Loses where the gradient's way is cheap: data_parallel then learns more from as many examples.

``deadline="2 s"``: rounds that no replica can hold up, among ranks that others have started and that come and go
(Diskin et al., "Distributed Deep Learning in Open Collaborations", 2021; the partial participation of FedAvg). Rank 0
makes the averages, in a thread, of what each replica has by the deadline, weighted by its examples. Who has nothing by
then is left out: what it has learnt is dropped, since it began from an older average, and its batches are dealt again.
Price: rank 0 takes the weights of n - 1 others over its own cable and sends them the average, ``2 (n - 1)
bytes(weights) / bandwidth / every``. Who took part in which round is logged, and ``reference`` makes the run again from
that.

A worker's death loses its steps since it last gave a contribution, ``every`` at most. Its replacement does that round
again, from the last average; where it is not replaced, those batches are gone. With ``overlap=True`` the run goes back
to its last checkpoint, and on several hosts it ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self, final

from apportion.comm.world import World
from apportion.core.average import NO_AVERAGE
from apportion.core.strategy import State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies import local_sgd
from apportion.parallel.averaging.contribution import Outer
from apportion.parallel.averaging.local_step import Averaging, LocalSgdStep
from apportion.parallel.averaging.reference import replayed_average, simulated_averages


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
    """The learning rate of the outer step, where ``outer`` is "nesterov"."""
    outer_momentum: float = 0.9
    """The momentum of the outer step, at least 0 and below 1."""
    slots: Literal["kept", "averaged"] = "kept"
    """The place of the optimizer's state: each replica's own, or averaged as the weights are."""
    overlap: bool = False
    """True: the average of a round travels while the next round is computed, and is taken at the end of that one."""
    deadline: str | None = None
    """The time that a round takes at most, as "2 s" or "500 ms", where others have started the ranks: then the average
    is made of the replicas that are there, which may come and go. None: everyone is waited for, but for late ones on
    one host."""

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
        if self.deadline is not None:
            seconds_of(self.deadline)
            if self.overlap:
                raise ValueError(
                    f"deadline={self.deadline!r} with overlap=True: an average that comes a round late is waited for "
                    "by all; use one of the two"
                )

    @property
    def comes_and_goes(self) -> bool:
        return self.deadline is not None

    @property
    def _outer(self) -> Outer | None:
        return Outer(self.outer_lr, self.outer_momentum) if self.outer == "nesterov" else None

    @property
    def recovers_across_hosts(self) -> bool:
        return False

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[Self]:
        if layout.ranks > 1:
            yield from (cls(every=every) for every in (1, 8, 32))

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        _refuse(carries=profile.carries, averages=profile.averages)
        kind = local_sgd.AveragingKind(
            self.outer == "nesterov", self.slots == "averaged", self.overlap, self.deadline is not None
        )
        return local_sgd.cost(profile, layout, kind, every=self.every)

    def build(self, workload: Workload, world: World) -> Step:
        _refuse(carries=workload.carry is not None, averages=workload.average is not None)
        averaging = Averaging(
            every=self.every,
            outer=self._outer,
            averages_slots=self.slots == "averaged",
            late=self.overlap,
            deadline=None if self.deadline is None else seconds_of(self.deadline),
        )
        return LocalSgdStep(workload, world, averaging)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        averaged = self.slots == "averaged"
        if log:
            (rounds,) = log
            return iter([replayed_average(workload, rounds, self._outer, averaged_slots=averaged)])
        return simulated_averages(
            workload, world_size, self.every, self._outer, averaged_slots=averaged, overlap=self.overlap
        )


def _refuse(*, carries: bool, averages: bool) -> None:
    if averages:
        raise ValueError(f"local_sgd averages the weights of replicas, and average= is one over updates: {NO_AVERAGE}")
    if carries:
        raise ValueError(
            "local_sgd deals out whole batches in turn, and a recurrent state that is carried along needs the one "
            "before: use data_parallel"
        )


_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0}


def seconds_of(deadline: str) -> float:
    """Return the seconds of a time that is written like "2 s", "500 ms" or "5 min". ValueError where it is not."""
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*(ms|s|min)\s*", str(deadline))
    if match is None or not float(match[1]):
        raise ValueError(f'deadline={deadline!r} must be a time above 0, like "2 s", "500 ms" or "5 min"')
    return float(match[1]) * _SECONDS[match[2]]
