"""The changes that would change the answer: the model is run again with one thing changed. Only changes of the answer
by more than predictions may be off are listed, except for the bandwidth at which two candidates are equally fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from apportion.cost_model.cluster import Cluster, Placement
from apportion.cost_model.compute import of_rows
from apportion.cost_model.profile import Profile
from apportion.planner.calibration import Correction
from apportion.planner.candidate import TIE, Priced, family, priced, ranked
from apportion.planner.search import among, search
from apportion.planner.units import rate
from apportion.planner.what_if.cluster_variants import (
    ASSUMED,
    across_hosts,
    one_gpu_more,
    one_host_more,
    with_bandwidth,
)

BATCHES = (2.0, 4.0, 0.5)


def sensitivities(
    found: Sequence[Priced],
    chosen: Priced,
    profile: Profile,
    cluster: Cluster,
    *,
    taught: Correction | None = None,
    workers: int | None = None,
) -> tuple[str, ...]:
    """Write one line for each change that would change the answer.

    ``found``: all candidates that were priced; ``chosen``: one of them, by prediction or by trials, from which
    ``taught`` was learned. ``workers``: the number that was asked for, which would be asked for elsewhere too. Nothing
    is said of an approximate candidate, which was chosen by a pilot and not by prediction; nor where predictions are
    far from the trials.
    """
    if not chosen.strategy.exact:
        return ()
    model = WhatIf(found, chosen, profile, cluster, taught)
    if not model.here or not model.reliable:
        return ()
    return (*map(_crossing_sentence, crossings(model)), *_batches(model), *_more(model, workers))


def _crossing_sentence(crossing: Crossing) -> str:
    where = "of memory between workers" if crossing.kind == "memory" else f"of {crossing.kind}"
    at_, here = rate(crossing.kind, crossing.bandwidth), rate(crossing.kind, crossing.now)
    if crossing.bandwidth > crossing.now:
        above = f"above {at_} {where} (here {here})" if at_ != here else f"with any more than the {here} {where} here"
        return f"{crossing.above} wins {above}"
    if at_ == here:
        return f"{crossing.below} wins with any less than the {here} {where} here"
    return f"{crossing.above} wins above {at_} {where} (here {here}); below, {crossing.below}"


def _batches(model: WhatIf) -> list[str]:
    """Find other batch sizes, no larger than the data set, at which another candidate is chosen, and is faster by more
    than predictions may be off; each candidate once."""
    lines, named = list[str](), set[str]()
    for factor in BATCHES:
        batch = model.profile.batch_size * factor
        if batch < 1 or batch != int(batch) or batch > (model.profile.examples or batch):
            continue
        other = of_rows(model.profile, int(batch))
        there = model.searched(profile=other)
        best = model.other(there)
        if best is None or str(best) in named:
            continue
        ours = there.ours
        if ours is None:
            text = f"{model.chosen.strategy} cannot run there"
        elif (ratio := ours.seconds_per_example / best.seconds_per_example) > 1 + _off(model, other, best, ours):
            text = f"{ratio:.2f} times as fast as {model.chosen.strategy}"
        else:
            continue
        named.add(str(best))
        lines.append(f"with batch {int(batch)} choose {best} ({text})")
    return lines


def _off(model: WhatIf, profile: Profile, *two: Priced) -> float:
    """Return the share by which the ratio of two predictions may be off, including what trials have refuted here."""
    return max(p.with_overhead(profile).error for p in two) + model.doubted - 1


def _more(model: WhatIf, workers: int | None) -> list[str]:
    """Say how much one more host helps, or one more GPU."""
    lines, cluster = [], model.cluster
    grown = one_host_more(cluster)
    assumed = "" if across_hosts(cluster) is not None else f" on {rate('ethernet', ASSUMED['bandwidth'])} Ethernet"
    for larger, what in (
        (grown, f"a {_ordinal(len(grown.hosts))} host{assumed}"),
        (one_gpu_more(cluster), "one GPU more"),
    ):
        if larger is not None:
            lines += _helps(model, larger, {d.name for d in cluster.devices}, workers, what)
    return lines


def _helps(model: WhatIf, larger: Cluster, known: Collection[str], workers: int | None, what: str) -> list[str]:
    """Say how much a larger cluster helps, from those of its layouts that use what is new there: the others are priced
    already. Less than a tie is not counted as help: a plan there would leave the new device idle."""
    new = [d.name for d in larger.devices if d.name not in known]
    found = search(model.profile, larger, workers=workers, strategies=model.strategies, using=new)
    best = next((p for p in ranked(model.learned(found)) if p.cost is not None and p.strategy.exact), None)
    if best is None:
        return []
    gain = model.here[0].seconds_per_example / best.seconds_per_example - 1
    return [f"{what} helps {gain:.0%}: {best}"] if gain > TIE else []


def _ordinal(n: int) -> str:
    return {2: "second", 3: "third", 4: "fourth", 5: "fifth"}.get(n, f"{n}th")


# The bandwidths of a kind of link at which the answer changes: looked for among a few candidates, then checked by the
# whole search.


STRIDE, FURTHEST = 4.0, 4
"""The factor between one bandwidth that is looked at and the next, and the number of such factors, both above and below
today's bandwidth."""
HALVINGS = 8
"""The number of times that the interval between the last two bandwidths is halved, to find where the answer changes."""
LOOKS = 3
"""The number of times that the few candidates are asked, each time with those that the whole search has added; after
that only the whole search is asked."""


class Crossing(NamedTuple):
    """A bandwidth at which the answer changes."""

    kind: str
    """The kind of link."""
    bandwidth: float
    """The bandwidth at which the answer changes, in bytes a second."""
    now: float
    """The bandwidth that there is today, in bytes a second."""
    below: Priced
    above: Priced


def crossings(model: WhatIf) -> list[Crossing]:
    """Find, for each kind of link that workers talk over, the nearest bandwidth below and above today's at which a plan
    of predictions would choose another candidate."""
    found = []
    for kind in _kinds(model):
        scan = _Scan(model, kind)
        found += [crossing for step in (1 / STRIDE, STRIDE) if (crossing := scan.crossing(step)) is not None]
    return found


def _kinds(model: WhatIf) -> list[str]:
    talking = {name for p in model.here if p.layout.ranks > 1 for name in p.layout.devices}
    return list(dict.fromkeys(link.kind for link in model.cluster.links if talking & {*link.devices}))


class _Scan:
    """A scan of the factors on the bandwidth of one kind of link."""

    def __init__(self, model: WhatIf, kind: str) -> None:
        self._model, self._kind = model, kind
        self._some = list(model.short_list)
        self._looked: dict[float, There] = {}
        self._note([model.chosen])

    def crossing(self, step: float) -> Crossing | None:
        """Find where the answer changes in this direction (``step``: the first factor). What the few candidates say is
        checked against all: the winner of the whole search joins the few, and they are asked again. Where the few and
        the whole search do not agree, since one of the few is not looked at there, all are asked."""
        self._look(step**FURTHEST)
        for changed in (*[self._few_changed] * LOOKS, self._all_changed):
            ends = self._change(step, changed)
            if ends is None:
                continue
            near, far = ends
            other = self._model.other(self._look(far))
            if other is not None and not self._all_changed(near):
                return self._crossing(math.sqrt(near * far), step, other)
        return None

    def _crossing(self, factor: float, step: float, other: Priced) -> Crossing:
        now = min(link.bandwidth for link in self._model.cluster.links if link.kind == self._kind)
        below, above = (self._model.chosen, other) if step > 1 else (other, self._model.chosen)
        return Crossing(self._kind, now * factor, now, below, above)

    def _look(self, factor: float) -> There:
        """Make the whole search at this factor; where that takes long, price the few candidates alone."""
        if factor not in self._looked:
            cluster = with_bandwidth(self._model.cluster, self._kind, factor)
            if self._model.narrow:
                return self._model.priced(self._some, cluster)
            there = self._looked[factor] = self._model.searched(cluster=cluster)
            ranking = there.ranking
            fastest = min(ranking, key=lambda p: p.seconds_per_example, default=None)
            self._note(p for p in (*ranking[:1], fastest) if p is not None)
        return self._looked[factor]

    def _note(self, some: Iterable[Priced]) -> None:
        self._some += [p for p in some if at(self._some, p) is None]

    def _few_changed(self, factor: float) -> bool:
        cluster = with_bandwidth(self._model.cluster, self._kind, factor)
        return self._model.other(self._model.priced(self._some, cluster)) is not None

    def _all_changed(self, factor: float) -> bool:
        return self._model.other(self._look(factor)) is not None

    def _change(self, step: float, changed: Callable[[float], bool]) -> tuple[float, float] | None:
        """Find two factors close to each other, in this direction: at the first of them today's choice still holds, at
        the second it does not. None: it holds throughout."""
        near = 1.0
        for n in range(1, FURTHEST + 1):
            far = step**n
            if changed(far):
                return self._between(near, far, changed)
            near = far
        return None

    def _between(self, near: float, far: float, changed: Callable[[float], bool]) -> tuple[float, float]:
        for _ in range(HALVINGS):
            middle = math.sqrt(near * far)
            near, far = (near, middle) if changed(middle) else (middle, far)
        return near, far


# The predictions of a plan elsewhere: for other links, another batch, more hosts.
#
# The whole search is made again there, corrected by what trials have taught here, and ranked by the rule that the plan
# itself was made by, ties included. That correction is all that is carried over from what was measured here.


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
