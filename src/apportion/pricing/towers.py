"""What a synchronous step takes whose ranks have a copy of the weights each, and sum their gradients over a group."""

from __future__ import annotations

from apportion.pricing import exchange
from apportion.pricing.collectives import all_gather, all_reduce
from apportion.pricing.cost import Cost, Span
from apportion.pricing.layout import Layout
from apportion.pricing.memory import Holding, of_replica
from apportion.pricing.shares import Computed, call_seconds, layer_seconds, memory_rate, updating
from apportion.profile import Profile

STEP_CALLS, LAYER_CALLS, NORM_CALLS = 15.0, 2.0, 10.0
"""Of Python, in ``Device.call_seconds``: of a step; for each layer; for a batch normalisation that asks all ranks.
Estimates by what the update in shared pages needs."""


def cost(
    profile: Profile, layout: Layout, found: Computed, rows: float, sizes: tuple[int, int], *, parts: int = 1
) -> Cost:
    """Of a step whose ranks have computed so, in so many parts; ``rows``: of a rank at a time; ``sizes``: bytes of a
    gradient that travels by itself, and of those that leave together while the backward pass goes on."""
    exposed, timeline = _summed(profile, layout, found, rows, sizes, parts)
    python = (STEP_CALLS + LAYER_CALLS * len(profile.layers)) * call_seconds(layout)
    return Cost(
        terms={
            "computing": found.both,
            "updating": updating(profile, layout) + python,
            "communicating": exposed,
            "waiting": found.waiting,
            "loading": found.loading,
        },
        memory=Holding(own=of_replica(profile, rows)).a_worker(1),
        examples=profile.batch_size,
        timeline=timeline,
    )


def _summed(
    profile: Profile, layout: Layout, found: Computed, rows: float, sizes: tuple[int, int], parts: int
) -> tuple[float, tuple[Span, ...]]:
    """Seconds beyond computing until the gradients are summed: those of the last part. And the step in a picture, where
    the sum begins before the backward pass has ended: between hosts, and on GPUs."""
    weights, ranks, (large, early) = profile.parameter_bytes, range(layout.ranks), sizes
    if layout.ranks == 1:
        return 0.0, ()
    if len(layout.hosts) == 1 and all(layout.device(rank).kind == "cpu" for rank in layout.kinds):
        alone = [layer.parameter_bytes for layer in profile.layers if layer.parameter_bytes >= large]
        packing = 2 * (weights - sum(alone)) / memory_rate(layout)
        link = layout.cluster.joining(layout.devices)
        return packing + all_reduce(layout, ranks, weights) + len(alone) * link.latency, ()
    last = found.backward / parts
    _, backward = layer_seconds(profile, layout, rows, found.forward / parts, last)
    exposed, timeline = exchange.during(layout, found.both - last, backward, exchange.buckets(profile, early))
    return 2 * weights / memory_rate(layout) + exposed, timeline


def asked_while_computing(profile: Profile, layout: Layout) -> float:
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
