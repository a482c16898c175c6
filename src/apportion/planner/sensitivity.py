"""When the answer would change: the model run again with one thing changed. Only what changes something is told."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from apportion.cluster import Cluster
from apportion.planner.changed import (
    ASSUMED,
    across_hosts,
    one_gpu_more,
    one_host_more,
    with_bandwidth,
)
from apportion.planner.priced import TIE, Priced, family, misfit
from apportion.planner.search import search
from apportion.pricing.layout import Layout
from apportion.pricing.shares import of_rows
from apportion.profile import Profile

SHORT_LIST = 12
"""Exact candidates that the model is run again for."""
OF_A_FAMILY = 2
STRIDE, FURTHEST = 4.0, 4
"""A bandwidth is looked at so many times as large, and that again, so often; and as many times smaller."""
HALVINGS = 8
"""Of the last of them, to find where the answer changes."""
BATCHES = (2.0, 4.0, 0.5)
HELPS = 0.01
"""What one host more has to be worth to be told."""


class Crossing(NamedTuple):
    """Where the answer changes."""

    kind: str
    """Of link."""
    bandwidth: float
    """Bytes a second."""
    below: Priced
    above: Priced


def short_list(found: Sequence[Priced]) -> list[Priced]:
    """The best few exact ones, the fastest first, of each strategy no more than two."""
    kept, many = list[Priced](), dict[str, int]()
    for p in found:
        name = family(p.strategy)
        if p.cost is None or not p.strategy.exact or many.get(name, 0) >= OF_A_FAMILY:
            continue
        many[name] = many.get(name, 0) + 1
        kept.append(p)
    return sorted(kept, key=lambda p: p.seconds_per_example)[:SHORT_LIST]


def fastest(some: Sequence[Priced], profile: Profile, cluster: Cluster) -> tuple[Priced, float] | None:
    """Of these the one that takes least there, and its seconds an example; None where none of them runs there."""
    able = [(p, seconds) for p in some if (seconds := again(p, profile, cluster)) is not None]
    return min(able, key=lambda both: both[1], default=None)


def again(p: Priced, profile: Profile, cluster: Cluster) -> float | None:
    """Seconds an example there. What a measurement has said of the prediction is kept."""
    assert p.cost is not None
    layout = Layout(cluster=cluster, devices=p.layout.devices, threads=p.layout.threads)
    try:
        cost = p.strategy.cost(profile, layout)
    except ValueError:
        return None
    if misfit(cost, layout):
        return None
    return cost.seconds_per_example * p.step_seconds / p.cost.step_seconds


def crossings(some: Sequence[Priced], profile: Profile, cluster: Cluster) -> list[Crossing]:
    """For each kind of link that workers talk over: the nearest bandwidth below and above today's at which another one
    is the fastest."""
    found = []
    for kind in _kinds(some, cluster):
        now = min(link.bandwidth for link in cluster.links if link.kind == kind)
        scan = _Scan(some, profile, cluster, kind)
        for step in (1 / STRIDE, STRIDE):
            ends = scan.change(step)
            if ends is not None:
                below, above = (scan.fastest(factor) for factor in sorted(ends))
                if below is not None and above is not None:
                    found.append(Crossing(kind, now * math.sqrt(ends[0] * ends[1]), below, above))
    return found


def _kinds(some: Sequence[Priced], cluster: Cluster) -> list[str]:
    used = {frozenset(p.layout.devices) for p in some if p.layout.ranks > 1}
    names = {name for devices in used for name in devices}
    return list(dict.fromkeys(link.kind for link in cluster.links if len(names & {*link.devices}) > 0)) if used else []


@dataclass
class _Scan:
    """The fastest by the factor on one kind of link."""

    some: Sequence[Priced]
    profile: Profile
    cluster: Cluster
    kind: str

    def fastest(self, factor: float) -> Priced | None:
        best = fastest(self.some, self.profile, with_bandwidth(self.cluster, self.kind, factor))
        return None if best is None else best[0]

    def change(self, step: float) -> tuple[float, float] | None:
        """Two factors close to each other, in this direction: at the first of them what is fastest today still is, at
        the second it is not. None: it stays."""
        first, near = self.fastest(1.0), 1.0
        for n in range(1, FURTHEST + 1):
            far = step**n
            if self.fastest(far) is not first:
                return self._between(near, far, first)
            near = far
        return None

    def _between(self, near: float, far: float, first: Priced | None) -> tuple[float, float]:
        for _ in range(HALVINGS):
            middle = math.sqrt(near * far)
            near, far = (middle, far) if self.fastest(middle) is first else (near, middle)
        return near, far


def sensitivities(found: Sequence[Priced], profile: Profile, cluster: Cluster) -> tuple[str, ...]:
    """One line for each change that would change the answer."""
    some = short_list(found)
    if not some:
        return ()
    first = found[0] if found[0] in some else some[0]
    lines = [_told(crossing, cluster) for crossing in crossings(some, profile, cluster)]
    return (*lines, *_batches(first, some, profile, cluster), *_more(some, profile, cluster))


def _told(crossing: Crossing, cluster: Cluster) -> str:
    now = min(link.bandwidth for link in cluster.links if link.kind == crossing.kind)
    at, here = rate(crossing.kind, crossing.bandwidth), rate(crossing.kind, now)
    where = "of memory between workers" if crossing.kind == "memory" else f"of {crossing.kind}"
    if crossing.bandwidth > now:
        return f"{crossing.above} wins above {at} {where} (here {here})"
    return f"{crossing.above} wins above {at} {where} (here {here}); below, {crossing.below}"


def _batches(first: Priced, some: Sequence[Priced], profile: Profile, cluster: Cluster) -> list[str]:
    """Other batch sizes that another one than the first is best with, by more than a tie; each one once."""
    lines, told = list[str](), set[str]()
    for factor in BATCHES:
        batch = profile.batch_size * factor
        if batch < 1 or batch != int(batch):
            continue
        other = of_rows(profile, int(batch))
        best, ours = fastest(some, other, cluster), again(first, other, cluster)
        if best is None or best[0] is first or str(best[0]) in told or (ours is not None and ours / best[1] < 1 + TIE):
            continue
        told.add(str(best[0]))
        gain = "" if ours is None else f" ({ours / best[1]:.2f} times as fast as {first.strategy})"
        lines.append(f"with batch {int(batch)} choose {best[0]}{gain}")
    return lines


def _more(some: Sequence[Priced], profile: Profile, cluster: Cluster) -> list[str]:
    """What one host more helps, or one GPU more."""
    lines = []
    grown = one_host_more(cluster)
    assumed = "" if across_hosts(cluster) is not None else f" on {rate('ethernet', ASSUMED['bandwidth'])} Ethernet"
    for larger, what in (
        (grown, f"a {_ordinal(len(grown.hosts))} host{assumed}"),
        (one_gpu_more(cluster), "one GPU more"),
    ):
        if larger is not None:
            lines += _helps(some, profile, larger, {d.name for d in cluster.devices}, what)
    return lines


def _helps(some: Sequence[Priced], profile: Profile, larger: Cluster, known: Collection[str], what: str) -> list[str]:
    """Of the layouts of a larger cluster those that use what is new there: the others are priced already. What
    measurements have said of a kind of strategy holds there too."""
    names = list(dict.fromkeys(str(p.strategy).partition("(")[0] for p in some))
    new = [d.name for d in larger.devices if d.name not in known]
    taught = {family(p.strategy): p.step_seconds / p.cost.step_seconds for p in reversed(some) if p.cost is not None}
    found = search(profile, larger, strategies=names, using=new)
    able = [
        (p.seconds_per_example * taught.get(family(p.strategy), taught[family(some[0].strategy)]), p)
        for p in found
        if p.cost is not None and p.strategy.exact
    ]
    if not able:
        return []
    seconds, best = min(able, key=lambda both: both[0])
    gain = some[0].seconds_per_example / seconds - 1
    return [f"{what} helps {gain:.0%}: {best}"] if gain >= HELPS else []


def _ordinal(n: int) -> str:
    return {2: "second", 3: "third", 4: "fourth", 5: "fifth"}.get(n, f"{n}th")


def rate(kind: str, bandwidth: float) -> str:
    """3.1 Gb/s of a network, 12 GB/s of what is inside a host."""
    if kind in ("ethernet", "infiniband"):
        return f"{bandwidth * 8 / 1e9:.3g} Gb/s" if bandwidth * 8 >= 1e9 else f"{bandwidth * 8 / 1e6:.3g} Mb/s"
    return f"{bandwidth / 1e9:.3g} GB/s"
