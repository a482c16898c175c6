"""The memory of a worker: weights, gradients, optimizer slots, activations and buffers, in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from apportion.cost_model.cost import MEMORY
from apportion.cost_model.placement import Placement
from apportion.cost_model.profile import Profile


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes by what they hold (``cost.MEMORY``)."""

    own: Mapping[str, float]
    """The bytes of a worker by itself."""
    shared: Mapping[str, float] = field(default_factory=dict)
    """The bytes that all workers of a host have in common, counted once for each host."""

    def a_worker(self, together: int) -> dict[str, int]:
        """The bytes that a worker has by itself, and its part of what ``together`` workers have in common: times as
        many workers, the bytes that their host holds."""
        return {
            what: math.ceil(self.own.get(what, 0.0) + self.shared.get(what, 0.0) / together)
            for what in MEMORY
            if what in self.own or what in self.shared
        }


def copies(
    profile: Profile, *, weights: float = 0.0, gradients: float = 0.0, slots: float = 0.0, buffers: float = 0.0
) -> dict[str, float]:
    """The bytes of this many copies of each; one copy of ``slots`` is all that the optimizer keeps for all weights."""
    found = {
        "weights": weights * profile.parameter_bytes,
        "gradients": gradients * profile.parameter_bytes,
        "slots": slots * profile.slots * profile.parameter_bytes,
        "buffers": buffers * profile.buffer_bytes,
    }
    return {what: nbytes for what, nbytes in found.items() if nbytes}


def activations(profile: Profile, rows: float) -> float:
    """The bytes of activations of this many rows: what the layers keep for the backward pass, and the largest output
    with its gradient."""
    kept = sum(layer.kept_bytes for layer in profile.layers)
    largest = max(layer.activation_bytes for layer in profile.layers)
    return (kept + 2 * largest) * rows / profile.batch_size


def of_replica(profile: Profile, rows: float) -> dict[str, float]:
    """The bytes of a whole network that trains on this many rows at a time. The buffers are there twice: as the last
    update left them, and as the forward passes since have made them."""
    held = copies(profile, weights=1, gradients=1, slots=1, buffers=2)
    return {**held, "activations": activations(profile, rows)}


def parts_that_fit(profile: Profile, layout: Placement) -> int:
    """The number of microbatches with which a rank's activations fit its memory; 1 where they fit at once, or never
    do."""
    cut = profile.cut_by_rows and not profile.own_update and not profile.batch_norm
    rows = max(1, profile.batch_size // layout.ranks)
    for parts in (1 << k for k in range(rows.bit_length())) if cut else ():
        held = activations(profile, rows / parts) + sum(of_replica(profile, 0.0).values())
        if all(held * layout.together(r) <= layout.device(r).memory_bytes for r in layout.kinds):
            return parts
    return 1
