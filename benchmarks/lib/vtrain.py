"""Steps of transformers on one host of eight A100s, measured by the authors of vTrain (Bang et al., "vTrain: A
Simulation Framework for Evaluating Cost-Effective and Compute-Optimal Large Language Model Training", MICRO 2024), and
what apportion predicts for them.

Five numbers of the machine are fitted to some of the steps, beginning at its data sheet: what a GPU computes and moves
a second, how long the host takes to begin an operation, latency and bandwidth of the link.
"""

import csv
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import mean

from published.fit import fitted
from published.mesh import Mesh
from published.transformer import Transformer

from apportion.cost_model.cluster import Cluster, Device, Link, Placement, Rate

VOCABULARY = 51_200
DATA_SHEET = {
    "flops": 312e12,  # float16
    "bytes_per_second": 2.039e12,
    "call_seconds": 20e-6,  # this one no data sheet has: a line or two of Python
    "latency": 10e-6,
    "bandwidth": 300e9,  # in one direction
}
FITTED_ON, DRAWS, TRIED = 100, 20, 3


@dataclass(frozen=True)
class Measured:
    """A row of theirs."""

    workload: tuple[int, ...]
    """GPUs, batch, hidden, heads, blocks, length: what is to be computed, and on how many."""
    mesh: Mesh
    seconds: float


def read(path):
    """All rows of the file."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [_row(*row) for row in list(csv.reader(file))[1:]]


def _row(*row):
    gpus, batch, microbatch, hidden, heads, blocks, length, slices, replicas, stages = map(int, row[:-1])
    transformer = Transformer(hidden=hidden, heads=heads, blocks=blocks, length=length, vocabulary=VOCABULARY)
    mesh = Mesh(
        profile=_profile(transformer, batch),
        slices=slices,
        replicas=replicas,
        begins=transformer.stages(stages),
        microbatch=microbatch,
    )
    return Measured((gpus, batch, hidden, heads, blocks, length), mesh, float(row[-1]) / 1000)


@cache
def _profile(transformer, batch):
    return transformer.profile(batch)


def machine(gpus, *, flops, bytes_per_second, call_seconds, latency, bandwidth):
    """One host of so many A100s."""
    names = tuple(f"gpu{i}" for i in range(gpus))
    rate = Rate(threads=1, together=1, flops=flops, bytes_per_second=bytes_per_second)
    devices = tuple(
        Device(
            name=name,
            host="dgx",
            kind="cuda",
            model="A100",
            memory_bytes=80 << 30,
            rates=(rate,),
            call_seconds=call_seconds,
        )
        for name in names
    )
    link = Link(kind="nvlink", devices=names, latency=latency, bandwidth=bandwidth)
    return Cluster(name=f"{gpus} x A100", devices=devices, links=(link,))


def predicted(rows, constants):
    """Seconds of each row's step, on a machine with these constants."""
    layouts = {}
    for ranks in {row.mesh.ranks for row in rows}:
        cluster = machine(ranks, **constants)
        layouts[ranks] = Placement(cluster=cluster, devices=tuple(d.name for d in cluster.devices))
    return [row.mesh.cost(layouts[row.mesh.ranks]).step_seconds for row in rows]


@dataclass(frozen=True)
class Draw:
    """What came of fitting to some of the rows."""

    constants: dict[str, float]
    error: float
    """Mean over the other rows, relative."""
    regret: float
    """How much slower the fastest of the three predicted to be fastest is than the fastest of all: mean over
    workloads that were measured in more than three ways."""


def draw(rows, seed):
    """Fit to 100 rows, predict the rest."""
    mixed = Random(seed).sample(rows, len(rows))
    known, rest = mixed[:FITTED_ON], mixed[FITTED_ON:]
    constants = fitted(DATA_SHEET, lambda them: predicted(known, them), [row.seconds for row in known])
    error = mean(abs(p / row.seconds - 1) for row, p in zip(rest, predicted(rest, constants), strict=True))
    return Draw(constants, error, regret(rows, predicted(rows, constants)))


def regret(rows, prices):
    """Of trying the three ways that are predicted to be fastest, for each workload, and taking the best."""
    ways = defaultdict(list)
    for row, price in zip(rows, prices, strict=True):
        ways[row.workload].append((price, row.seconds))
    lost = []
    for several in ways.values():
        if len(several) > TRIED:
            tried = min(seconds for _, seconds in sorted(several)[:TRIED])
            lost.append(tried / min(seconds for _, seconds in several) - 1)
    return mean(lost)
