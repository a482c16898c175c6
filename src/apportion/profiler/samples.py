"""Summaries of repeated measurements: medians, after outliers were left out, and lines through them.

A machine that does something else for a moment makes some samples longer and none shorter, so means are of no use. Each
number is measured in several rounds, in turn with everything else; a round's value is its median, and of the rounds'
values those are left out whose distance from their median is more than 3.5 times its usual size (Iglewicz and Hoaglin,
"How to Detect and Handle Outliers", 1993). What remains is represented by its median.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median, pstdev

from apportion.cost_model.cluster import Link, Moved, Port

OUTLIER = 3.5
_SCALE = 0.6745
"""The factor that makes the median distance from the median as large as a standard deviation, for normal samples."""
SMALL_BYTES = 64 << 10
"""The bytes up to which a message's time is mostly its latency."""

Rounds = Sequence[Sequence[float]]
"""The samples of one thing, round by round."""
Table = Mapping[int, Rounds]
"""The samples of one thing at several sizes in bytes."""


def kept(samples: Sequence[float]) -> list[float]:
    """Return the samples that are not outliers."""
    middle = median(samples)
    distance = median(abs(s - middle) for s in samples)
    if distance == 0.0:
        return [s for s in samples if s == middle]
    return [s for s in samples if _SCALE * abs(s - middle) / distance <= OUTLIER]


def typical(rounds: Rounds) -> float:
    """Return one number for all rounds: the median of the rounds' medians, without outliers."""
    return median(kept([median(samples) for samples in rounds if samples]))


def spread(runs: Rounds) -> float:
    """Return the relative standard deviation of samples that followed each other: the median over runs, without
    outliers."""
    found = []
    for samples in runs:
        if len(samples) > 2:
            usual = kept(samples)
            found.append(pstdev(usual) / (sum(usual) / len(usual)))
    return median(found) if found else 0.0


def slowest(ranks: Rounds) -> list[float]:
    """Return, for samples that ranks took together, the seconds of each on its slowest rank."""
    return [max(same) for same in zip(*ranks, strict=True)]


def line(points: Mapping[int, float]) -> tuple[float, float]:
    """Fit (seconds at nothing, bytes a second) to times by their bytes: the median of the slopes between any two of the
    large ones (Theil and Sen), and what the small ones take beyond that."""
    most = max(points)
    large = sorted(n for n in points if n * 64 >= most)
    slopes = [(points[b] - points[a]) / (b - a) for a, b in itertools.combinations(large, 2)]
    slope = median(slopes) if slopes else 0.0
    if slope <= 0.0:  # too small to tell
        slope = points[most] / most
    small = [n for n in points if n <= SMALL_BYTES] or [min(points)]
    latency = median(points[n] - slope * n for n in small)
    return max(latency, min(points.values()) * 0.1), 1.0 / slope


def hiding(samples: Rounds) -> tuple[float, float]:
    """Return (the share of a sum that is hidden, how much longer computing takes meanwhile) from the samples of
    ``HardwareBenchmark.overlap``."""
    alone, computing, begun, computed, waited = (median(kept(column)) for column in zip(*samples, strict=True))
    hidden = min(1.0, max(0.0, 1.0 - (begun + waited) / alone))
    if hidden < 0.05:
        return 0.0, 0.0
    # What is hidden goes on while it computes, for as long as it takes or as long as there is to compute.
    return hidden, max(0.0, computed - computing) / min(hidden * alone, computing)


def whose(alone: float, at_once: float, many: int) -> Port:
    """Say which port limits a link's bandwidth: one for all its users where ``many`` transfers at once take nearer to
    ``many`` times as long as one than to the same time, else one of each device."""
    return "all" if at_once / alone > many**0.5 else "device"


def sums(ranks: int, sizes: Table) -> list[Moved]:
    """Return the entries of a link's table for sums over ``ranks`` ranks, by their bytes."""
    return [
        Moved(what="all_reduce", ranks=ranks, nbytes=nbytes, seconds=typical(rounds))
        for nbytes, rounds in sorted(sizes.items())
    ]


def measured_link(link: Link, messages: Table, reduced: Mapping[int, Table], overlapped: Rounds) -> Link:
    """Return the link as it was measured. ``reduced``: the tables of sums by the number of ranks."""
    passed = {nbytes: typical(rounds) for nbytes, rounds in sorted(messages.items())}
    latency, bandwidth = line(passed)
    table = [Moved(what="message", ranks=2, nbytes=n, seconds=seconds) for n, seconds in passed.items()]
    for ranks, sizes in sorted(reduced.items()):
        table += sums(ranks, sizes)
    hidden, slowdown = hiding(overlapped) if overlapped else (link.hidden, link.slowdown)
    return Link(
        kind=link.kind,
        devices=link.devices,
        port=link.port,
        latency=latency,
        bandwidth=bandwidth,
        hidden=hidden,
        slowdown=slowdown,
        measured=tuple(table),
    )
