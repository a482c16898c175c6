"""The clipping of gradients by their norm that a rank or one process has made before a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apportion.script_check.record import Event


@dataclass(frozen=True)
class Clip:
    """A call that clips gradients by their norm. ``norm``: before it; ``factor``: by which they are scaled."""

    norm: float
    factor: float


def last_clip(events: Sequence[Event]) -> Clip | None:
    """Returns the last call that clips by the norm among the events between two steps; None where there is none."""
    clips = [event for event in events if event["kind"] == "clip" and event["norm"] is not None]
    if not clips:
        return None
    norm = float(clips[-1]["norm"])
    return Clip(norm, min(1.0, clips[-1]["limit"] / (norm + 1e-6)))  # as torch computes it
