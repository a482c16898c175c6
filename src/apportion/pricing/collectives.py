"""How long messages and collectives take between devices: measured where they were, else by latency and bandwidth.

Over one link with n ranks a ring passes ``2 (n - 1) / n`` of the bytes through each rank's port in ``2 (n - 1)``
messages (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009); over
several hosts each reduces within itself first, and one ring goes through the hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from apportion.cluster import Link
from apportion.pricing.layout import Layout
from apportion.profile import interpolated


def message(layout: Layout, a: int, b: int, nbytes: float, *, at_once: int = 1) -> float:
    """From one rank to another, while so many such messages go at once over the same port."""
    if a == b or nbytes <= 0:
        return 0.0
    link = layout.cluster.link(layout.devices[a], layout.devices[b])
    table = [(m.nbytes, m.seconds) for m in link.measured if m.what == "message"]
    if table and at_once == 1:
        return max(link.latency, interpolated(table, nbytes))
    return link.latency + nbytes / link.bandwidth * at_once


def all_reduce(layout: Layout, ranks: Sequence[int], nbytes: float) -> float:
    """The sum over ranks, on all of them."""
    return _collective(layout, ranks, nbytes, passes=2)


def all_gather(layout: Layout, ranks: Sequence[int], nbytes: float) -> float:
    """What all ranks together hold (``nbytes`` in all), on all of them."""
    return _collective(layout, ranks, nbytes, passes=1)


def reduce_scatter(layout: Layout, ranks: Sequence[int], nbytes: float) -> float:
    """Of the sum of ``nbytes`` over ranks, each one's share."""
    return _collective(layout, ranks, nbytes, passes=1)


def broadcast(layout: Layout, ranks: Sequence[int], nbytes: float) -> float:
    """From one to all, handed on in pieces."""
    return _collective(layout, ranks, nbytes, passes=1)


def _collective(layout: Layout, ranks: Sequence[int], nbytes: float, *, passes: int) -> float:
    if len(ranks) < 2:
        return 0.0
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(layout.device(rank).host, []).append(rank)
    if len(by_host) == 1:
        return _ring(layout, ranks, nbytes, passes)
    over_all = layout.cluster.joining(layout.group(tuple(ranks))).measured if len(ranks) > len(by_host) else ()
    table = [(m.nbytes, m.seconds) for m in over_all if m.what == "all_reduce" and m.ranks == len(ranks)]
    if table:  # these ranks on these hosts, as they were measured
        return interpolated(table, nbytes) * passes / 2
    sizes = Counter(len(group) for group in by_host.values())
    within = max(_ring(layout, group, nbytes, passes) for group in by_host.values())
    # Between hosts each rank of a host takes its own share of the bytes on: together they are one ring of all of them.
    leaders = [group[0] for group in by_host.values()]
    between = _ring(layout, leaders, nbytes, passes, lanes=min(sizes))
    return within + between


def _ring(layout: Layout, ranks: Sequence[int], nbytes: float, passes: int, *, lanes: int = 1) -> float:
    n = len(ranks)
    if n < 2:
        return 0.0
    link = layout.cluster.joining(layout.group(tuple(ranks)))
    table = [(m.nbytes, m.seconds) for m in link.measured if m.what == "all_reduce" and m.ranks == n]
    if table:
        return interpolated(table, nbytes) * passes / 2
    moved = passes * (n - 1) / n * nbytes
    return passes * (n - 1) * link.latency + moved / _port(layout, link, ranks, lanes)


def _port(layout: Layout, link: Link, ranks: Sequence[int], lanes: int) -> float:
    """Bytes a second that each rank of a ring has for itself."""
    if link.port == "all":
        return link.bandwidth / len(ranks)
    if link.port == "host":
        most = max(Counter(layout.device(r).host for r in ranks).values())
        return link.bandwidth / most
    return link.bandwidth * lanes
