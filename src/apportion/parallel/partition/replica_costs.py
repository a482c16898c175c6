"""The price of replicas of a network in parts (``parallel/partition/replicated_step.py``)."""

from __future__ import annotations

from collections import Counter

from apportion.core.strategy import Strategy
from apportion.cost_model.collectives import all_reduce
from apportion.cost_model.compute import call_seconds, memory_rate, of_rows, slowest
from apportion.cost_model.constraints import must_feed
from apportion.cost_model.cost import Cost
from apportion.cost_model.memory import copies
from apportion.cost_model.placement import Placement
from apportion.cost_model.profile import Profile
from apportion.parallel.partition.replica_groups import how_many

STEP_CALLS = 10.0
"""The cost of a step's own Python, in ``Device.call_seconds``: the sum, and the state that is kept. An estimate by what
``data_parallel`` needs."""


def slowest_group(of: Strategy, profile: Profile, layout: Placement, replicas: int, rows: float) -> Cost:
    """Return the cost of the slowest of the replicas, each with so many rows at a time."""
    size, share = layout.ranks // replicas, of_rows(profile, rows)
    seen: dict[tuple[str, ...], Cost] = {}
    for first in range(0, layout.ranks, size):
        part = layout.part(range(first, first + size))
        key = _kind(part)
        if key not in seen:
            seen[key] = of.cost(share, part)
    return max(seen.values(), key=lambda cost: cost.step_seconds)


def _kind(part: Placement) -> tuple[str, ...]:
    """Return a key that is equal for groups that take the same time, since their ranks are placed in the same way."""
    hosts = {host: str(number) for number, host in enumerate(part.hosts)}
    names = {name: str(number) for number, name in enumerate(dict.fromkeys(part.devices))}
    return tuple(
        f"{part.device(r).model} {part.device(r).cores} {part.together(r)} "
        f"{hosts[part.device(r).host]} {names[part.devices[r]]}"
        for r in range(part.ranks)
    )


def cost(of: Strategy, asked: int | None, profile: Profile, layout: Placement) -> Cost:
    """Return the cost of a step of data_parallel whose replicas are groups."""
    if profile.own_update:
        raise ValueError(f"update= sees the loss of its own rows, and replicas of {of} share one: use data_parallel")
    n, replicas = layout.ranks, how_many(of, asked, layout.ranks)
    must_feed(profile, replicas, "replicas")
    size = n // replicas
    inner = slowest_group(of, profile, layout, replicas, -(-profile.batch_size // replicas))
    held = profile.parameter_bytes / size
    shares_memory = len(layout.hosts) == 1 and all(layout.device(r).kind == "cpu" for r in layout.kinds)
    state = held * (1 + profile.slots)
    keeping = 2 * state / memory_rate(layout) if shares_memory else 0.0
    spread = max(layout.device(r).spread for r in layout.kinds)
    late = (slowest(n, spread) - slowest(size, spread)) * inner.terms.get("computing", 0.0)
    added = {
        "communicating": across(layout, replicas, held),
        "updating": keeping + STEP_CALLS * call_seconds(layout),
        "waiting": late,
    }
    memory = dict(inner.memory)
    if shares_memory:
        kept = copies(profile, weights=2 / size, slots=2 / size)
        memory |= {what: memory.get(what, 0) + round(nbytes) for what, nbytes in kept.items()}
    return Cost(
        terms={what: inner.terms.get(what, 0.0) + added.get(what, 0.0) for what in {**inner.terms, **added}},
        memory=memory,
        examples=profile.batch_size,
        timeline=inner.timeline,
    )


def across(layout: Placement, replicas: int, nbytes: float) -> float:
    """Return the seconds of the sum over replicas of what each rank of one holds: one ring for each place in a replica,
    all at once, which share the links that join them."""
    size = layout.ranks // replicas
    places = [range(place, layout.ranks, size) for place in range(size)]
    longest = 0.0
    for ranks in places:
        link = layout.cluster.joining(layout.group(tuple(ranks)))
        sharing = size if link.port == "all" else _sharing(layout, ranks, size, by_host=link.port == "host")
        longest = max(longest, all_reduce(layout, ranks, nbytes * sharing))
    return longest if replicas > 1 else 0.0


def _sharing(layout: Placement, ranks: range, size: int, *, by_host: bool) -> int:
    """Return how many of the rings go through the same port as this one."""

    def port(rank: int) -> str:
        return layout.device(rank).host if by_host else layout.devices[rank]

    first = range(size)  # the ranks of the first replica, one of each ring
    return Counter(port(rank) for rank in first)[port(ranks[0])]
