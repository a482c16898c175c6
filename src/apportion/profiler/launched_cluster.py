"""The machines that ranks are running on already (torchrun, Slurm, MPI), measured by those ranks.

::

    host a   rank 0  rank 1 \\                    rates of the ranks of a host, all at once and one alone
                             link between hosts   sums over all ranks; over one rank of each host; messages of pairs
    host b   rank 2  rank 3 /                     and the same within each host

Sizes grow as far as the time allows, so that a slow link is measured with what it can carry.
"""

from __future__ import annotations

import itertools
import socket
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch

from apportion.comm.group import broadcast_message, collective, gather_messages
from apportion.comm.network.launched_ranks import hosts
from apportion.comm.world import World
from apportion.cost_model.cluster import Cluster, Device, Link, Rate
from apportion.profiler.cluster_worker import HardwareBenchmark
from apportion.profiler.discover import discover
from apportion.profiler.samples import Table, line, measured_link, slowest, spread, sums, typical

SECONDS = 20.0
ROUNDS = 3
PAIRS = 28
"""The largest number of pairs of hosts that are all measured: those of 8 hosts. Of more hosts, each is measured with
the next."""
ALIKE = 1.5
"""The factor between bandwidths up to which links are treated as one."""

Found = dict[str, Any]
"""The findings that a rank reports: plain JSON."""


@collective
def measure_here(world: World, *, seconds: float = SECONDS) -> Cluster:
    """Measure the devices of all ranks of the world, and the links within and between their hosts, in about
    ``seconds``. All ranks call it, and each returns the same cluster."""
    if seconds <= 0.0:
        raise ValueError(f"seconds={seconds} must be positive: something has to be timed")
    group, device = world.group(), world.device
    places = gather_messages([socket.gethostname(), world.local_rank, world.local_size], group, device=device)
    host_of = hosts([(str(name), int(rank), int(size)) for name, rank, size in places])
    here = [[rank for rank, host in enumerate(host_of) if host == own] for own in range(1 + max(host_of))]
    found = _measured(world, here, seconds)
    everyone = gather_messages({"host": places[world.rank][0], **found}, group, device=device)
    cluster = _cluster(everyone, here).to_json() if world.rank == 0 else None
    return Cluster.from_json(broadcast_message(cluster, group, device=device))


def _measured(world: World, here: list[list[int]], seconds: float) -> Found:
    """Return what this rank measures, together with the others."""
    leaders = [ranks[0] for ranks in here]
    own = next(ranks for ranks in here if world.rank in ranks)
    within = HardwareBenchmark(world.split("measure.host", here))
    among = HardwareBenchmark(
        world.split("measure.hosts", [leaders, *([r] for r in range(world.size) if r not in leaders)])
    )
    samples: dict[str, list[Any]] = defaultdict(list)
    each = seconds / ROUNDS
    for _ in range(ROUNDS):
        _rates(samples, within, own, each / 3)
        if len(own) > 1:
            pair = [own.index(own[0]), own.index(own[1])]
            _link_samples(samples, "host", within, [pair], each / 3 if len(here) > 1 else each * 2 / 3)
        world.group().barrier()
        if len(here) > 1:
            if world.rank in leaders:
                _link_samples(samples, "hosts", among, _pairs(len(leaders)), each / 3)
            if len(leaders) < world.size:
                samples["all"].append(HardwareBenchmark(world).all_reduces(each / 6))
        world.group().barrier()
    nominal = discover()
    device = next(d for d in nominal.devices if d.kind == world.device.type)
    return {
        "device": replace(nominal, devices=(device,), links=()).to_json(),
        "index": world.device.index or 0,
        "threads": torch.get_num_threads(),
        "samples": samples,
    }


def _pairs(many: int) -> list[list[int]]:
    every = [list(pair) for pair in itertools.combinations(range(many), 2)]
    return every if len(every) <= PAIRS else [[a, a + 1] for a in range(many - 1)]


def _rates(samples: dict[str, list[Any]], gauge: HardwareBenchmark, own: list[int], seconds: float) -> None:
    """Measure the rates of all of a host's ranks at once; then of one of them by itself with one thread, and with all
    cores."""
    given, cores = torch.get_num_threads(), discover().devices[0].cores
    for name, threads, active in (("all", given, None), ("one", 1, [0]), ("cores", cores, [0])):
        if gauge.device.type == "cuda" and name != "all":
            continue
        torch.set_num_threads(threads)
        try:
            samples[f"products {name}"].append(gauge.products(seconds / 6, active))
            samples[f"memory {name}"].append(gauge.memory(seconds / 8, active))
        finally:
            torch.set_num_threads(given)
    samples["calls"].append(gauge.calls(seconds / 8))


def _link_samples(
    samples: dict[str, list[Any]], name: str, gauge: HardwareBenchmark, pairs: list[list[int]], seconds: float
) -> None:
    samples[name].append(gauge.all_reduces(seconds / 2))
    for a, b in pairs:
        samples[f"{name} {a} {b}"].append(gauge.all_messages(seconds / 3 / len(pairs), [[a, b]]))
    samples[f"{name} overlap"] += gauge.overlap(seconds / 3)


# What they come to: by the first rank


def _cluster(everyone: list[Found], here: list[list[int]]) -> Cluster:
    names = _names([everyone[ranks[0]]["host"] for ranks in here])
    devices: dict[str, Device] = {}
    links = []
    for host, ranks in zip(names, here, strict=True):
        own = [_device(everyone, host, ranks, rank) for rank in ranks]
        devices |= {device.name: device for device in own}
        on = tuple(dict.fromkeys(device.name for device in own))
        if len(ranks) > 1:
            links.append(_joined(everyone, "host", "memory" if own[0].kind == "cpu" else "pcie", on, ranks, (0, 1)))
        elif own[0].kind == "cpu":
            links.append(Link(kind="memory", devices=on, latency=3e-5, bandwidth=4e9, port="all", hidden=0.0))
    if len(here) > 1:
        links += _between(everyone, here, tuple(devices.values()), names)
    return Cluster(name=", ".join(names), devices=tuple(devices.values()), links=tuple(links), measured=True)


def _names(hosts: list[str]) -> list[str]:
    """Return the hosts' own names where these differ, else the names with numbers."""
    return hosts if len(set(hosts)) == len(hosts) else [f"{name}-{at}" for at, name in enumerate(hosts)]


def _device(everyone: list[Found], host: str, ranks: list[int], rank: int) -> Device:
    own = everyone[rank]
    (device,) = Cluster.from_json(own["device"]).devices
    cpu = device.kind == "cpu"
    sharing = ranks if cpu else [rank]
    kinds = [("all", own["threads"] if cpu else 1, len(sharing))]
    kinds += [("one", 1, 1), ("cores", device.cores, 1)] if cpu else []
    rates = {}
    for name, threads, together in kinds:
        who = sharing if name == "all" else ranks[:1]
        flops, memory = (
            typical(
                [[s for other in who for s in everyone[other]["samples"][f"{what} {name}"][at]] for at in range(ROUNDS)]
            )
            for what in ("products", "memory")
        )
        rates[threads, together] = Rate(threads=threads, together=together, flops=flops, bytes_per_second=memory)
    return replace(
        device,
        name=f"{host}/cpu" if cpu else f"{host}/gpu{own['index']}",
        host=host,
        rates=tuple(rates.values()),
        call_seconds=typical(own["samples"]["calls"]),
        spread=spread([run for other in sharing for run in everyone[other]["samples"]["products all"]]),
    )


def _table(everyone: list[Found], name: str, ranks: list[int]) -> Table:
    """Return the table of what these ranks did together, by bytes: each sample takes as long as its slowest rank's."""
    table: dict[int, list[list[float]]] = defaultdict(list)
    for rounds in zip(*(everyone[rank]["samples"][name] for rank in ranks), strict=True):
        for same in zip(*rounds, strict=True):
            table[same[0][0]].append(slowest([samples for _, samples in same]))
    return table


def _joined(
    everyone: list[Found], name: str, kind: str, on: tuple[str, ...], ranks: list[int], pair: tuple[int, int]
) -> Link:
    messages = _table(everyone, f"{name} {pair[0]} {pair[1]}", [ranks[pair[0]]])
    reduced = {len(ranks): _table(everyone, name, ranks)}
    overlapped = [run for rank in ranks for run in everyone[rank]["samples"][f"{name} overlap"]]
    port = "all" if kind == "memory" else "host" if name == "hosts" else "device"
    link = Link(kind=kind, devices=on, latency=0.0, bandwidth=1.0, port=port)  # type: ignore[arg-type]
    return measured_link(link, messages, reduced, overlapped)


def _between(everyone: list[Found], here: list[list[int]], devices: tuple[Device, ...], names: list[str]) -> list[Link]:
    """Return one link where the links of all pairs of hosts are about equally fast, else one for each pair."""
    leaders = [ranks[0] for ranks in here]
    pairs = _pairs(len(leaders))
    speeds = {}
    for a, b in pairs:
        table = _table(everyone, f"hosts {a} {b}", [leaders[a]])
        speeds[a, b] = line({nbytes: typical(rounds) for nbytes, rounds in table.items()})[1]
    middle = sorted(speeds, key=lambda pair: speeds[pair])[len(speeds) // 2]
    whole = _joined(everyone, "hosts", "ethernet", tuple(d.name for d in devices), leaders, middle)
    if len(leaders) < len(everyone):
        over_all = sums(len(everyone), _table(everyone, "all", list(range(len(everyone)))))
        whole = replace(whole, measured=(*whole.measured, *over_all))
    if max(speeds.values()) <= ALIKE * min(speeds.values()):
        return [whole]
    links = []
    for a, b in pairs:
        on = tuple(d.name for d in devices if d.host in (names[a], names[b]))
        own = _joined(everyone, "hosts", "ethernet", on, leaders, (a, b))
        links.append(replace(own, hidden=whole.hidden, slowdown=whole.slowdown))
    return links
