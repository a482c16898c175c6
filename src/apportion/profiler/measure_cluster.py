"""Measurements of this machine, by workers as training starts them: the rates that each of them reaches while all of
them compute, and how fast they communicate.

::

    1 worker  x all threads   products | memory |                                      | products | ...
    1 worker  x 1 thread                         products | memory | calls |           |
    k workers x 1 thread                                                    products | memory | sums | messages |

One layout is awake at a time and the others sleep; they take turns for several rounds, so that a moment in which the
machine is busy with something else spoils one value of each and not one number wholly (see ``samples``).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from apportion.core.json_data import cache_folder, keep
from apportion.cost_model.cluster import Cluster, Device, Link, Rate, layouts
from apportion.process import usable_cores
from apportion.profiler.cluster_worker import BenchmarkJob
from apportion.profiler.discover import cpu_model, discover, memory_bytes, numa_nodes
from apportion.profiler.samples import Rounds, measured_link, slowest, spread, typical, whose
from apportion.runtime.launch.local import Local
from apportion.runtime.supervisor.worker_pool import WorkerPool

SECONDS = 15.0
"""The seconds of measuring; starting the workers takes time in addition."""
ROUNDS = 5
AT_ONCE_BYTES = 1 << 20
_ANSWER_SECONDS = 300.0


def measure(*, remeasure: bool = False, seconds: float = SECONDS, cache: Path | None = None) -> Cluster:
    """Measure this machine's devices and links and their rates; taken from the cache where the same machine was
    measured before, for ``seconds`` or longer. ``remeasure``: measure again all the same. ``cache``: a folder,
    instead of ``~/.cache/apportion/clusters``.

    It is real work for about ``seconds``: nothing else should run meanwhile. An interruption leaves nothing behind.
    Raises ValueError where ``seconds`` is not positive.
    """
    if seconds <= 0.0:
        raise ValueError(f"seconds={seconds} must be positive: something has to be timed")
    if not remeasure and (found := read_cached(seconds, cache)) is not None:
        return found
    nominal = discover()
    with _awaiting(places(nominal)) as pools:
        findings = _rounds(pools, seconds)
    cluster = _cluster(nominal, findings)
    write_cached(cluster, seconds, cache)
    return cluster


@dataclass(frozen=True)
class BenchmarkPlace:
    """A layout of workers on this machine."""

    kind: Literal["cpu", "cuda"]
    workers: int
    threads: int


def places(cluster: Cluster) -> list[BenchmarkPlace]:
    """Return all layouts that a plan may propose on a cluster of one host."""
    found = [BenchmarkPlace(layout.device(0).kind, layout.ranks, layout.threads) for layout in layouts(cluster)]
    return list(dict.fromkeys(found))


@contextmanager
def _awaiting(chosen: list[BenchmarkPlace]) -> Iterator[dict[BenchmarkPlace, WorkerPool]]:
    """Start the workers of each layout; they sleep until they are asked."""
    pools: dict[BenchmarkPlace, WorkerPool] = {}
    try:
        for place in chosen:
            launcher = Local(workers=place.workers, threads=place.threads, device=place.kind)
            job = BenchmarkJob(threads=place.threads, device=place.kind)
            pools[place] = WorkerPool(launcher, "apportion.profiler.cluster_worker:main", job, place.workers)
            pools[place].answers("ready", _ANSWER_SECONDS)
        yield pools
    finally:
        for pool in pools.values():
            pool.close()


class Findings:
    """The samples of each thing at each layout, round by round; where several ranks have samples, one run after the
    other."""

    def __init__(self) -> None:
        self.rounds: dict[tuple[Any, ...], list[list[float]]] = defaultdict(list)

    def add(self, samples: list[float], *key: Any) -> None:
        """Add the samples of one round."""
        self.rounds[key].append(samples)

    def tables(self, *key: Any) -> dict[int, Rounds]:
        """Return what was found under this key, by the number of bytes."""
        return {found[-1]: rounds for found, rounds in self.rounds.items() if found[:-1] == key}


def _rounds(pools: dict[BenchmarkPlace, WorkerPool], seconds: float) -> Findings:
    findings = Findings()
    several = sum(place.workers > 1 for place in pools)
    # Half of the time for what is computed, half for what is sent.
    computing, sending = seconds / (1 + (several > 0)) / ROUNDS / len(pools), seconds / 2 / ROUNDS / max(1, several)
    end = time.monotonic() + 2 * seconds
    for done in range(ROUNDS):
        if done and time.monotonic() > end:  # fewer, where one sample takes longer than all was to take
            break
        for place, pool in pools.items():
            _compute(findings, place, pool, computing)
            if place.workers > 1:
                _send(findings, place, pool, sending)
    return findings


def _ask(pool: WorkerPool, what: str, **how: Any) -> list[Any]:
    answers = pool.ask({"kind": "gauge", "what": what, "how": how}, "gauged", _ANSWER_SECONDS)
    return [answer["found"] for answer in answers]


def _compute(findings: Findings, place: BenchmarkPlace, pool: WorkerPool, seconds: float) -> None:
    for what in ("products", "memory"):
        runs = _ask(pool, what, seconds=seconds * 0.45)
        findings.add([sample for run in runs for sample in run], what, place)
        if what == "products":
            for run in runs:
                findings.add(run, "runs", place)
    if place.workers == 1:
        findings.add(_ask(pool, "calls", seconds=seconds * 0.1)[0], "calls", place)


def _send(findings: Findings, place: BenchmarkPlace, pool: WorkerPool, seconds: float) -> None:
    for ranks in zip(*_ask(pool, "all_reduces", seconds=seconds * 0.5), strict=True):
        findings.add(slowest([samples for _, samples in ranks]), "all_reduce", place, ranks[0][0])
    for nbytes, samples in _ask(pool, "all_messages", seconds=seconds * 0.25, pairs=[[0, 1]])[0]:
        findings.add(samples, "message", place, nbytes)
    pairs = [[a, a + 1] for a in range(0, place.workers - 1, 2)]
    how = {"nbytes": AT_ONCE_BYTES, "seconds": seconds * 0.05}
    findings.add(_ask(pool, "messages", pairs=[[0, 1]], **how)[0], "alone", place)
    findings.add(slowest(_ask(pool, "messages", pairs=pairs, both=len(pairs) == 1, **how)), "at once", place)
    for runs in _ask(pool, "overlap", seconds=seconds * 0.15):
        findings.rounds["overlap", place] += runs


# What they come to


def _cluster(nominal: Cluster, findings: Findings) -> Cluster:
    return replace(
        nominal,
        devices=tuple(_device(device, findings) for device in nominal.devices),
        links=tuple(_link(nominal, link, findings) for link in nominal.links),
        measured=True,
    )


def _device(device: Device, findings: Findings) -> Device:
    own = [key[1] for key in findings.rounds if key[0] == "products" and key[1].kind == device.kind]
    widest = max(own, key=lambda place: place.workers)
    rates = [
        Rate(
            threads=place.threads,
            together=place.workers if device.kind == "cpu" else 1,
            flops=typical(findings.rounds["products", place]),
            bytes_per_second=typical(findings.rounds["memory", place]),
        )
        for place in (own if device.kind == "cpu" else [widest])  # a GPU has one worker, however many GPUs compute
    ]
    calls = [typical(findings.rounds["calls", place]) for place in own if ("calls", place) in findings.rounds]
    return replace(
        device,
        rates=tuple(rates),
        call_seconds=min(calls),
        spread=spread(findings.rounds["runs", widest]),
    )


def _link(nominal: Cluster, link: Link, findings: Findings) -> Link:
    """Return a link between the devices of workers, as it was measured; another one as it is."""
    kinds = {nominal.device(name).kind for name in link.devices}
    places = [key[1] for key in findings.rounds if key[0] == "at once" and {key[1].kind} == kinds]
    if not places:
        return link
    few, most = min(places, key=lambda p: p.workers), max(places, key=lambda p: p.workers)
    messages = findings.tables("message", few)
    alone = typical(findings.rounds["alone", most])
    port = whose(alone, typical(findings.rounds["at once", most]), max(2, most.workers // 2))
    reduced = {place.workers: findings.tables("all_reduce", place) for place in places}
    return measured_link(replace(link, port=port), messages, reduced, findings.rounds["overlap", most])


# A cache of clusters as they were measured, kept by what distinguishes one machine from another.


FORMAT = 1
"""The version of the format, which is raised where what is measured, or how, has changed."""


def fingerprint() -> dict[str, Any]:
    """Describe what the numbers depend on: the processor, how many of its cores, how they lie, torch, the GPUs."""
    gpus = range(torch.cuda.device_count())
    return {
        "format": FORMAT,
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "cores": usable_cores(),
        "nodes": [len(node) for node in numa_nodes()],
        "memory_gib": round(memory_bytes() / 2**30),
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
    }


def read_cached(seconds: float, where: Path | None = None) -> Cluster | None:
    """Read this machine as it was measured before, for ``seconds`` or longer; None where it was not, or what was
    kept cannot be read."""
    made_of = fingerprint()
    try:
        data = json.loads(_path(made_of, where).read_text())
        if data["fingerprint"] != made_of or data["seconds"] < seconds:
            return None
        return Cluster.from_json(data["cluster"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_cached(cluster: Cluster, seconds: float, where: Path | None = None) -> None:
    """Keep the cluster; where it cannot be written, the machine is measured again the next time."""
    made_of = fingerprint()
    data = {"fingerprint": made_of, "seconds": seconds, "cluster": cluster.to_json()}
    keep(_path(made_of, where), data)


def _path(made_of: dict[str, Any], where: Path | None) -> Path:
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    return (where or cache_folder("clusters")) / f"{digest[:16]}.json"
