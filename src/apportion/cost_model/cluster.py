"""Machines as plain data: devices with what they compute, links with what they carry. A file of JSON says the same, so
that a person can plan for machines that are elsewhere."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from apportion.cost_model.json_file import JsonFile

Port = Literal["device", "host", "all"]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The rate that one of ``together`` workers of ``threads`` threads each reaches while all of them compute."""

    threads: int
    together: int
    flops: float
    """The floating-point operations a second of float32 matrix products that are large enough to be at their best."""
    bytes_per_second: float
    """The bytes of memory that are read and written a second, in all."""

    def __post_init__(self) -> None:
        if min(self.threads, self.together) < 1 or min(self.flops, self.bytes_per_second) <= 0:
            raise ValueError(
                f"a rate of threads={self.threads}, together={self.together}, flops={self.flops}, "
                f"bytes_per_second={self.bytes_per_second}: at least one thread of one worker reaches more than nothing"
            )


@dataclass(frozen=True, kw_only=True)
class Device:
    """A host's cores, or a GPU."""

    name: str
    """The name of the device, unique in its cluster: ``"a/cpu"``, ``"a/gpu0"``."""
    host: str
    kind: Literal["cpu", "cuda"]
    model: str
    """The make of the device: times that were measured on one device hold on another of the same make."""
    memory_bytes: int
    rates: tuple[Rate, ...]
    cores: int = 1
    """The number of threads that run at once. A GPU has one: it takes one worker."""
    call_seconds: float = 1e-5
    """The seconds to begin one operation, however small."""
    spread: float = 0.03
    """The standard deviation of a step's time, as a share of its mean."""

    def __post_init__(self) -> None:
        if not self.rates:
            raise ValueError(f"device {self.name}: it needs at least one rate")
        if self.cores < 1 or self.memory_bytes < 1 or min(self.call_seconds, self.spread) < 0:
            raise ValueError(
                f"device {self.name}: cores={self.cores}, memory_bytes={self.memory_bytes}, call_seconds="
                f"{self.call_seconds}, spread={self.spread}: it has a core and memory, and no time is negative"
            )

    @cached_property
    def _known(self) -> dict[tuple[int, int], Rate]:
        return {(r.threads, r.together): r for r in self.rates}

    def rate(self, threads: int = 1, together: int = 1) -> Rate:
        """The rate as it was measured, or worked out from the nearest that was: threads of all workers share the
        device."""
        known = self._known.get((threads, together))
        if known is not None:
            return known
        wanted = threads * together

        def far(rate: Rate) -> tuple[float, ...]:
            all_threads = rate.threads * rate.together
            return abs(all_threads - wanted) / wanted, abs(rate.together - together), rate.threads

        near = min(self.rates, key=far)
        both = near.threads * near.together
        # Below what was measured each thread keeps its share; above it nothing is left to give.
        whole = min(1.0, wanted / both) / together
        return Rate(
            threads=threads,
            together=together,
            flops=near.flops * near.together * whole,
            bytes_per_second=near.bytes_per_second * near.together * whole,
        )


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One collective or message, as it was measured."""

    what: Literal["all_reduce", "message"]
    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link that joins some devices, each with every other."""

    kind: str
    """The kind of link, for people: ``memory``, ``nvlink``, ``pcie``, ``ethernet``, ``infiniband``."""
    devices: tuple[str, ...]
    latency: float
    """The seconds of a message of no length."""
    bandwidth: float
    """The bytes a second of one transfer in one direction that has the link to itself."""
    port: Port = "device"
    """The owner of this bandwidth: each device, each host (a network card), or all transfers together (the memory of a
    host)."""
    hidden: float = 1.0
    """The share of a transfer that can go on while its devices compute."""
    slowdown: float = 0.0
    """The share by which computing takes longer while a transfer goes on: 0.3 is 30 %."""
    measured: tuple[Moved, ...] = ()
    """The raw table, which counts more than latency and bandwidth where it has an entry."""

    def __post_init__(self) -> None:
        if len(self.devices) < 1 or self.bandwidth <= 0 or self.latency < 0:
            raise ValueError(
                f"link {self.kind}: devices={self.devices}, latency={self.latency}, bandwidth={self.bandwidth}: it "
                "joins at least one device, its bandwidth is positive and its latency not negative"
            )
        if not 0 <= self.hidden <= 1 or self.slowdown < 0:
            raise ValueError(
                f"link {self.kind}: hidden={self.hidden}, slowdown={self.slowdown}: the first is a share, from 0 to 1, "
                "the second not negative"
            )


@dataclass(frozen=True, kw_only=True)
class Cluster(JsonFile):
    """Devices and the links between them."""

    name: str
    """The name that a plan shows for it."""
    devices: tuple[Device, ...]
    """The devices, each under a name of its own."""
    links: tuple[Link, ...] = ()
    """The links between devices; devices without one do not communicate."""
    measured: bool = False
    """Was the cluster measured here, by ``measure``? Otherwise its numbers are from elsewhere."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError(f"cluster {self.name}: it needs at least one device")
        if len(self._by_name) != len(self.devices):
            raise ValueError(f"cluster {self.name}: two devices have the same name")
        for link in self.links:
            if unknown := sorted(set(link.devices) - self._by_name.keys()):
                raise ValueError(f"cluster {self.name}: its {link.kind} link joins {unknown[0]}, an unknown device")

    @cached_property
    def _by_name(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _joining(self) -> dict[tuple[str, str], Link]:
        return {}

    @cached_property
    def _joining_all(self) -> dict[tuple[str, ...], Link]:
        return {}

    def device(self, name: str) -> Device:
        """The device with this name."""
        return self._by_name[name]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts, in the order of the devices."""
        return tuple(dict.fromkeys(device.host for device in self.devices))

    def link(self, a: str, b: str) -> Link:
        """The fastest link that joins these two devices; within a host the links that do not lead out of it come
        first."""
        found = self._joining.get((a, b))
        if found is None:
            joining = [link for link in self.links if a in link.devices and b in link.devices]
            if not joining:
                raise ValueError(f"cluster {self.name}: no link joins {a} and {b}; add one to its links")
            home = {device.name for device in self.devices if device.host == self.device(a).host}
            found = max(joining, key=lambda link: (home.issuperset(link.devices), link.bandwidth))
            self._joining[a, b] = found
        return found

    def joining(self, devices: Iterable[str]) -> Link:
        """The slowest of the links that these devices need to reach each other."""
        names = tuple(dict.fromkeys(devices))
        if len(names) == 1:
            return self.link(names[0], names[0])
        found = self._joining_all.get(names)
        if found is None:
            pairs = (self.link(a, b) for a, b in itertools.pairwise(names))
            found = self._joining_all[names] = min(pairs, key=lambda link: link.bandwidth)
        return found


# The placement of ranks on devices, with the number of threads of each.


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Ranks on the devices of a cluster. Ranks that follow each other are near each other: ranks that talk most are
    given neighbouring numbers."""

    cluster: Cluster
    devices: tuple[str, ...]
    """The name of each rank's device."""
    threads: int = 1
    """The number of threads of each rank."""
    beside: tuple[str, ...] = ()
    """The devices of further ranks, which compute meanwhile and have no part in this: those of other replicas."""

    def __post_init__(self) -> None:
        for name, ranks in self._together.items():
            device = self.cluster.device(name)
            if ranks * self.threads > device.cores:
                raise ValueError(
                    f"{ranks} workers of {self.threads} threads on the {device.cores} cores of {name}: never more "
                    f"threads than cores; use threads<={max(1, device.cores // ranks)}"
                )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @cached_property
    def _together(self) -> Counter[str]:
        return Counter((*self.devices, *self.beside))

    def device(self, rank: int) -> Device:
        """The device that a rank is on."""
        return self.cluster.device(self.devices[rank])

    def together(self, rank: int) -> int:
        """The number of ranks that compute on this rank's device, itself among them."""
        return self._together[self.devices[rank]]

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that have ranks, in order."""
        return tuple(dict.fromkeys(self.device(r).host for r in range(self.ranks)))

    def group(self, ranks: range | tuple[int, ...]) -> tuple[str, ...]:
        """The names of the devices of some ranks."""
        return tuple(self.devices[r] for r in ranks)

    def part(self, ranks: range | tuple[int, ...]) -> Placement:
        """The placement of some of the ranks, while the others compute beside them."""
        others = tuple(name for rank, name in enumerate(self.devices) if rank not in ranks)
        return Placement(
            cluster=self.cluster, devices=self.group(ranks), threads=self.threads, beside=(*self.beside, *others)
        )

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """One rank of each kind of place: ranks of the same kind take the same time for the same work."""
        seen: dict[tuple[str, int, int], int] = {}
        for rank in range(self.ranks):
            device = self.device(rank)
            seen.setdefault((device.model, device.cores, self.together(rank)), rank)
        return tuple(seen.values())


def layouts(cluster: Cluster, *, most: int = 64, on_cores: bool = False) -> Iterator[Placement]:
    """The placements that are worth a look: on one device with all its threads and with one; on all devices of a host,
    of some hosts and of all, with workers and threads shared out in powers of two. Threads are never more than
    cores. ``on_cores``: of machines with GPUs also the placements of several workers on their cores."""
    seen = set()
    for devices, threads in _choices(cluster, most, on_cores):
        key = devices, threads
        if key not in seen:
            seen.add(key)
            yield Placement(cluster=cluster, devices=devices, threads=threads)


def _choices(cluster: Cluster, most: int, on_cores: bool) -> Iterator[tuple[tuple[str, ...], int]]:
    for kind in dict.fromkeys((d.model, d.cores) for d in cluster.devices):
        alone = next(d for d in cluster.devices if (d.model, d.cores) == kind)
        yield (alone.name,), alone.cores
        yield (alone.name,), 1
    for usable in devices_for_workers(cluster, on_cores):
        hosts = list(dict.fromkeys(d.host for d in usable))
        for many in _powers(len(hosts)):
            within = [d for d in usable if d.host in hosts[:many]]
            if usable[0].kind == "cuda":
                here = [[d for d in within if d.host == host] for host in hosts[:many]]
                for each in _powers(min(len(g) for g in here)):
                    names = tuple(d.name for group in here for d in group[:each])
                    if 1 < len(names) <= most:
                        yield names, 1
            else:
                for each in _powers(min(d.cores for d in within)):
                    names = tuple(d.name for d in within for _ in range(each))
                    if 1 < len(names) <= most:
                        yield names, min(d.cores for d in within) // each


def devices_for_workers(cluster: Cluster, on_cores: bool = False) -> list[list[Device]]:
    """The devices that workers are put on, of each kind: the GPUs where there are any, else the cores; ``on_cores``:
    the GPUs, and then the cores."""
    gpus = [d for d in cluster.devices if d.kind == "cuda"]
    cores = [d for d in cluster.devices if d.kind == "cpu"]
    return [gpus or cores, *([cores] if on_cores and gpus and cores else [])]


def _powers(most: int) -> list[int]:
    """The powers of two below a number, and the number itself."""
    found, n = [], 1
    while n < most:
        found.append(n)
        n *= 2
    return [*found, most]
