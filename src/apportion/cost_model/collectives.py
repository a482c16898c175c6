"""The seconds of messages and collectives between devices: measured where they were, else by latency and bandwidth.

Over one link with n ranks a ring passes ``2 (n - 1) / n`` of the bytes through each rank's port in ``2 (n - 1)``
messages (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009); over
several hosts each reduces within itself first, and one ring goes through the hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Self

from apportion.cost_model.cluster import Link, Placement
from apportion.cost_model.profile import interpolated


def message(layout: Placement, a: int, b: int, nbytes: float, *, at_once: int = 1) -> float:
    """Seconds of a message from one rank to another, while ``at_once`` such messages go over the same port."""
    if a == b or nbytes <= 0:
        return 0.0
    link = layout.cluster.link(layout.devices[a], layout.devices[b])
    table = [(m.nbytes, m.seconds) for m in link.measured if m.what == "message"]
    if table and at_once == 1:
        return max(link.latency, interpolated(table, nbytes))
    return link.latency + nbytes / link.bandwidth * at_once


def all_reduce(layout: Placement, ranks: Sequence[int], nbytes: float) -> float:
    """Seconds of a sum of ``nbytes`` over ranks, until all of them have it."""
    return Collective.among(layout, ranks).all_reduce(nbytes)


def all_reduce_between(layout: Placement, ranks: Sequence[int], nbytes: float, sent: float) -> float:
    """Seconds of a sum of ``nbytes`` over ranks of several hosts, which stand for ``sent`` bytes between the hosts."""
    by_host = Counter(layout.device(rank).host for rank in ranks)
    several = [[rank for rank in ranks if layout.device(rank).host == host] for host, n in by_host.items() if n > 1]
    within = max(
        (all_reduce(layout, group, nbytes) - all_reduce(layout, group, sent) for group in several), default=0.0
    )
    return all_reduce(layout, ranks, sent) + within


def all_gather(layout: Placement, ranks: Sequence[int], nbytes: float) -> float:
    """Seconds until all ranks have what they hold together (``nbytes`` in all)."""
    return Collective.among(layout, ranks).all_gather(nbytes)


def reduce_scatter(layout: Placement, ranks: Sequence[int], nbytes: float) -> float:
    """Seconds until each rank has its share of a sum of ``nbytes`` over the ranks."""
    return Collective.among(layout, ranks).all_gather(nbytes)


def broadcast(layout: Placement, ranks: Sequence[int], nbytes: float) -> float:
    """Seconds until all ranks have what one of them had, handed on from each to the next in pieces: the whole of it
    goes through every port."""
    return Collective.among(layout, ranks).broadcast(nbytes)


class _Ring(NamedTuple):
    """Ranks that hand data on to each other in a ring."""

    ranks: int
    latency: float
    bandwidth: float
    """The bytes a second that each rank has for itself."""
    table: tuple[tuple[float, float], ...]
    """The (bytes, seconds) of sums that were measured among as many ranks; where it is not empty it counts more than
    the rest."""
    shared: bool = False
    """Is there one port that all transfers go through?"""

    def handed_on(self, nbytes: float) -> float:
        """Seconds until what one of them had is with all: each but the last sends the whole. Through a port of its own
        that is ``n / (n - 1)`` times what goes round; a port that all share carries it ``n - 1`` times, either way."""
        return self.seconds(nbytes if self.shared else nbytes * self.ranks / max(1, self.ranks - 1), 1)

    def seconds(self, nbytes: float, passes: int) -> float:
        if self.ranks < 2:
            return 0.0
        if self.table:
            return interpolated(self.table, nbytes) * passes / 2
        moved = passes * (self.ranks - 1) / self.ranks * nbytes
        return passes * (self.ranks - 1) * self.latency + moved / self.bandwidth


class Collective(NamedTuple):
    """The rings by which some ranks of a layout reach each other, for as many collectives as are to be priced among
    them."""

    within: tuple[_Ring, ...]
    """The rings within the hosts, which work at once; one ring for each kind of host."""
    between: _Ring | None = None
    """The ring that follows, through a rank of each host."""

    @classmethod
    def among(cls, layout: Placement, ranks: Sequence[int]) -> Self:
        """The collectives among these ranks of a layout."""
        if len(ranks) < 2:
            return cls(())
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(layout.device(rank).host, []).append(rank)
        if len(by_host) == 1:
            return cls((_ring(layout, ranks),))
        if len(ranks) > len(by_host):
            over_all = layout.cluster.joining(layout.group(tuple(ranks)))
            if table := _table(over_all, len(ranks)):  # these ranks on these hosts, as they were measured
                shared = over_all.port == "all"
                return cls((_Ring(len(ranks), over_all.latency, over_all.bandwidth, table, shared),))
        within = dict.fromkeys(_ring(layout, group) for group in by_host.values())
        # Between hosts each rank of a host takes its own share of the bytes on: together they are one ring of all.
        leaders, lanes = [group[0] for group in by_host.values()], min(len(group) for group in by_host.values())
        return cls(tuple(within), _ring(layout, leaders, lanes=lanes))

    def all_reduce(self, nbytes: float) -> float:
        """Seconds of a sum of this many bytes, until all ranks have it."""
        return self._seconds(nbytes, passes=2)

    def all_gather(self, nbytes: float) -> float:
        """Seconds until all ranks have what they hold together, this many bytes; to sum up each one's share takes as
        long."""
        return self._seconds(nbytes, passes=1)

    def broadcast(self, nbytes: float) -> float:
        """Seconds until all ranks have this many bytes of one of them: between the hosts first, then within each."""
        within = max((ring.handed_on(nbytes) for ring in self.within), default=0.0)
        return within if self.between is None else within + self.between.handed_on(nbytes)

    def _seconds(self, nbytes: float, passes: int) -> float:
        within = max((ring.seconds(nbytes, passes) for ring in self.within), default=0.0)
        return within if self.between is None else within + self.between.seconds(nbytes, passes)


def _ring(layout: Placement, ranks: Sequence[int], *, lanes: int = 1) -> _Ring:
    n = len(ranks)
    if n < 2:
        return _Ring(n, 0.0, 1.0, ())
    link = layout.cluster.joining(layout.group(tuple(ranks)))
    return _Ring(n, link.latency, _port(layout, link, ranks, lanes), _table(link, n), shared=link.port == "all")


def _table(link: Link, ranks: int) -> tuple[tuple[float, float], ...]:
    return tuple((m.nbytes, m.seconds) for m in link.measured if m.what == "all_reduce" and m.ranks == ranks)


def _port(layout: Placement, link: Link, ranks: Sequence[int], lanes: int) -> float:
    """Bytes a second that each rank of a ring has for itself."""
    if link.port == "all":
        return link.bandwidth / len(ranks)
    if link.port == "host":
        most = max(Counter(layout.device(r).host for r in ranks).values())
        return link.bandwidth / most
    return link.bandwidth * lanes
