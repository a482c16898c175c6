"""The placement of ranks on devices, with the number of threads of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from apportion.cost_model.cluster import Cluster, Device


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
