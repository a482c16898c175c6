"""Predictions of what candidates on this machine should cost: from its measured devices and links, a profile of the
workload, and each strategy's own price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from apportion.core.strategy import Strategy
from apportion.core.value import find
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Cluster, Placement, layouts
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import Profile
from apportion.planner.search import search
from apportion.planner.trials.trial import Candidate, candidate
from apportion.process import most_threads
from apportion.profiler import measure_cluster, measure_workload
from apportion.runtime.launch.local import Local


def offered(launcher: Local) -> list[Candidate]:
    """Return what can be tried where nothing is predicted: one process with all threads and with one, and data_parallel
    on a few layouts. Where a number of workers is asked for, only what has that number."""
    single, parallel = (find(name, "apportion.strategies") for name in ("single_device", "data_parallel"))
    if launcher.workers is not None:
        return [candidate((single if launcher.workers == 1 else parallel)(), launcher)]
    places = launcher.places()
    found = [candidate(single(), launcher)]
    shared = [candidate(parallel(), replace(launcher, workers=n)) for n in (places, places // 2, places // 4) if n > 1]
    found += [*shared[:1], candidate(single(fused=True), launcher)]
    if found[0].launcher.threads != 1:  # a small network is fastest where no thread waits for another
        found.append(candidate(single(), replace(launcher, threads=1)))
    return found + shared[1:]


def predicted(workload: Workload | str, launcher: Local, seconds: float, *, remeasure: bool = False) -> list[Candidate]:
    """Return every strategy's candidates on this machine's layouts, with their prices; none where nothing can be
    priced."""
    profiled = _profiled(workload, seconds, remeasure, lambda cluster: list(layouts(cluster)))
    if profiled is None:
        return []
    cluster, profile = profiled
    found = search(profile, cluster, threads=launcher.threads)
    most = most_threads() if launcher.threads is None else None
    return [
        candidate(p.strategy, replace(where, loaders=launcher.loaders), p.cost)
        for p in found
        if p.cost is not None
        and (where := p.local) is not None
        and launcher.device in (None, where.device)
        and (most is None or (where.threads or 1) <= most)
    ]


def prices(workload: Workload | str, candidates: Sequence[Candidate], seconds: float) -> list[Cost | None]:
    """Return the prices of these candidates; None for a candidate that has no price."""

    def places(cluster: Cluster) -> list[Placement]:
        found = [_layout(c, cluster) for c in candidates]
        return list(dict.fromkeys(place for place in found if place is not None))

    profiled = _profiled(workload, seconds, False, places)
    if profiled is None:
        return [None] * len(candidates)
    cluster, profile = profiled
    return [_cost(c.strategy, profile, _layout(c, cluster)) for c in candidates]


def _profiled(
    workload: Workload | str, seconds: float, remeasure: bool, places: Callable[[Cluster], list[Placement]]
) -> tuple[Cluster, Profile] | None:
    """Return this machine and the workload's profile on it, both measured; the machine from the cache where it was
    measured before. None where no layout is wanted."""
    cluster: Cluster = measure_cluster.measure(remeasure=remeasure, seconds=seconds / 2)
    wanted = places(cluster)
    return (cluster, measure_workload.profile(workload, cluster, wanted, seconds=seconds / 2)) if wanted else None


def _cost(strategy: Strategy, profile: Profile, place: Placement | None) -> Cost | None:
    try:
        return None if place is None else strategy.cost(profile, place)
    except ValueError:  # it says why it cannot
        return None


def _layout(chosen: Candidate, cluster: Cluster) -> Placement | None:
    """Return the layout of a candidate's ranks: on the GPUs, one each, or all on the cores. None where it has more
    threads than cores."""
    gpus = [d.name for d in cluster.devices if d.kind == "cuda" and chosen.launcher.device != "cpu"]
    cores = [d.name for d in cluster.devices if d.kind == "cpu"]
    devices = gpus[: chosen.ranks] if len(gpus) >= chosen.ranks else cores[:1] * chosen.ranks
    try:
        return Placement(cluster=cluster, devices=tuple(devices), threads=chosen.launcher.threads_each(chosen.ranks))
    except ValueError:  # more threads than cores
        return None
