"""At which bandwidth of a kind of link the answer changes: looked for among a few, held against the whole search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from apportion.planner.candidate import Priced
from apportion.planner.what_if.cluster_variants import with_bandwidth
from apportion.planner.what_if.hypothetical import There, WhatIf, at

STRIDE, FURTHEST = 4.0, 4
"""A bandwidth is looked at so many times as large, and that again, so often; and as many times smaller."""
HALVINGS = 8
"""Of the last of them, to find where the answer changes."""
LOOKS = 3
"""How often the few are asked, each time with those whom the whole search has named; after that it is asked alone."""


class Crossing(NamedTuple):
    """Where the answer changes."""

    kind: str
    """Of link."""
    bandwidth: float
    """Bytes a second."""
    now: float
    """That there are today."""
    below: Priced
    above: Priced


def crossings(model: WhatIf) -> list[Crossing]:
    """For each kind of link that workers talk over: the nearest bandwidth below and above today's at which a plan of
    predictions would choose another one."""
    found = []
    for kind in _kinds(model):
        scan = _Scan(model, kind)
        found += [crossing for step in (1 / STRIDE, STRIDE) if (crossing := scan.crossing(step)) is not None]
    return found


def _kinds(model: WhatIf) -> list[str]:
    talking = {name for p in model.here if p.layout.ranks > 1 for name in p.layout.devices}
    return list(dict.fromkeys(link.kind for link in model.cluster.links if talking & {*link.devices}))


class _Scan:
    """Over the factors on one kind of link."""

    def __init__(self, model: WhatIf, kind: str) -> None:
        self._model, self._kind = model, kind
        self._some = list(model.short_list)
        self._looked: dict[float, There] = {}
        self._note([model.chosen])

    def crossing(self, step: float) -> Crossing | None:
        """In this direction. What the few say is held against all: whoever wins there joins them, and they are asked
        again. Where they will not agree, as one of them is not looked at there, all are asked."""
        self._look(step**FURTHEST)
        for changed in (*[self._few_changed] * LOOKS, self._all_changed):
            ends = self._change(step, changed)
            if ends is None:
                continue
            near, far = ends
            other = self._model.other(self._look(far))
            if other is not None and not self._all_changed(near):
                return self._told(math.sqrt(near * far), step, other)
        return None

    def _told(self, factor: float, step: float, other: Priced) -> Crossing:
        now = min(link.bandwidth for link in self._model.cluster.links if link.kind == self._kind)
        below, above = (self._model.chosen, other) if step > 1 else (other, self._model.chosen)
        return Crossing(self._kind, now * factor, now, below, above)

    def _look(self, factor: float) -> There:
        """The whole search; where that takes long, the few alone."""
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
        """Two factors close to each other, in this direction: at the first of them what is chosen today still is, at
        the second it is not. None: it stays."""
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
