"""The predictions of a plan elsewhere: for other links, another batch, more hosts.

The whole search is made again there, corrected by what trials have taught here, and ranked by the rule that the plan
itself was made by, ties included. That correction is all that is carried over from what was measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from apportion.cost_model.cluster import Cluster
from apportion.cost_model.placement import Placement
from apportion.cost_model.profile import Profile
from apportion.planner.calibration import Correction
from apportion.planner.candidate import TIE, Priced, family, priced, ranked
from apportion.planner.search import among

SHORT_LIST = 12
"""The number of candidates that stand for all where a search takes long."""
OF_A_FAMILY, FAMILIES = 2, 3
MOST_WORK = 10_000
"""The largest product of prices and layers for a whole search: above it a search takes so long that it is not repeated
a few dozen times."""


class There(NamedTuple):
    """The predictions for another cluster or another batch."""

    ranking: list[Priced]
    """The exact candidates that a plan would look at there, the best first."""
    ours: Priced | None
    """The candidate that was chosen here, priced there; None: it cannot run there."""


@dataclass(frozen=True)
class WhatIf:
    """A model that is asked what is chosen elsewhere, and compares it with what was chosen here."""

    found: Sequence[Priced]
    """All candidates that were priced here."""
    chosen: Priced
    """The candidate that was chosen here: one of ``found``, and exact."""
    profile: Profile
    cluster: Cluster
    taught: Correction | None = None
    """The correction that trials here have taught; None: there were none."""

    @cached_property
    def here(self) -> list[Priced]:
        """The predictions here: exact candidates, the best first, as in all that follow."""
        return self._ranked(replace(p, tried=None, corrected=None) for p in self.found)

    @cached_property
    def doubted(self) -> float:
        """The factor by which the chosen candidate should take longer than the best by prediction, where trials found
        the chosen one better; 1 where the two agree."""
        ours = at(self.here, self.chosen)
        if ours is None or same(self.here[0], self.chosen):
            return 1.0
        return max(1.0, ours.seconds_per_example / self.here[0].seconds_per_example)

    @cached_property
    def reliable(self) -> bool:
        """Are predictions within their own error of what was found here? Otherwise they say nothing of elsewhere."""
        ours = at(self.here, self.chosen)
        return ours is not None and self.doubted <= 1 + ours.with_overhead(self.profile).error

    def searched(self, *, profile: Profile | None = None, cluster: Cluster | None = None) -> There:
        """Price the same layouts and strategies with this profile and on this cluster; None: with the profile, or on
        the cluster, of here."""
        profile, cluster = profile or self.profile, cluster or self.cluster
        places = [_moved(devices, threads, cluster) for devices, threads in self._places]
        ranking = self._ranked(among(places, profile, strategies=self.strategies))
        ours = at(ranking, self.chosen)
        if ours is None:  # a plan would not look at it there: it may run all the same
            own = priced(self.chosen.strategy, _moved(*_place(self.chosen), cluster), profile)
            ours = next(iter(self._ranked([own])), None)
        return There(ranking, ours)

    def priced(self, some: Iterable[Priced], cluster: Cluster) -> There:
        """Price only these candidates on this cluster."""
        ranking = self._ranked(priced(p.strategy, _moved(*_place(p), cluster), self.profile) for p in some)
        return There(ranking, at(ranking, self.chosen))

    def other(self, there: There) -> Priced | None:
        """Return what is chosen there instead; None: what is chosen here, or another value of the same kind that is as
        good. A lead that predictions already give another candidate here, where trials found otherwise, counts for
        nothing there."""
        if not there.ranking or same(there.ranking[0], self.chosen):
            return None
        best = there.ranking[0]
        if there.ours is None:
            return best
        ratio = there.ours.seconds_per_example / best.seconds_per_example
        alike = family(best.strategy) == family(self.chosen.strategy) and ratio <= 1 + TIE
        return None if alike or (self.doubted > 1 and ratio <= self.doubted) else best

    @property
    def narrow(self) -> bool:
        """Does a search take so long that elsewhere only the best few strategies are looked for, in the places where
        they are best here?"""
        return len(self.found) * len(self.profile.layers) > MOST_WORK

    @cached_property
    def short_list(self) -> list[Priced]:
        """The best few candidates here, with at most ``OF_A_FAMILY`` of each strategy."""
        kept, many = list[Priced](), dict[str, int]()
        for p in sorted(self.here, key=lambda p: p.seconds_per_example):
            name = family(p.strategy)
            many[name] = many.get(name, 0) + 1
            if many[name] <= OF_A_FAMILY:
                kept.append(p)
        return kept[:SHORT_LIST]

    @cached_property
    def strategies(self) -> list[str]:
        """The names of the strategies that are searched for elsewhere."""
        exact = (p for p in (self.short_list if self.narrow else self.found) if p.strategy.exact)
        names = list(dict.fromkeys(str(p.strategy).partition("(")[0] for p in exact))
        return names[:FAMILIES] if self.narrow else names

    @cached_property
    def _places(self) -> list[tuple[tuple[str, ...], int]]:
        """The places where something was priced, the largest first: where a number of workers was asked for, only
        places with that number."""
        some = self.short_list if self.narrow else self.found
        return sorted(dict.fromkeys(map(_place, some)), key=lambda place: (-len(place[0]), -place[1]))

    def _ranked(self, found: Iterable[Priced]) -> list[Priced]:
        return [p for p in ranked(self.learned(found)) if p.cost is not None and p.strategy.exact]

    def learned(self, found: Iterable[Priced]) -> list[Priced]:
        """Return the candidates, corrected by what trials have taught."""
        if self.taught is None:
            return list(found)
        taught = self.taught
        return [p.corrected_by(taught) for p in found]


def at(ranking: Iterable[Priced], p: Priced) -> Priced | None:
    """Return the candidate of the ranking that is the same value in the same place; None where there is none."""
    return next((q for q in ranking if same(p, q)), None)


def same(p: Priced, q: Priced) -> bool:
    """Report whether two candidates are one value in one place, whatever the machines are like."""
    return (str(p.strategy), *_place(p)) == (str(q.strategy), *_place(q))


def _place(p: Priced) -> tuple[tuple[str, ...], int]:
    return p.layout.devices, p.layout.threads


def _moved(devices: tuple[str, ...], threads: int, cluster: Cluster) -> Placement:
    return Placement(cluster=cluster, devices=devices, threads=threads)
