"""The same machines with one thing changed: faster links, one host or GPU more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from apportion.cost_model.cluster import Cluster, Device, Link

ASSUMED = {"latency": 5e-5, "bandwidth": 1.25e9}
"""The latency in seconds and the bandwidth in bytes a second of the Ethernet that is assumed between hosts where there
is only one: 10 Gb/s."""


def with_bandwidth(cluster: Cluster, kind: str, factor: float) -> Cluster:
    """Return the cluster with the bandwidth of its links of that kind times ``factor``; the time of a message of no
    length stays."""
    return replace(cluster, links=tuple(_scaled(x, factor) if x.kind == kind else x for x in cluster.links))


def _scaled(link: Link, factor: float) -> Link:
    measured = tuple(
        replace(m, seconds=least + (m.seconds - least) / factor)
        for m in link.measured
        for least in [min(m.seconds, link.latency)]
    )
    return replace(link, bandwidth=link.bandwidth * factor, measured=measured)


def one_host(cluster: Cluster) -> Cluster:
    """Return the first of the cluster's hosts, alone."""
    devices = tuple(d for d in cluster.devices if d.host == cluster.hosts[0])
    names = {d.name for d in devices}
    links = tuple(
        replace(link, devices=tuple(n for n in link.devices if n in names))
        for link in cluster.links
        if names & {*link.devices}
    )
    return replace(cluster, devices=devices, links=links)


def one_host_more(cluster: Cluster, across: Link | None = None) -> Cluster:
    """Return the cluster with a copy of its last host. ``across``: the link that joins the hosts, where the cluster has
    only one; None: Ethernet as ``ASSUMED``."""
    last = [d for d in cluster.devices if d.host == cluster.hosts[-1]]
    host = _unused(f"{cluster.hosts[-1]}+", cluster.hosts)
    twin = {d.name: f"{host}/{d.name.rpartition('/')[2]}" for d in last}
    devices = (*cluster.devices, *(replace(d, name=twin[d.name], host=host) for d in last))
    links = list[Link]()
    for link in cluster.links:
        inside = {*link.devices} <= twin.keys()
        if inside:
            links += [link, replace(link, devices=tuple(twin[n] for n in link.devices))]
        else:
            joined = (*link.devices, *(twin[n] for n in link.devices if n in twin))
            links.append(replace(_of_as_many(link, cluster), devices=joined))
    if len(cluster.hosts) == 1:
        links.append(_across(across, [d.name for d in devices]))
    return replace(cluster, devices=devices, links=tuple(links), measured=False)


def _of_as_many(link: Link, cluster: Cluster) -> Link:
    """Return the link without measured sums over more ranks than it joins hosts: on more hosts as many ranks are placed
    differently, and take another time."""
    hosts = len({cluster.device(name).host for name in link.devices})
    return replace(link, measured=tuple(m for m in link.measured if m.what == "message" or m.ranks <= hosts))


def across_hosts(cluster: Cluster) -> Link | None:
    """Return the fastest link that joins devices of different hosts; None where there is none."""
    host = {d.name: d.host for d in cluster.devices}
    joining = [link for link in cluster.links if len({host[n] for n in link.devices}) > 1]
    return max(joining, key=lambda link: link.bandwidth, default=None)


def of_hosts(cluster: Cluster, hosts: int) -> Cluster:
    """Return a cluster of ``hosts`` hosts like the first one of this cluster, joined as its hosts are."""
    grown, across = one_host(cluster), across_hosts(cluster)
    if across is not None:  # it joined the hosts, and joins one alone no more
        grown = replace(grown, links=tuple(link for link in grown.links if link.kind != across.kind))
        across = _of_as_many(across, cluster)
    for _ in range(hosts - 1):
        grown = one_host_more(grown, across)
    return grown


def one_gpu_more(cluster: Cluster) -> Cluster | None:
    """Return the cluster with a copy of the last GPU of its only host; None where there are several hosts, or no
    GPU."""
    gpus = [d for d in cluster.devices if d.kind == "cuda"]
    if len(cluster.hosts) > 1 or not gpus:
        return None
    last: Device = gpus[-1]
    name = _unused(last.name + "+", (d.name for d in cluster.devices))
    links = tuple(
        replace(link, devices=(*link.devices, name)) if last.name in link.devices else link for link in cluster.links
    )
    return replace(cluster, devices=(*cluster.devices, replace(last, name=name)), links=links)


def _across(link: Link | None, devices: Iterable[str]) -> Link:
    if link is not None:
        return replace(link, devices=tuple(devices))
    return Link(kind="ethernet", devices=tuple(devices), port="host", **ASSUMED)  # type: ignore[arg-type]


def _unused(name: str, known: Iterable[str]) -> str:
    taken = set(known)
    while name in taken:
        name += "+"
    return name
