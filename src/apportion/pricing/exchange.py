"""The sum of gradients over ranks during the backward pass (``parallel/gradients.py``).

A gradient is sent as soon as the backward pass has it, the last layer's first, in buckets (Li et al., "PyTorch
Distributed", VLDB 2020, section 3.2.3). Of each transfer a part can go on while the device computes, which it slows
(``Link.hidden``, ``Link.slowdown``); the rest, and what comes too late, is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apportion.pricing.collectives import all_reduce
from apportion.pricing.cost import Span
from apportion.pricing.layout import Layout
from apportion.pricing.simulate import Task, makespan, simulate
from apportion.profile import Profile


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together."""

    nbytes: float
    first: int
    """Their first layer, whose gradient is the last to be there."""


def buckets(profile: Profile, most: float) -> list[Bucket]:
    """From the last layer on, together until there are so many bytes."""
    found: list[Bucket] = []
    gathered = 0.0
    for i in reversed(range(len(profile.layers))):
        gathered += profile.layers[i].parameter_bytes
        if gathered and (gathered >= most or i == 0):
            found.append(Bucket(gathered, i))
            gathered = 0.0
    return found


def during(
    layout: Layout, forward: float, backward: Sequence[float], sent: Sequence[Bucket]
) -> tuple[float, tuple[Span, ...]]:
    """Seconds beyond forward and backward (of each layer) until all of these have been summed over all ranks; and when
    what happened, on one device and on what joins it to the others."""
    link = layout.cluster.joining(layout.devices)
    alone = sum(backward) + forward
    spans = _spans(layout, forward, backward, sent)
    if link.slowdown:
        wire = [span for span in spans if span.on == link.kind]
        names = {f"backward {i}": i for i in range(len(backward))}
        slowed = list(backward)
        for span in spans:
            if span.name in names:
                meanwhile = sum(max(0.0, min(span.end, w.end) - max(span.begin, w.begin)) for w in wire)
                slowed[names[span.name]] += link.slowdown * meanwhile
        spans = _spans(layout, forward, slowed, sent)
    return makespan(spans) - alone, spans


def _spans(layout: Layout, forward: float, backward: Sequence[float], sent: Sequence[Bucket]) -> tuple[Span, ...]:
    link, device = layout.cluster.joining(layout.devices), layout.devices[0]
    ranks, starts = range(layout.ranks), {bucket.first: bucket for bucket in sent}
    tasks = [Task("forward", "computing", (device,), forward)]
    last = 0
    for i in reversed(range(len(backward))):
        tasks.append(Task(f"backward {i}", "computing", (device,), backward[i], (last,), order=1.0))
        last = len(tasks) - 1
        if i in starts:
            seconds = all_reduce(layout, ranks, starts[i].nbytes)
            name = f"sum of gradients from {i}"
            tasks.append(Task(name, "communicating", (link.kind,), seconds * link.hidden, (last,)))
            if link.hidden < 1.0:
                on, after = (link.kind, device), (len(tasks) - 1,)
                tasks.append(Task(name, "communicating", on, seconds * (1.0 - link.hidden), after))
    return simulate(tasks)
