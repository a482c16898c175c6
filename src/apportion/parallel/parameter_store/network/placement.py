"""Which ranks are servers, where the ranks run on several hosts."""

from __future__ import annotations

from collections.abc import Sequence


def server_ranks(hosts: Sequence[int], servers: int) -> list[int]:
    """Return the ranks of the servers, in the order of their ranges: the last rank of the last host, the last rank of
    the host before it, and so on round the hosts, each time the last that is none yet; rank 0 always works. ``hosts``:
    the host of every rank. ValueError where no worker would be left."""
    if servers >= len(hosts):
        raise ValueError(f"servers={servers} leaves no worker among {len(hosts)} processes: start more")
    free = {host: [rank for rank, of in enumerate(hosts) if of == host and rank != 0] for host in set(hosts)}
    found: list[int] = []
    while len(found) < servers:
        for host in sorted(free, reverse=True):
            if free[host] and len(found) < servers:
                found.append(free[host].pop())
    return sorted(found)


def must_have_servers(what: object, servers: int, world_size: int) -> None:
    """Raise ValueError where ranks of several hosts are to share a store and none of them is a server."""
    if not servers:
        raise ValueError(
            f"{what} keeps its weights in memory that all of its workers share, and these {world_size} ranks run on "
            "several hosts: give parameter_server(servers=1), and one of the ranks holds the shards for the others, "
            "or servers=2 for two"
        )
