"""A plan as plain data of which another process makes the same plan: what was measured travels, prices are worked out
again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from apportion.core.json_data import read
from apportion.core.strategy import Strategy
from apportion.core.value import parse
from apportion.cost_model.cluster import Cluster, Placement
from apportion.cost_model.profile import Profile
from apportion.planner.build import make
from apportion.planner.candidate import Measurement, Priced, priced
from apportion.planner.plan import Plan


def plan_data(plan: Plan) -> dict[str, Any]:
    """Returns a plan for ranks that are running as plain data, from which ``plan_of`` makes it."""
    return {
        "workload": plan.workload,
        "cluster": plan.cluster.to_json(),
        "profile": plan.profile.to_json(),
        "found": [_candidate(p) for p in plan.found],
    }


def plan_of(data: Mapping[str, Any]) -> Plan:
    """Makes the plan that ``plan_data`` has described. Raises ValueError, KeyError or TypeError where the data describe
    none."""
    cluster, profile = Cluster.from_json(data["cluster"]), Profile.from_json(data["profile"])
    found = [_priced(one, cluster, profile) for one in data["found"]]
    return make(found, profile, cluster, workload=str(data["workload"]))


def _candidate(p: Priced) -> dict[str, Any]:
    return {
        "strategy": str(p.strategy),
        "devices": list(p.layout.devices),
        "threads": p.layout.threads,
        "refusal": p.refusal,
        "corrected": p.corrected,
        "tried": None if p.tried is None else asdict(p.tried),
    }


def _priced(data: Mapping[str, Any], cluster: Cluster, profile: Profile) -> Priced:
    strategy: Strategy = parse(data["strategy"], "apportion.strategies")
    layout = Placement(cluster=cluster, devices=tuple(data["devices"]), threads=int(data["threads"]))
    if data["refusal"]:
        return Priced(strategy=strategy, layout=layout, refusal=str(data["refusal"]))
    tried, corrected = data["tried"], data["corrected"]
    return replace(
        priced(strategy, layout, profile),
        corrected=None if corrected is None else float(corrected),
        tried=None if tried is None else _measurement(tried),
    )


def _measurement(data: Mapping[str, Any]) -> Measurement:
    terms = data["terms"]
    numbers = read(Measurement, {name: value for name, value in data.items() if name != "terms"})
    return replace(numbers, terms=None if terms is None else {str(name): float(s) for name, s in terms.items()})
