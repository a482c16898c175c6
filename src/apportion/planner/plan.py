"""What a plan says: what to run, every alternative with its price, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apportion.cluster import Cluster
from apportion.planner.commands import Commands, commands
from apportion.planner.priced import Priced
from apportion.pricing.cost import TERMS
from apportion.profile import Profile

MOST_SPANS = 1500
"""Of the timeline, in JSON."""


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Two clusters side by side: predicted."""

    other: str
    """The name of the other cluster."""
    best: Priced
    """What is best there."""
    hosts: int | None
    """So many hosts as that cluster's first one are needed to be as fast as what was chosen here; None: more of them
    do not get there."""
    text: str
    """The same in words."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to split the work of one workload on one cluster."""

    workload: str
    """What the numbers are of: as it is addressed (FILE:NAME), or by the name of the profile that was given."""
    profile: Profile
    cluster: Cluster
    chosen: Priced
    candidates: tuple[Priced, ...]
    """The best first, each strategy once: exact ones, approximate ones, then what cannot run, or does not fit."""
    why: tuple[str, ...]
    """Why the first won."""
    reasons: tuple[str, ...]
    """For each of ``candidates`` a line: why it lost."""
    sensitivities: tuple[str, ...] = ()
    """When the answer would change."""
    matched: Matched | None = None
    found: tuple[Priced, ...] = ()
    """Every strategy on every layout that was looked at."""
    only_workers: int | None = None
    """Layouts of so many alone were asked for."""
    address: str | None = None
    """Which workload the commands name, where it is not ``workload``."""

    @property
    def strategy(self) -> str:
        """What was chosen, as it is typed."""
        return str(self.chosen.strategy)

    @property
    def launcher(self) -> str:
        """So too."""
        return str(self.chosen.launcher)

    @property
    def step_seconds(self) -> float:
        """Of what was chosen: measured where it was tried, else predicted."""
        return self.chosen.step_seconds

    @property
    def band(self) -> float:
        """By what part of it ``step_seconds`` may be off."""
        return self.chosen.error

    @property
    def commands(self) -> Commands:
        """What to type."""
        return commands(self.address or self.workload, self.chosen)

    def to_json(self) -> dict[str, Any]:
        """Plain data: the chosen one's ``strategy``, ``launcher``, ``workers``, ``step_seconds``, ``exact`` and what
        else there is to say of a candidate; all ``candidates``, so described and each with its ``why``; ``because``
        (lines), ``sensitivities``, ``commands``, ``matched``; the ``timeline`` of one step."""
        cost = self.chosen.cost
        assert cost is not None
        return {
            **described(self.chosen),
            "workload": self.workload,
            "batch_size": self.profile.batch_size,
            "cluster": self.cluster.name,
            "band": self.band,
            "because": list(self.why),
            "sensitivities": list(self.sensitivities),
            "commands": {"apportion": self.commands.apportion, "torchrun": self.commands.torchrun},
            "matched": None if self.matched is None else _matched(self.matched),
            "timeline": [
                {"on": s.on, "name": s.name, "kind": s.kind, "begin": s.begin, "end": s.end}
                for s in cost.timeline[:MOST_SPANS]
            ],
            "candidates": [{**described(p), "why": why} for p, why in zip(self.candidates, self.reasons, strict=True)],
        }


def described(p: Priced) -> dict[str, Any]:
    """One candidate as plain data. Times are in seconds; what is refused has none. ``predicted_step_seconds`` is what
    the price said, ``step_seconds`` what counts: measured where it was tried."""
    told: dict[str, Any] = {
        "strategy": str(p.strategy),
        "launcher": str(p.launcher),
        "workers": p.workers,
        "threads": p.layout.threads,
        "hosts": len(p.layout.hosts),
        "exact": p.strategy.exact,
        "layouts": p.layouts,
        "refused": p.refusal or None,
    }
    if p.cost is None:
        return {**told, **dict.fromkeys(_TIMES)}
    return {
        **told,
        "step_seconds": p.step_seconds,
        "predicted_step_seconds": p.cost.step_seconds,
        "examples_per_second": p.examples_per_second,
        "error": p.error,
        "examples": p.cost.examples,
        "terms": _terms(p.cost.terms),
        "memory": dict(p.cost.memory),
        "memory_bytes": p.cost.memory_bytes,
        "measured": None
        if p.tried is None
        else {
            "step_seconds": p.tried.step_seconds,
            "low": p.tried.low,
            "high": p.tried.high,
            "steps": p.tried.steps,
            "terms": None if p.tried.terms is None else dict(p.tried.terms),
        },
    }


_TIMES = (
    "step_seconds",
    "predicted_step_seconds",
    "examples_per_second",
    "error",
    "examples",
    "terms",
    "memory",
    "memory_bytes",
    "measured",
)


def _terms(terms: Mapping[str, float]) -> dict[str, float]:
    return {name: terms.get(name, 0.0) for name in TERMS}


def _matched(matched: Matched) -> dict[str, Any]:
    return {"cluster": matched.other, "hosts": matched.hosts, "text": matched.text, "best": described(matched.best)}
