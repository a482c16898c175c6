"""The number of replicas of a group, and a rank's place among them: decisions, and the parts of the world."""

from __future__ import annotations

from dataclasses import dataclass

from apportion.comm.group import collective
from apportion.comm.world import World
from apportion.core.strategy import Strategy
from apportion.core.value import find, names


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
    """Return the number of replicas on so many ranks. None given: groups of as many ranks as ``of`` says that it needs,
    or else the fewest replicas that there can be, and at least two where there can be. ValueError where the ranks
    cannot be shared evenly."""
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
    def of(cls, world: World, replicas: int) -> ReplicaGroup:
        """Return this rank's place in a world that is divided into so many replicas. Called by all ranks."""
        size = world.size // replicas
        groups = [list(range(first, first + size)) for first in range(0, world.size, size)]
        within = world.split("replica", groups)
        across = world.split("replicas", [list(ranks) for ranks in zip(*groups, strict=True)])
        return cls(world.rank // size, replicas, within, across)
