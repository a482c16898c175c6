"""The seconds of rollouts of any size, K environments for T steps, from what a few sizes were measured to take.

::

    playing (K, T)    T x a step of K environments, which lies between those of the nearest two K
    learning (K, T)   between the nearest two K at each T that was measured, and between the nearest two of these T

Both lie on straight lines in the logarithms of K, T and the seconds: small rollouts take as long as their calls, large
ones grow with their frames, and a line in logarithms is right for either. Learning has a line for each T of its own,
since a part of it goes through the steps one by one: all of it where the network has a recurrent state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar


class Playing(NamedTuple):
    """The seconds of a rollout until it can be learnt from."""

    environment: float
    acting: float
    beside: float
    """The seconds beside environments and network: what is written down, and made one batch."""


class Learning(NamedTuple):
    """The seconds of learning from a rollout."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class PlayTiming:
    """A step of this many environments, timed in each of ``together`` workers at once."""

    device: str
    """The model of the device that the network was on."""
    together: int = 1
    environments: int
    environment: float
    """The seconds of a step in the environments, all of them."""
    acting: float
    """The seconds of a step in which the network acts."""
    beside: float = 0.0
    """The seconds of a step beside both."""
    a_rollout: float = 0.0
    """The seconds of a rollout beside its steps."""


@dataclass(frozen=True, kw_only=True)
class LearnTiming:
    """What is learnt from one rollout, timed in each of ``together`` workers at once."""

    device: str
    together: int = 1
    environments: int
    steps: int
    forward: float
    backward: float
    update: float
    """The seconds of an update of the weights by the workload's optimizer."""
    fused_update: float | None = None
    """The seconds of an update by torch's fused kernels; None: as ``update``."""


@dataclass(frozen=True, kw_only=True)
class RolloutTimes:
    """What was measured of rollouts of a few sizes."""

    environments: int
    """The workload's own number of environments of an actor."""
    steps: int
    """The workload's own number of steps of a rollout."""
    played: tuple[PlayTiming, ...]
    learned: tuple[LearnTiming, ...]
    left_out: str = ""
    """The sizes that were not measured and the reason why not, in words; empty where all were."""

    @property
    def places(self) -> list[tuple[str, int]]:
        """The (device, number of workers at once) of which both playing and learning are known."""
        learned = {(t.device, t.together) for t in self.learned}
        return list(dict.fromkeys((t.device, t.together) for t in self.played if (t.device, t.together) in learned))

    def sizes(self, device: str, together: int) -> list[tuple[int, int]]:
        """The sizes (K, T) that can be given: every K that was played, with every T that was learnt from."""
        widths = {t.environments for t in _at(self.played, device, together)}
        lengths = {t.steps for t in _at(self.learned, device, together)}
        return [(width, steps) for width in sorted(widths) for steps in sorted(lengths)]

    def playing(self, device: str, together: int, environments: int, steps: int) -> Playing:
        """The seconds of playing a rollout of this size."""
        known = _at(self.played, device, together)

        def of(name: str) -> float:
            return between([(t.environments, getattr(t, name)) for t in known], environments)

        return Playing(steps * of("environment"), steps * of("acting"), steps * of("beside") + of("a_rollout"))

    def learning(self, device: str, together: int, environments: int, steps: int) -> Learning:
        """The seconds of learning from a rollout of this size."""
        known = _at(self.learned, device, together)

        def of(name: str) -> float:
            lines: dict[int, list[tuple[float, float]]] = {}
            for t in known:
                lines.setdefault(t.steps, []).append((t.environments, getattr(t, name)))
            return between([(length, between(line, environments)) for length, line in lines.items()], steps)

        return Learning(of("forward"), of("backward"))

    def updating(self, device: str, together: int) -> tuple[float, float | None]:
        """The seconds of an update, and of one by torch's fused kernels (None: as the first)."""
        known = _at(self.learned, device, together)
        fused = [t.fused_update for t in known if t.fused_update is not None]
        return median(t.update for t in known), median(fused) if fused else None


Timing = TypeVar("Timing", PlayTiming, LearnTiming)


def _at(timings: Iterable[Timing], device: str, together: int) -> list[Timing]:
    return [t for t in timings if (t.device, t.together) == (device, together)]


def between(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at a place from the values at others, on a straight line in logarithms through the nearest two; outside
    of them on the same line, as far as the value neither falls with the place nor grows faster than it does. From a
    single point on, the value grows with the place."""
    known = sorted(points)
    if len(known) == 1:
        return known[0][1] * at / known[0][0]
    low, high = next(
        ((a, b) for a, b in itertools.pairwise(known) if a[0] <= at <= b[0]),
        (known[0], known[1]) if at < known[0][0] else (known[-2], known[-1]),
    )
    if min(low[1], high[1]) <= 0.0:  # what takes no time has no logarithm
        share = min(1.0, max(0.0, (at - low[0]) / (high[0] - low[0])))
        return low[1] + (high[1] - low[1]) * share
    slope = math.log(high[1] / low[1]) / math.log(high[0] / low[0])
    if low[0] <= at <= high[0]:
        return float(low[1] * (at / low[0]) ** slope)
    edge = low if at < low[0] else high
    return float(edge[1] * (at / edge[0]) ** min(1.0, max(0.0, slope)))
