"""The cost of a step: seconds by what they go to, and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from apportion.cost_model.cluster import Placement
from apportion.cost_model.profile import Profile

TERMS = ("computing", "updating", "communicating", "bubble", "waiting", "loading")
"""The terms of a step's time: communicating is what no computing hides; bubble is what a schedule leaves idle; waiting
is for the slowest rank, by chance or by unequal shares."""
MEMORY = ("weights", "gradients", "slots", "activations", "buffers")


class Span(NamedTuple):
    """A stretch of time of one device or link."""

    on: str
    name: str
    """The work that was done in the span, for people: ``forward 3``."""
    kind: str
    """The kind of work, one of ``TERMS``."""
    begin: float
    end: float
    """The end of the span, like its beginning in seconds since the step began."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The predicted cost of a strategy's step on a layout."""

    terms: Mapping[str, float]
    """Seconds by what they go to; they add up to ``step_seconds``."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by what they hold, of the worker that holds most."""
    examples: float
    """The number of examples that a step learns from; where workers train independently, those of all workers in the
    time of ``step_seconds``."""
    timeline: tuple[Span, ...] = ()
    """The spans of one step; empty where every device does the same thing after the other."""

    def __post_init__(self) -> None:
        if unknown := sorted({*self.terms} - {*TERMS}) + sorted({*self.memory} - {*MEMORY}):
            raise AssertionError(f"unknown term {unknown[0]} of a cost")

    @property
    def step_seconds(self) -> float:
        """The seconds of one step."""
        return sum(self.terms.values())

    @property
    def seconds_per_example(self) -> float:
        """The seconds for each example, by which exact strategies are ranked."""
        return self.step_seconds / self.examples

    @property
    def memory_bytes(self) -> int:
        """The bytes of the worker that holds most."""
        return sum(self.memory.values())


# The memory of a worker: weights, gradients, optimizer slots, activations and buffers, in bytes.


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
