"""What a step costs: seconds by what they go to, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

TERMS = ("computing", "updating", "communicating", "bubble", "waiting", "loading")
"""Of a step: communicating is what no computing hides; bubble is what a schedule leaves idle; waiting is for whoever is
slowest, by chance or by unequal shares."""
MEMORY = ("weights", "gradients", "slots", "activations", "buffers")


class Span(NamedTuple):
    """A stretch of time of one device or link."""

    on: str
    name: str
    """What it did, for people: ``forward 3``."""
    kind: str
    """One of ``TERMS``."""
    begin: float
    end: float
    """Seconds since the step began."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a strategy's step takes on a layout: predicted."""

    terms: Mapping[str, float]
    """Seconds by what they go to; they add up to ``step_seconds``."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by what they hold, of the worker that holds most."""
    examples: float
    """That a step learns from: where workers go their own ways, in the time of ``step_seconds`` by all of them."""
    timeline: tuple[Span, ...] = ()
    """Of one step; empty where every device does the same thing after the other."""

    def __post_init__(self) -> None:
        if unknown := sorted({*self.terms} - {*TERMS}) + sorted({*self.memory} - {*MEMORY}):
            raise AssertionError(f"{unknown[0]} is no term of a cost")

    @property
    def step_seconds(self) -> float:
        """Of one step."""
        return sum(self.terms.values())

    @property
    def seconds_per_example(self) -> float:
        """What exact strategies are ranked by."""
        return self.step_seconds / self.examples

    @property
    def memory_bytes(self) -> int:
        """Of the worker that holds most."""
        return sum(self.memory.values())
