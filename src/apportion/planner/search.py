"""Every strategy on every layout worth a look, priced: a few hundred at most."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from apportion.core.strategy import Strategy
from apportion.core.value import find, names, parse
from apportion.cost_model.cluster import Cluster, Device, Placement, devices_for_workers, layouts
from apportion.cost_model.profile import Profile
from apportion.planner.candidate import Priced, family, priced, ranked
from apportion.planner.units import label

STRATEGIES = "apportion.strategies"
MOST_PRICED = 400
"""The largest number of candidates that are priced: what is left over is not looked at, and the largest layouts come
first."""
MOST_EACH = 12
"""The largest number of values of one strategy on one layout."""
COMPOSED_LAYOUTS = 3
"""The number of layouts, the largest ones, that replicas of groups are tried on."""
GROUP_VALUES = 2
"""The number of values that are tried of a strategy within a group of a composite."""


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    workers: int | None = None,
    threads: int | None = None,
    strategies: Sequence[Strategy | str] | None = None,
    using: Collection[str] | None = None,
) -> tuple[Priced, ...]:
    """Price every strategy on every layout, the best first (see ``ranked``), each strategy once for each layout.

    ``workers``, ``threads``: only layouts with these numbers. ``strategies``: only these: a name stands for all values
    that it has to offer, a value (``"pipeline_parallel(stages=2)"``) for itself. ``using``: only layouts with a rank on
    one of these devices; there may be none. Pure: nothing is measured. Raises ValueError where there is no such layout.
    """
    on_cores = profile.rollouts is not None
    places = places_of(cluster, workers, threads, on_cores=on_cores)
    if not places:
        raise ValueError(no_place(cluster, workers, threads, on_cores=on_cores))
    return among(places, profile, strategies=strategies, using=using)


def among(
    places: Sequence[Placement],
    profile: Profile,
    *,
    strategies: Sequence[Strategy | str] | None = None,
    using: Collection[str] | None = None,
) -> tuple[Priced, ...]:
    """Price every strategy on these layouts, the largest first. ``strategies`` and ``using``: as in ``search``."""
    kinds, values = _asked(strategies)
    large = [place for place in places if place.ranks >= 4][:COMPOSED_LAYOUTS]
    if using is not None:
        places, large = ([p for p in some if not {*using}.isdisjoint(p.devices)] for some in (places, large))
    found = [
        priced(strategy, layout, profile)
        for strategy, layout in islice(_choices(kinds, values, profile, places, large), MOST_PRICED)
    ]
    if not places:
        return ()
    missing = {family(cls()) for cls in kinds} - {family(p.strategy) for p in found}
    found += [p for cls in kinds if family(cls()) in missing for p in _plainly(cls(), profile, places)]
    return tuple(ranked(found))


def places_of(
    cluster: Cluster, workers: int | None = None, threads: int | None = None, *, on_cores: bool = False
) -> list[Placement]:
    """Return the layouts worth a look, the largest first; only those with these numbers of workers and threads
    where they are given. ``on_cores``: of machines with GPUs also several workers on their cores, where networks that
    act are often faster."""
    if workers is None:
        found = [layout for layout in layouts(cluster, on_cores=on_cores) if threads in (None, layout.threads)]
    else:
        found = [
            layout
            for devices in devices_for_workers(cluster, on_cores)
            for layout in _of_workers(cluster, devices, workers, threads)
        ]
    return sorted(found, key=lambda layout: (-layout.ranks, -layout.threads))


def no_place(cluster: Cluster, workers: int | None, threads: int | None, *, on_cores: bool = False) -> str:
    """Say why no layout has ``workers`` workers of ``threads`` threads, and which numbers have one."""
    given = " and ".join(f"{name}={n}" for name, n in (("workers", workers), ("threads", threads)) if n is not None)
    devices = devices_for_workers(cluster, on_cores)[-1]
    cores, hosts = sum(d.cores for d in devices), {d.host for d in devices}
    kind = "GPUs" if devices[0].kind == "cuda" else "cores"
    if (workers or 1) * (threads or 1) > cores:
        why = f"there are {cores} {kind}, and never more threads than cores"
        why = f"there are {cores} GPUs, and each takes one worker" if kind == "GPUs" else why
    elif len(hosts) > 1:
        why = f"workers are on one host, or as many on each of the {len(hosts)}, and never more than its {kind}"
    else:
        why = f"each device takes as many threads as it has {kind}"
    able = _nearest(cluster, workers or 1, threads, cores, on_cores)
    return f"{given}: cluster {label(cluster)} has no place for them: {why}; use {able}"


def _nearest(cluster: Cluster, workers: int, threads: int | None, most: int, on_cores: bool) -> str:
    """Name the numbers of workers or threads that can be asked for instead."""

    def first(numbers: Iterable[int]) -> list[int]:
        return list(islice((n for n in numbers if places_of(cluster, n, threads, on_cores=on_cores)), 1))

    able = first(range(min(workers - 1, most), 0, -1)) + first(range(workers + 1, most + 1))
    if able:
        return " or ".join(f"workers={n}" for n in able)
    return f"threads<={max(d.cores for d in cluster.devices)}"


def _of_workers(cluster: Cluster, devices: Sequence[Device], workers: int, threads: int | None) -> Iterator[Placement]:
    """Yield the layouts of ``workers`` workers on these devices; on one host, and spread evenly over all."""
    hosts = list(dict.fromkeys(d.host for d in devices))
    for many in sorted({1, len(hosts)}):
        here = [d for d in devices if d.host in hosts[:many]]
        if workers % many:
            continue
        names_ = []
        for host in hosts[:many]:
            own = [d for d in here if d.host == host]
            names_ += sorted((own[i % len(own)].name for i in range(workers // many)), key=[d.name for d in own].index)
        most = min(d.cores // names_.count(d.name) for d in here if d.name in names_)
        for each in dict.fromkeys([most, 1] if threads is None else [threads]):
            if 1 <= each <= most:
                yield Placement(cluster=cluster, devices=tuple(names_), threads=each)


def _asked(strategies: Sequence[Strategy | str] | None) -> tuple[list[type[Strategy]], list[Strategy]]:
    """Divide what was asked for into (classes to try in all their values, values to try as they are)."""
    if strategies is None:
        return [find(name, STRATEGIES) for name in names(STRATEGIES)], []
    kinds, values = list[type[Strategy]](), list[Strategy]()
    for strategy in strategies:
        if isinstance(strategy, str) and strategy in names(STRATEGIES):
            kinds.append(find(strategy, STRATEGIES))
        else:
            values.append(parse(strategy, STRATEGIES) if isinstance(strategy, str) else strategy)
    return kinds, values


def _choices(
    kinds: Sequence[type[Strategy]],
    values: Sequence[Strategy],
    profile: Profile,
    places: Sequence[Placement],
    large: Sequence[Placement],
) -> Iterator[tuple[Strategy, Placement]]:
    """Yield each pair of a strategy and a layout to price, once."""
    seen = set()
    every = [_plain(kinds, profile, places), _composed(kinds, profile, large), _as_they_are(values, places)]
    for strategy, layout in (choice for choices in every for choice in choices):
        key = str(strategy), layout.devices, layout.threads
        if key in seen:
            continue
        seen.add(key)
        yield strategy, layout


def _plain(
    kinds: Sequence[type[Strategy]], profile: Profile, places: Sequence[Placement]
) -> Iterator[tuple[Strategy, Placement]]:
    for layout in places:
        for cls in kinds:
            for strategy in _candidates(cls, profile, layout):
                yield strategy, layout


def _composed(
    kinds: Sequence[type[Strategy]], profile: Profile, large: Sequence[Placement]
) -> Iterator[tuple[Strategy, Placement]]:
    """Yield replicas of groups that hold the network in parts. The ranks of a group follow each other, so they share a
    host before they share anything else."""
    replicated = next((cls for cls in kinds if cls.__name__ == "DataParallel"), None)
    if replicated is None:
        return
    known: list[type[Strategy]] = [find(name, STRATEGIES) for name in names(STRATEGIES)]
    makers = [cls for cls in known if cls.splits]
    for layout in large:
        for size in group_sizes(layout):
            group = layout.part(range(size))
            for of in (value for cls in makers for value in _candidates(cls, profile, group)[:GROUP_VALUES]):
                yield replicated(of=of, replicas=layout.ranks // size), layout  # type: ignore[call-arg]


def group_sizes(layout: Placement) -> list[int]:
    """Return the numbers of ranks that a group may have: two, four, and all that a host has. Sizes between these are
    left out, since all that each of them offers would be priced on each of the largest layouts: cores and GPUs come in
    powers of two, and a group that ends in the middle of a host sends between hosts what it could send within one."""
    here = sum(1 for rank in range(layout.ranks) if layout.device(rank).host == layout.device(0).host)
    return [n for n in sorted({2, 4, here}) if 1 < n < layout.ranks and layout.ranks % n == 0]


def _as_they_are(values: Iterable[Strategy], places: Sequence[Placement]) -> Iterator[tuple[Strategy, Placement]]:
    for strategy in values:
        for layout in places:
            if strategy.one_process == (layout.ranks == 1):
                yield strategy, layout


def _candidates(cls: type[Strategy], profile: Profile, layout: Placement) -> list[Strategy]:
    try:
        return list(islice(cls.candidates(profile, layout), MOST_EACH))
    except ValueError:  # its reason is given where its plain value is priced
        return [cls()]


def _plainly(strategy: Strategy, profile: Profile, places: Sequence[Placement]) -> list[Priced]:
    """Price the plain value of a strategy that offered no value anywhere: where it has a price all the same, else with
    the reason why it has none."""
    if max(place.ranks for place in places) == 1:
        what = "there is one device, which is one worker"
        return [Priced(strategy=strategy, layout=places[0], refusal=what)]
    asked = [priced(strategy, place, profile) for place in places if strategy.one_process == (place.ranks == 1)]
    return [p for p in asked if p.cost is not None] or asked[:1] or [_refused(strategy, profile, places[0])]


def _refused(strategy: Strategy, profile: Profile, place: Placement) -> Priced:
    """Refuse a strategy of one process on a layout of several workers."""
    asked = priced(strategy, place, profile)
    what = asked.refusal or f"it is one process, and there are {place.ranks} workers"
    return Priced(strategy=strategy, layout=place, refusal=what)
