"""The price of the synchronous update of one host whose weights lie in shared pages
(``parallel/shared_weights/update.py``).

Every rank writes its gradient once, reads the gradients of all ranks for its own slice, and updates that. A Linear
layer whose factors are smaller than its gradient has these exchanged instead; the product of them takes as long as in
the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from apportion.cost_model.cluster import Placement
from apportion.cost_model.compute import Computed, call_seconds, layer_seconds, memory_rate, saved, updating
from apportion.cost_model.cost import Cost, MemoryUse, activations, copies
from apportion.cost_model.profile import LayerProfile, Profile

STEP_CALLS, LAYER_CALLS, LINEAR_CALLS, PIECE_CALLS = 15.0, 2.0, 5.0, 1.0
"""The overhead of a step's Python, in ``Device.call_seconds``: by itself; for each layer with weights (hooks take its
gradients, and the live version is bound to it); for each Linear layer, whose products are made in Python; for each
piece of a slice. They are chosen so that measured steps of five networks come out, where a call took 8 us."""
PIECE_BYTES = 1 << 18
MEETINGS = 2.0
"""The number of meetings in a step at which all ranks wait for each other, of a link's latency each."""


def suits(profile: Profile, layout: Placement) -> bool:
    """Can the weights of this workload lie in pages that all ranks share?"""
    together = len(layout.hosts) == 1 and all(layout.device(rank).kind == "cpu" for rank in layout.kinds)
    return together and profile.element_wise and not profile.own_update and not profile.carries


@dataclass(frozen=True)
class Exchanged:
    """The bytes that the ranks exchange in one step."""

    dense: float
    """The bytes of gradients that each rank writes whole."""
    copied: float
    """The bytes of dense gradients that the backward pass has made elsewhere: all but those of Linear layers."""
    factored: float
    """The bytes of gradients that no rank writes, of weights whose factors are exchanged instead."""
    factors: float
    """The bytes of the factors that are exchanged, of the whole batch."""


def exchanged(profile: Profile) -> Exchanged:
    """The bytes that a step writes and reads."""
    linear = [(layer, *sizes) for layer in profile.layers if (sizes := _linear(layer, profile.batch_size))]
    rows = profile.batch_size
    small = [(i * o * 4.0, rows * (i + o) * 4.0) for _, i, o in linear if rows * (i + o) <= i * o]
    weights = sum(i * o * 4.0 for _, i, o in linear)
    factored = sum(nbytes for nbytes, _ in small)
    return Exchanged(
        dense=profile.parameter_bytes - factored,
        copied=max(0.0, profile.parameter_bytes - weights),
        factored=factored,
        factors=sum(nbytes for _, nbytes in small),
    )


def _linear(layer: LayerProfile, rows: int) -> tuple[int, int] | None:
    """The (inputs, outputs) of a Linear layer that is called once for each example; None for any other layer."""
    if layer.kind != "Linear" or not layer.parameter_bytes or not layer.activation_bytes:
        return None
    outputs = layer.activation_bytes / (4 * rows)
    inputs = layer.flops / (2 * rows * outputs)
    own = layer.parameter_bytes / 4
    if own not in (inputs * outputs, inputs * outputs + outputs):
        return None
    return int(inputs), int(outputs)


def cost(profile: Profile, layout: Placement, found: Computed, rows: float) -> Cost:
    """The cost of a step whose ranks have computed ``found``; ``rows``: the rows of a rank at a time."""
    n, rate, moved = layout.ranks, memory_rate(layout), exchanged(profile)
    link = layout.cluster.joining(layout.devices)
    layers = [layer for layer in profile.layers if layer.parameter_bytes]
    linear = sum(1 for layer in layers if layer.kind == "Linear")
    calls = LAYER_CALLS * len(layers) + LINEAR_CALLS * linear + PIECE_CALLS * moved.dense / n / PIECE_BYTES
    python = (STEP_CALLS + calls) * call_seconds(layout)
    # Written: what was made elsewhere is read first; the factors are copies too. Read: everyone's.
    written = 2 * moved.copied + 2 * moved.factors / n
    read = moved.dense + moved.factors
    return Cost(
        terms={
            "computing": found.both - _saved(profile, layout, found, rows),
            "updating": updating(profile, layout, profile.parameter_bytes / n, fused=True) + python,
            "communicating": (written + read) / rate + MEETINGS * link.latency,
            "waiting": found.waiting,
            "loading": found.loading,
        },
        memory=_held(profile, moved, rows).a_worker(n),
        examples=profile.batch_size,
    )


def _saved(profile: Profile, layout: Placement, found: Computed, rows: float) -> float:
    """The seconds that products of few rows save in all parts of a step."""
    times = layer_seconds(profile, layout, rows, found.forward, found.backward)
    return saved(profile.layers, *times, rows).both


def _held(profile: Profile, moved: Exchanged, rows: float) -> MemoryUse:
    return MemoryUse(
        own={
            "gradients": moved.dense,
            "activations": activations(profile, rows),
            **copies(profile, buffers=2),
        },
        shared={**copies(profile, weights=2, slots=2, buffers=2), "gradients": moved.factors},
    )
