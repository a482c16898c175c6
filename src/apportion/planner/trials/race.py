"""A race of candidates that make rounds in turns: who has clearly lost makes no more of them, so that the time goes to
those between which the choice lies (a race as of Maron and Moore, "Hoeffding Races", 1994, by the sign test).

The machine is faster at one time than at another, by more than two candidates differ. So a candidate that left early is
judged by the rounds in which it ran beside the leader.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from apportion.planner.trials.significance import ALIKE, SURE, told_apart

Runner = TypeVar("Runner", bound=Hashable)
Rounds = Mapping[int, float]
"""The seconds of a candidate in each round that it made, by the number of the round."""


def beside(first: Rounds, second: Rounds) -> tuple[list[float], list[float]]:
    """Return the seconds of both in the rounds that both made."""
    both = sorted(first.keys() & second.keys())
    return [first[turn] for turn in both], [second[turn] for turn in both]


def leader(rounds: Mapping[Runner, Rounds]) -> Runner:
    """Return who takes the least time in the median of the rounds, of those that made most of them."""
    most = max(len(own) for own in rounds.values())
    return min((r for r, own in rounds.items() if len(own) == most), key=lambda r: median(rounds[r].values()))


def still_running(rounds: Mapping[Runner, Rounds], going: Sequence[Runner]) -> list[Runner]:
    """Return those of ``going``, who made the same rounds so far, that may still come out first. Who can be told apart
    from the leader, and takes more time by a share of ``ALIKE`` or more, cannot."""
    first = min(going, key=lambda r: median(rounds[r].values()))

    def lost(other: Runner) -> bool:
        ahead, behind = beside(rounds[first], rounds[other])
        return told_apart(ahead, behind) >= SURE and median(behind) > (1 + ALIKE) * median(ahead)

    return [r for r in going if r == first or not lost(r)]


def paced(own: Rounds, first: Rounds) -> list[float]:
    """Return the seconds of a candidate in its rounds, as they would be had it run as long as the leader: longer where
    the rounds that both made were faster ones than the leader's usual."""
    _, common = beside(own, first)
    pace = median(first.values()) / median(common) if common else 1.0
    return [seconds * pace for seconds in own.values()]
