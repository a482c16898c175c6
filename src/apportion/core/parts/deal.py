"""Which parts of the data set a rank has: they are dealt to hosts first, and then to the ranks of each host."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from apportion.comm.group import collective
from apportion.comm.world import World
from apportion.core.sampling.sampler import DataShard


def deal_parts(parts: int, hosts: Sequence[int]) -> list[DataShard]:
    """The share of each rank. ``hosts``: the number of every rank's host, by rank.

    A host has consecutive parts, about in proportion to its ranks, and one at least. Where it has as many as ranks or
    more, each rank has some of them for itself; where it has fewer, several ranks have one part and share its rows.
    Raises ValueError where there are fewer parts than hosts.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    if parts < len(ranks_of):
        raise ValueError(
            f"parts={parts} cannot be dealt to {len(ranks_of)} hosts: each opens one at least, and none opens "
            f"another's; make parts>={len(ranks_of)}, or use {parts} host{'s' if parts > 1 else ''}"
        )
    dealt: dict[int, DataShard] = {}
    first = 0
    for ranks, many in zip(ranks_of.values(), _parts_of_hosts(parts, [*map(len, ranks_of.values())]), strict=True):
        dealt |= dict(zip(ranks, _shares(first, many, len(ranks)), strict=True))
        first += many
    return [dealt[rank] for rank in range(len(hosts))]


@collective
def share_of(parts: int, world: World, *, in_order: bool) -> DataShard:
    """This rank's share. Called by all ranks. Raises ValueError where there are fewer parts than hosts, or, with
    ``in_order``, where the rows of the ranks do not lie in each batch in the order of the ranks."""
    shares = deal_parts(parts, world.hosts())
    if in_order and not are_in_order(shares):
        raise ValueError(
            "count=None gathers the outputs of all ranks in their order, and the hosts of these ranks take turns, so "
            f"that the {parts} parts are in another: number the ranks host by host"
        )
    return shares[world.rank]


def are_in_order(shares: Sequence[DataShard]) -> bool:
    """Tells whether the rows of the ranks lie in each batch in the order of the ranks."""
    places = [(share.parts or (0, 0), share.index) for share in shares]
    return places == sorted(places)


def _parts_of_hosts(parts: int, ranks: Sequence[int]) -> list[int]:
    """The number of parts of each host: one, and the rest by the method of Webster."""
    many = [1] * len(ranks)
    places = [(3 / size, host) for host, size in enumerate(ranks)]
    heapq.heapify(places)
    for _ in range(parts - len(ranks)):
        host = places[0][1]
        many[host] += 1
        heapq.heapreplace(places, ((2 * many[host] + 1) / ranks[host], host))
    return many


def _shares(first: int, parts: int, ranks: int) -> list[DataShard]:
    """The shares of the ranks of one host in its parts, which begin at ``first``."""
    if parts >= ranks:
        own = [DataShard(rank, ranks).rows(parts) for rank in range(ranks)]
        return [DataShard(parts=(first + rows.start, first + rows.stop)) for rows in own]
    sharers = [DataShard(part, parts).rows(ranks) for part in range(parts)]
    return [
        DataShard(place, these.stop - these.start, parts=(first + part, first + part + 1))
        for part, these in enumerate(sharers)
        for place in range(these.stop - these.start)
    ]
