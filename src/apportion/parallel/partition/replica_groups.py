"""The groups of ranks that each hold a whole network in parts: how many there are, a rank's place among them, and the
cost of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from apportion.comm.group import collective
from apportion.comm.world import World
from apportion.core.strategy import Strategy
from apportion.core.value import find, names
from apportion.cost_model.cluster import Placement
from apportion.cost_model.collectives import all_reduce
from apportion.cost_model.compute import call_seconds, memory_rate, of_rows, slowest
from apportion.cost_model.constraints import must_feed
from apportion.cost_model.cost import Cost, copies
from apportion.cost_model.profile import Profile


def check_of(of: object) -> None:
    """Raise ValueError where replicas cannot be made of this value."""
    if not isinstance(of, Strategy):
        raise ValueError(f"of={of!r} must be a strategy, as of=pipeline_parallel(microbatches=4)")
    if not of.splits:
        raise whole_network(of)


def whole_network(of: Strategy) -> ValueError:
    """Return the error that says that ``of`` does not split a network."""
    package = "apportion.strategies"
    suited = [name for name in names(package) if getattr(find(name, package), "splits", False)]
    return ValueError(f"of={of} does not split a network: replicas are made of {', '.join(suited)}")


def check_replicas(replicas: object) -> None:
    """Raise ValueError where this value is not a number of replicas."""
    if replicas is not None and (not isinstance(replicas, int) or replicas < 1):
        raise ValueError(f"replicas={replicas!r} must be a whole number of at least 1, or None")


def how_many(of: Strategy, replicas: int | None, ranks: int) -> int:
    """Return the number of replicas on ``ranks`` ranks. None given: groups of as many ranks as ``of`` says that it
    needs, or else the fewest replicas that there can be, and at least two where there can be. ValueError where the
    ranks cannot be shared evenly."""
    given = "" if replicas is None else f"replicas={replicas} of "
    if replicas is None:
        stages, cuts = getattr(of, "stages", None), getattr(of, "cuts", None)
        group = stages if stages is not None else len(cuts) + 1 if cuts is not None else None
        if group is None:
            return next((n for n in range(2, ranks + 1) if ranks % n == 0), 1)
        replicas = max(1, ranks // group)
        if ranks != replicas * group:
            raise ValueError(f"{of} takes {group} workers each time, and there are {ranks}: use a multiple of {group}")
    if ranks % replicas:
        more = ranks + replicas - ranks % replicas
        raise ValueError(
            f"{given}{of} cannot share {ranks} workers evenly: use workers={more}, or a number of replicas that "
            f"divides {ranks}"
        )
    return replicas


def how_many_are_left(of: Strategy, replicas: int | None, ranks: int) -> int:
    """Return the number of replicas once workers were lost that are not replaced: that of ``how_many``, or where it
    does not fit any more, of fewer and larger replicas."""
    try:
        return how_many(of, replicas, ranks)
    except ValueError:
        return max(n for n in range(1, min(replicas or 1, ranks) + 1) if ranks % n == 0)


@dataclass(frozen=True)
class ReplicaGroup:
    """The place of a rank among replicas."""

    replica: int
    replicas: int
    within: World
    """The world of the ranks of its replica."""
    across: World
    """The world of the ranks, one in each replica, that hold the same pieces as this one."""

    @classmethod
    @collective
    def split(cls, world: World, replicas: int) -> ReplicaGroup:
        """Return this rank's place in a world that is divided into ``replicas`` replicas. Called by all ranks."""
        size = world.size // replicas
        groups = [list(range(first, first + size)) for first in range(0, world.size, size)]
        within = world.split("replica", groups)
        across = world.split("replicas", [list(ranks) for ranks in zip(*groups, strict=True)])
        return cls(world.rank // size, replicas, within, across)


# The price of replicas of a network in parts (``parallel/partition/replicated_step.py``).

STEP_CALLS = 10.0
"""The cost of a step's own Python, in ``Device.call_seconds``: the sum, and the state that is kept. An estimate by what
``data_parallel`` needs."""


def slowest_group(of: Strategy, profile: Profile, layout: Placement, replicas: int, rows: float) -> Cost:
    """Return the cost of the slowest of the replicas, each with ``rows`` rows at a time."""
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
