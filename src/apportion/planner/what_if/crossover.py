"""The bandwidths of a kind of link at which the answer changes: looked for among a few candidates, then checked by the
whole search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from apportion.planner.candidate import Priced
from apportion.planner.what_if.cluster_variants import with_bandwidth
from apportion.planner.what_if.hypothetical import There, WhatIf, at

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
