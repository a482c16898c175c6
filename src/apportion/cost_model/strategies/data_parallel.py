"""The price of a synchronous step whose ranks each have a copy of the weights and sum their gradients over a group.

The sum goes on during the backward pass (``parallel/replica/gradient_buckets.py``). A gradient is sent as soon as the
backward pass has it, the last layer's first, in buckets (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
Of each transfer a part can go on while the device computes, which it slows (``Link.hidden``, ``Link.slowdown``); the
rest, and what comes too late, is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apportion.cost_model.cluster import Placement
from apportion.cost_model.collectives import all_gather, all_reduce, all_reduce_between
from apportion.cost_model.compute import Computed, call_seconds, layer_seconds, memory_rate, updating
from apportion.cost_model.cost import Cost, MemoryUse, Span, of_replica
from apportion.cost_model.profile import Profile
from apportion.cost_model.simulator import SimulatedTask, makespan, simulate
from apportion.cost_model.strategies import data_parallel

STEP_CALLS, LAYER_CALLS, NORM_CALLS = 15.0, 2.0, 10.0
"""The overhead of Python, in ``Device.call_seconds``: of a step; of each layer; of a batch normalisation that asks all
ranks. They are estimates by what the update in shared pages needs."""


@dataclass(frozen=True)
class Compressed:
    """What a compression makes of gradients that hosts send each other."""

    sent: Callable[[float], float]
    """The bytes that stand for this many bytes of gradients in one message."""
    passes: float
    """How often the memory of the gradients is gone through for it."""


NOT_COMPRESSED = Compressed(lambda nbytes: nbytes, 0.0)


@dataclass(frozen=True)
class Summed:
    """The way in which a step sums its gradients."""

    large: int
    """The bytes of a gradient that travels by itself."""
    early: int
    """The bytes of those that leave together while the backward pass goes on."""
    parts: int = 1
    """The number of parts in which a rank computes."""
    compressed: Compressed = NOT_COMPRESSED


def cost(profile: Profile, layout: Placement, found: Computed, rows: float, way: Summed) -> Cost:
    """The cost of a step whose ranks have computed ``found``; ``rows``: the rows of a rank at a time."""
    exposed, timeline = _summed(profile, layout, found, rows, way)
    python = (STEP_CALLS + LAYER_CALLS * len(profile.layers)) * call_seconds(layout)
    return Cost(
        terms={
            "computing": found.both,
            "updating": updating(profile, layout) + python,
            "communicating": exposed,
            "waiting": found.waiting,
            "loading": found.loading,
        },
        memory=MemoryUse(own=of_replica(profile, rows)).a_worker(1),
        examples=profile.batch_size,
        timeline=timeline,
    )


def _summed(
    profile: Profile, layout: Placement, found: Computed, rows: float, way: Summed
) -> tuple[float, tuple[Span, ...]]:
    """The seconds beyond computing until the gradients are summed: those of the last part; and the timeline of the step
    where the sum begins before the backward pass has ended: between hosts, and on GPUs."""
    weights, ranks = profile.parameter_bytes, range(layout.ranks)
    if layout.ranks == 1:
        return 0.0, ()
    if len(layout.hosts) == 1 and all(layout.device(rank).kind == "cpu" for rank in layout.kinds):
        alone = [layer.parameter_bytes for layer in profile.layers if layer.parameter_bytes >= way.large]
        packing = 2 * (weights - sum(alone)) / memory_rate(layout)
        link = layout.cluster.joining(layout.devices)
        return packing + all_reduce(layout, ranks, weights) + len(alone) * link.latency, ()
    last = found.backward / way.parts
    _, backward = layer_seconds(profile, layout, rows, found.forward / way.parts, last)
    sent = data_parallel.buckets(profile, way.early)
    exposed, timeline = data_parallel.during(layout, found.both - last, backward, sent, way.compressed)
    passes = 2 + (way.compressed.passes if len(layout.hosts) > 1 else 0.0)
    return passes * weights / memory_rate(layout) + exposed, timeline


def asked_while_computing(profile: Profile, layout: Placement) -> float:
    """Seconds of what ranks ask each other in their passes: the statistics of batch normalisation, forward and
    backward; the outputs, where the loss is one of all of them."""
    ranks, last = range(layout.ranks), profile.layers[-1]
    if layout.ranks == 1:
        return 0.0
    seconds = 0.0
    if profile.batch_norm:
        layers = [layer for layer in profile.layers if "BatchNorm" in layer.kind]
        python = NORM_CALLS * call_seconds(layout)
        for layer in layers:  # two numbers a channel, as weight and bias are
            numbers = max(layer.parameter_bytes, 8)
            seconds += all_gather(layout, ranks, numbers * layout.ranks) + all_reduce(layout, ranks, numbers) + python
    if not profile.cut_by_rows:
        seconds += all_gather(layout, ranks, last.activation_bytes) + all_reduce(layout, ranks, last.activation_bytes)
    return seconds


# The sum of the gradients


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together."""

    nbytes: float
    first: int
    """The first layer of the bucket, whose gradient is the last to be there."""


def buckets(profile: Profile, most: float) -> list[Bucket]:
    """The buckets of gradients from the last layer on, each gathered until it has ``most`` bytes."""
    found: list[Bucket] = []
    gathered = 0.0
    for i in reversed(range(len(profile.layers))):
        gathered += profile.layers[i].parameter_bytes
        if gathered and (gathered >= most or i == 0):
            found.append(Bucket(gathered, i))
            gathered = 0.0
    return found


def during(
    layout: Placement,
    forward: float,
    backward: Sequence[float],
    sent: Sequence[Bucket],
    compressed: Compressed = NOT_COMPRESSED,
) -> tuple[float, tuple[Span, ...]]:
    """The seconds beyond ``forward`` and ``backward`` (of each layer) until all buckets have been summed over all
    ranks; and the timeline of one device and of the link that joins it to the others."""
    link = layout.cluster.joining(layout.devices)
    alone = sum(backward) + forward
    spans = _spans(layout, forward, backward, sent, compressed)
    if link.slowdown:
        wire = [span for span in spans if span.on == link.kind]
        names = {f"backward {i}": i for i in range(len(backward))}
        slowed = list(backward)
        for span in spans:
            if span.name in names:
                meanwhile = sum(max(0.0, min(span.end, w.end) - max(span.begin, w.begin)) for w in wire)
                slowed[names[span.name]] += link.slowdown * meanwhile
        spans = _spans(layout, forward, slowed, sent, compressed)
    return makespan(spans) - alone, spans


def _spans(
    layout: Placement, forward: float, backward: Sequence[float], sent: Sequence[Bucket], compressed: Compressed
) -> tuple[Span, ...]:
    link, device = layout.cluster.joining(layout.devices), layout.devices[0]
    ranks, starts = range(layout.ranks), {bucket.first: bucket for bucket in sent}
    tasks = [SimulatedTask("forward", "computing", (device,), forward)]
    last = 0
    for i in reversed(range(len(backward))):
        tasks.append(SimulatedTask(f"backward {i}", "computing", (device,), backward[i], (last,), order=1.0))
        last = len(tasks) - 1
        if i in starts:
            seconds = all_reduce_between(layout, ranks, starts[i].nbytes, compressed.sent(starts[i].nbytes))
            name = f"sum of gradients from {i}"
            tasks.append(SimulatedTask(name, "communicating", (link.kind,), seconds * link.hidden, (last,)))
            if link.hidden < 1.0:
                on, after = (link.kind, device), (len(tasks) - 1,)
                tasks.append(SimulatedTask(name, "communicating", on, seconds * (1.0 - link.hidden), after))
    return simulate(tasks)
