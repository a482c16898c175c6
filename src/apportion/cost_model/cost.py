"""The cost of a step: seconds by what they go to, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

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
