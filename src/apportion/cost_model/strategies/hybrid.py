"""The price of a network whose first layers each rank computes for some of the rows, and whose last layers are sliced
over the ranks; and the layer from which on slices are cheaper."""

from __future__ import annotations

from math import inf

from apportion.cost_model.collectives import Collective
from apportion.cost_model.compute import LayerTimes, chance, held, times
from apportion.cost_model.cost import Cost
from apportion.cost_model.partitioning import chain
from apportion.cost_model.placement import Placement
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies.tensor import How, Slices


def exchanging(profile: Profile, layout: Placement, at: int, how: dict[str, How], *, rotates: bool) -> Cost:
    """The cost of a step with the layers before ``at`` on a share of the rows, and the others sliced as ``how``
    says."""
    n, batch = layout.ranks, profile.batch_size
    ranks = Collective.among(layout, range(n))
    own = _slowest(profile, layout)
    front, back = profile.layers[:at], profile.layers[at:]
    rows = -(-batch // n)
    computing = sum(seconds.both for seconds in own.each(rows)[:at])
    weights = sum(layer.parameter_bytes for layer in front)
    crossing = profile.crossing_bytes[at]
    parts = n if rotates else 1
    sliced = Slices(profile, layout, own, how).price(back, rows=batch / parts)
    norms = sum("BatchNorm" in layer.kind for layer in front)
    # A share's activations arrive while the one before is computed: only the first is waited for.
    exchange = ranks.all_gather(crossing) / parts
    return Cost(
        terms={
            "computing": computing + sliced.computing * parts,
            "communicating": exchange
            + sliced.communicating * parts
            + ranks.all_reduce(weights)
            + 4 * norms * ranks.all_reduce(64),
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


def begins(profile: Profile, layout: Placement, how: dict[str, How], *, least: int) -> int | None:
    """The layer from which on all are best sliced, or computed whole on every rank, instead of each rank taking some of
    the rows: the chain's cheapest choices, from ``least`` on. None: there is none."""
    n, ranks, own = layout.ranks, Collective.among(layout, range(layout.ranks)), _slowest(profile, layout)
    slices, by_rows, costs = Slices(profile, layout, own, how), own.each(profile.batch_size / n), []
    for i, layer in enumerate(profile.layers):
        dealt = by_rows[i].both + ranks.all_reduce(layer.parameter_bytes)
        cut = slices.price([layer], rows=profile.batch_size)
        updates = own.update(layer.parameter_bytes, fused=True), own.update(cut.weights, fused=True)
        costs.append((dealt + updates[0], cut.computing + cut.communicating + updates[1] if i >= least else inf))

    def change(i: int, a: int, b: int) -> float:
        if a == b:
            return 0.0
        return ranks.all_gather(profile.crossing_bytes[i]) if (a, b) == (0, 1) else inf

    _, choices = chain(costs, change)
    return choices.index(1) if 1 in choices else None


def _slowest(profile: Profile, layout: Placement) -> LayerTimes:
    """The layer times of the rank that takes longest for the same work."""
    return max(
        dict.fromkeys(times(profile, layout)),
        key=lambda own: sum(seconds.both for seconds in own.each(profile.batch_size)),
    )
