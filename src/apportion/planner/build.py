"""Turns prices into a plan: ranked, folded and explained; repeated whenever trials have taught something."""

from __future__ import annotations

from collections.abc import Sequence

from apportion.cost_model.cluster import Cluster
from apportion.cost_model.profile import Profile
from apportion.planner.calibration import Correction, correction
from apportion.planner.candidate import Priced, family, folded, ranked, trials_of
from apportion.planner.explain import why_first, why_not
from apportion.planner.plan import Matched, Plan
from apportion.planner.rollouts.rates import rates
from apportion.planner.rollouts.rates_table import why
from apportion.planner.search import search
from apportion.planner.units import label, milliseconds
from apportion.planner.what_if.cluster_variants import of_hosts
from apportion.planner.what_if.sensitivity import sensitivities

MOST_HOSTS = 64
"""The largest number of hosts of one cluster that is tried to match another cluster."""
MOST_REASONS = 4
"""The largest number of reasons in the error that is raised where no strategy can run."""
MATCHED_WITH = 6
"""The number of the fastest strategies on the other cluster that are looked at when its hosts are counted."""


def make(  # noqa: PLR0913 (what a plan is of, and what was asked for)
    found: Sequence[Priced],
    profile: Profile,
    cluster: Cluster,
    *,
    workload: str | None = None,
    chosen: Priced | None = None,
    against: Cluster | None = None,
    workers: int | None = None,
) -> Plan:
    """Make the plan that these prices (and measurements) speak for. ``chosen``: an approximate candidate, where it was
    asked for and has shown in a pilot that it learns enough; None: the best exact one. ``against``: a cluster to match.

    Raises ValueError, with the reasons, where nothing exact can run.
    """
    order = ranked(found)
    first = chosen if chosen is not None else (order[0] if order else None)
    if first is None or first.cost is None or (chosen is None and not first.strategy.exact):
        raise ValueError(_none(order, profile, cluster))
    candidates = [p.with_overhead(profile) for p in folded([first, *(p for p in order if p is not first)])]
    taught = _taught(order)
    played = rates(profile, cluster, taught)
    return Plan(
        workload=profile.name if workload is None else workload,
        profile=profile,
        cluster=cluster,
        chosen=candidates[0],
        candidates=tuple(candidates),
        why=why_first(candidates, profile),
        reasons=tuple(why_not(p, candidates[0], profile) for p in candidates),
        sensitivities=sensitivities(order, first, profile, cluster, taught=taught, workers=workers),
        rollouts=played,
        rollouts_why=why(played, "" if profile.rollouts is None else profile.rollouts.left_out),
        matched=None if against is None else match(candidates[0], profile, cluster, against),
        found=tuple(order),
        only_workers=workers,
    )


def _taught(found: Sequence[Priced]) -> Correction | None:
    """Return the correction that the trials have taught; None where nothing was tried."""
    made = trials_of(found)
    return correction(made) if made else None


def _none(order: Sequence[Priced], profile: Profile, cluster: Cluster) -> str:
    refused = [p for p in folded(order) if p.cost is None and p.strategy.exact]
    reasons = "; ".join(f"{p.strategy}: {p.refusal}" for p in refused[:MOST_REASONS])
    able = dict.fromkeys(family(p.strategy) for p in order if p.cost is not None)
    others = f"; approximate ones can, which compute something else: {', '.join(able)}" if able else ""
    return f"nothing exact can run {profile.name} on cluster {label(cluster)}: {reasons}{others}"


def match(chosen: Priced, profile: Profile, cluster: Cluster, against: Cluster) -> Matched:
    """Predict how many hosts of the slower of two clusters are as fast as the other cluster."""
    there = _able(profile, against)
    best = there[0]
    names = [str(p.strategy).partition("(")[0] for p in (*there[:MATCHED_WITH], chosen)]
    names = list(dict.fromkeys([*names, "data_parallel"]))  # on one device nothing is best that goes on to others
    ratio = best.seconds_per_example / chosen.seconds_per_example
    said = f"on {label(against)} {best} takes {milliseconds(best.step_seconds)} a step"
    if 0.99 < ratio < 1.01:
        return Matched(other=against.name, best=best, hosts=None, text=f"{said}, as long as here")
    slow, wanted = (against, chosen) if ratio > 1 else (cluster, best)
    hosts = hosts_to_match(profile, slow, wanted.seconds_per_example, names)
    many = f"no number up to {MOST_HOSTS}" if hosts is None else f"{hosts}"
    if ratio > 1:
        text = f"{said}, {ratio:.2f} times as long as here; {many} of those hosts match what is here"
    else:
        text = f"{said}, {1 / ratio:.2f} times as fast as here; {many} of the hosts here match that"
    return Matched(other=against.name, best=best, hosts=hosts, text=text)


def hosts_to_match(
    profile: Profile, cluster: Cluster, seconds_per_example: float, strategies: Sequence[str] | None = None
) -> int | None:
    """Find the smallest number of hosts, each like the cluster's first one, that need no more than these seconds for an
    example, with one of these strategies; None: ``MOST_HOSTS`` are too few."""

    def enough(hosts: int) -> bool:
        try:
            return _able(profile, of_hosts(cluster, hosts), strategies)[0].seconds_per_example <= seconds_per_example
        except ValueError:
            return False

    few, many = 0, 1
    while not enough(many):
        few, many = many, many * 2
        if many > MOST_HOSTS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def _able(profile: Profile, cluster: Cluster, strategies: Sequence[str] | None = None) -> list[Priced]:
    """Return the exact candidates that can run on the cluster, the fastest first. Raises ValueError where there is
    none."""
    able = [p for p in search(profile, cluster, strategies=strategies) if p.cost is not None and p.strategy.exact]
    if not able:
        raise ValueError(f"nothing exact can run {profile.name} on cluster {label(cluster)}")
    return sorted(able, key=lambda p: p.seconds_per_example)
