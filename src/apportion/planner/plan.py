"""A plan: what to run, every alternative with its price, and why."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from apportion.cost_model.cluster import Cluster
from apportion.cost_model.cost import TERMS
from apportion.cost_model.profile import Profile
from apportion.planner.candidate import Priced
from apportion.planner.rollouts.rates import RolloutRate

MOST_SPANS = 1500
"""The largest number of spans of the timeline that the JSON holds."""


@dataclass(frozen=True, kw_only=True)
class Matched:
    """The prediction of two clusters side by side."""

    other: str
    """The name of the other cluster."""
    best: Priced
    """The best candidate on the other cluster."""
    hosts: int | None
    """The number of hosts like the first one of the slower cluster that are as fast as the other cluster; None: no
    number that was looked at is, or the two are equally fast as they are."""
    text: str
    """The comparison of the two clusters in words."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan how to split the work of one workload on one cluster."""

    workload: str
    """The workload that the numbers belong to: as it is addressed (FILE:NAME), or by the name of the profile that was
    given."""
    profile: Profile
    """The profile of the workload's step that the prices are computed from."""
    cluster: Cluster
    """The machines and links that the plan is for."""
    chosen: Priced
    """The candidate that was chosen, with its price."""
    candidates: tuple[Priced, ...]
    """All strategies, the best first, each once: exact ones, approximate ones, then those that cannot run, or do not
    fit."""
    why: tuple[str, ...]
    """The lines that say why the first candidate won."""
    reasons: tuple[str, ...]
    """The lines that say why each of ``candidates`` lost, one for each."""
    sensitivities: tuple[str, ...] = ()
    """The lines that say when the answer would change."""
    matched: Matched | None = None
    """The comparison with another cluster, where one was asked for; else None."""
    rollouts: tuple[RolloutRate, ...] = ()
    """The frames a second that are predicted of other numbers of environments and steps, by every strategy; empty where
    the network does not make its examples by what it does, or only the workload's own numbers were measured."""
    rollouts_why: tuple[str, ...] = ()
    """The lines that say which of ``rollouts`` is the fastest, why, and whether cores or a GPU win."""
    found: tuple[Priced, ...] = ()
    """Every strategy on every layout that was looked at."""
    only_workers: int | None = None
    """The number of workers, where only layouts with that number were asked for."""
    address: str | None = None
    """The workload that the commands name, where it is not ``workload``."""
    started_by: str | None = None
    """The launcher that starts ranks on the hosts of the plan, as it is typed, where it is known."""

    @property
    def strategy(self) -> str:
        """The strategy that was chosen, as it is typed."""
        return str(self.chosen.strategy)

    @property
    def launcher(self) -> str:
        """The launcher of the strategy that was chosen, as it is typed."""
        return str(self.chosen.launcher)

    @property
    def step_seconds(self) -> float:
        """The seconds of a step of what was chosen: measured where it was tried, else predicted."""
        return self.chosen.step_seconds

    @property
    def band(self) -> float:
        """The share by which ``step_seconds`` may be off."""
        return self.chosen.error

    @property
    def commands(self) -> Commands:
        """The shell commands that carry out the plan."""
        return commands(self.address or self.workload, self.chosen, self.started_by)

    def __str__(self) -> str:
        """The plan as the terminal shows it."""
        from apportion.planner.plan_text import plan_text  # rich comes with it

        return plan_text(self)

    def _repr_html_(self) -> str:
        """The plan as a notebook shows it."""
        from apportion.planner.plan_text import plan_html

        return plan_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data: the chosen candidate's ``strategy``, ``launcher``, ``workers``,
        ``step_seconds``, ``exact`` and its other fields (see ``described``); all ``candidates``, described in the same
        way and each with its ``why``; ``because`` (lines), ``sensitivities``, ``commands``, ``matched``; the
        ``rollouts`` (see ``RolloutRate``) and what is to be said of them, ``rollouts_because`` (lines); the
        ``timeline`` of one step."""
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
            "rollouts": [asdict(rate) for rate in self.rollouts],
            "rollouts_because": list(self.rollouts_why),
            "timeline": [
                {"on": s.on, "name": s.name, "kind": s.kind, "begin": s.begin, "end": s.end}
                for s in cost.timeline[:MOST_SPANS]
            ],
            "candidates": [{**described(p), "why": why} for p, why in zip(self.candidates, self.reasons, strict=True)],
        }


def described(p: Priced) -> dict[str, Any]:
    """Describe one candidate as plain data. Times are in seconds; a refused candidate has none.
    ``predicted_step_seconds`` is the predicted time, ``step_seconds`` the one that counts: measured where it was
    tried."""
    data: dict[str, Any] = {
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
        return {**data, **dict.fromkeys(_TIMES)}
    return {
        **data,
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


# The commands


class Commands(NamedTuple):
    """The lines of a plan for a shell."""

    apportion: str | None
    """The ``apportion train`` command; None where several hosts are needed and nothing is known to start ranks there:
    each of them runs ``torchrun``."""
    torchrun: str
    """The ``torchrun`` command, with its threads, and with each worker on cores of its own."""


def commands(workload: str, chosen: Priced, started_by: str | None = None) -> Commands:
    """Return the commands of the chosen candidate. ``workload``: FILE:NAME; what is not an address is written as
    FILE:NAME. ``started_by``: the launcher for several hosts."""
    address = workload if ":" in workload else "FILE:NAME"
    train = f"apportion train {_quoted(address)} --strategy {_quoted(str(chosen.strategy))}"
    launcher = started_by if chosen.local is None else str(chosen.local)
    ours = None if launcher is None else f"{train} --launcher {_quoted(launcher)}"
    return Commands(ours, _torchrun(f"{train} --launcher {_quoted(_env(chosen))}", chosen))


def _env(chosen: Priced) -> str:
    device = chosen.launcher.device
    return "env" if device is None else f"env(device={device!r})"


def _torchrun(train: str, chosen: Priced) -> str:
    layout = chosen.layout
    a_host = Counter(layout.device(rank).host for rank in range(layout.ranks))
    each = max(a_host.values())
    threads = layout.threads
    where = "--standalone"
    if len(a_host) > 1:
        where = f"--nnodes={len(a_host)} --node-rank=$NODE_RANK --master-addr=$MASTER_ADDR --master-port=29500"
    cores = f"OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads}"
    start = f"{cores} torchrun {where} --nproc-per-node={each} --no-python"
    on_cores = layout.device(0).kind == "cpu"
    if not on_cores or each == 1:
        return f"{start} {train}"
    first = "$LOCAL_RANK" if threads == 1 else f"$((LOCAL_RANK * {threads}))"
    last = "" if threads == 1 else f"-$((LOCAL_RANK * {threads} + {threads - 1}))"
    return f"{start} sh -c {shlex.quote(f'exec taskset -c {first}{last} {train}')}"


def _quoted(text: str) -> str:
    """Quote a text for a shell as a person would: a plain word without quotes, in double quotes where it holds no
    character that is special in them, else as ``shlex.quote`` does."""
    if shlex.quote(text) == text:
        return text
    return shlex.quote(text) if any(c in text for c in '"$`\\!') else f'"{text}"'
