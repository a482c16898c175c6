"""What a network costs whose first layers each rank computes for some of the rows, and whose last ones it has slices
of; and from which layer on slices are cheaper."""

from __future__ import annotations

from math import inf

from apportion.pricing.collectives import all_gather, all_reduce
from apportion.pricing.cost import Cost
from apportion.pricing.layer_times import LayerTimes, chance, held, times
from apportion.pricing.layout import Layout
from apportion.pricing.partition import chain
from apportion.pricing.slices import How, price
from apportion.profile import Profile


def exchanging(profile: Profile, layout: Layout, at: int, how: dict[str, How], *, rotates: bool) -> Cost:
    """The layers before ``at`` on a share of the rows, the others sliced as ``how`` says."""
    n, batch = layout.ranks, profile.batch_size
    ranks = range(n)
    own = _slowest(profile, layout)
    front, back = profile.layers[:at], profile.layers[at:]
    rows = -(-batch // n)
    computing = sum(own.of(layer, rows).both for layer in front)
    weights = sum(layer.parameter_bytes for layer in front)
    crossing = profile.crossing_bytes[at]
    parts = n if rotates else 1
    sliced = price(profile, layout, own, how, back, rows=batch / parts)
    norms = sum("BatchNorm" in layer.kind for layer in front)
    # A share's activations arrive while the one before is computed: only the first is waited for.
    exchange = all_gather(layout, ranks, crossing) / parts
    return Cost(
        terms={
            "computing": computing + sliced.computing * parts,
            "communicating": exchange
            + sliced.communicating * parts
            + all_reduce(layout, ranks, weights)
            + 4 * norms * all_reduce(layout, ranks, 64),
            "updating": own.update(weights + sliced.weights, fused=True),
            "waiting": (computing + sliced.computing * parts) * chance(layout),
            "loading": profile.loading_seconds * batch,
        },
        memory=held(
            profile,
            layout,
            weights + sliced.weights,
            sum(layer.kept_bytes for layer in front) / n + sliced.activations,
            share=1.0,
        ),
        examples=batch,
    )


def begins(profile: Profile, layout: Layout, how: dict[str, How], *, least: int) -> int | None:
    """The layer from which on all are best sliced, or computed alike, instead of each rank taking some of the rows: the
    chain's cheapest choices, from ``least`` on. None: nowhere."""
    n, ranks, own = layout.ranks, range(layout.ranks), _slowest(profile, layout)
    costs = []
    for i, layer in enumerate(profile.layers):
        by_rows = own.of(layer, profile.batch_size / n).both + all_reduce(layout, ranks, layer.parameter_bytes)
        cut = price(profile, layout, own, how, [layer], rows=profile.batch_size)
        updates = own.update(layer.parameter_bytes, fused=True), own.update(cut.weights, fused=True)
        costs.append((by_rows + updates[0], cut.computing + cut.communicating + updates[1] if i >= least else inf))

    def change(i: int, a: int, b: int) -> float:
        if a == b:
            return 0.0
        return all_gather(layout, ranks, profile.crossing_bytes[i]) if (a, b) == (0, 1) else inf

    _, choices = chain(costs, change)
    return choices.index(1) if 1 in choices else None


def _slowest(profile: Profile, layout: Layout) -> LayerTimes:
    """The rank that takes longest for the same work."""
    return max(
        dict.fromkeys(times(profile, layout)),
        key=lambda own: sum(own.of(layer, profile.batch_size).both for layer in profile.layers),
    )
