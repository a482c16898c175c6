"""A race of candidates that make rounds in turns: who has clearly lost makes no more of them, so that the time goes to
those between which the choice lies (a race as of Maron and Moore, "Hoeffding Races", 1994, by the sign test).

The machine is faster at one time than at another, by more than two candidates differ. So a candidate that left early is
judged by the rounds in which it ran beside the leader, and a later race by who ran in an earlier one, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from apportion.planner.trials.significance import ALIKE, SURE, faster_confidence

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
    """Return those of ``going``, which have made the same rounds so far, that may still come out first. One that is
    certainly slower than the leader, by a share of ``ALIKE`` or more, cannot."""
    first = min(going, key=lambda r: median(rounds[r].values()))

    def lost(other: Runner) -> bool:
        ahead, behind = beside(rounds[first], rounds[other])
        return faster_confidence(ahead, behind) >= SURE and median(behind) > (1 + ALIKE) * median(ahead)

    return [r for r in going if r == first or not lost(r)]


def paced(rounds: Mapping[Runner, Rounds], known: Mapping[Runner, float]) -> dict[Runner, list[float]]:
    """Return the seconds of each candidate in its rounds of a race, as they would be at the pace of the races before.
    ``known``: what candidates take at that pace; where none of them ran, the pace is what the leader had."""
    first = leader(rounds)
    before = [r for r in rounds if r in known]
    usual = median(rounds[first].values())
    if before:
        anchor = min(before, key=lambda r: known[r])
        own, others = beside(rounds[anchor], rounds[first])
        usual = known[anchor] * median(others) / median(own)
    return {r: _scaled(own, rounds[first], usual) for r, own in rounds.items()}


def _scaled(own: Rounds, first: Rounds, usual: float) -> list[float]:
    """Return a candidate's seconds at the pace at which the leader takes its usual seconds."""
    _, common = beside(own, first)
    return [seconds * usual / median(common) for seconds in own.values()]
