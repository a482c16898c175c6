"""The events of a run as lines of words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from apportion.core.event import Event

LINE_SECONDS = 2.0
"""The seconds between two plain lines of a kind."""


class PlainLines:
    """Shows one plain line now and then."""

    def __init__(self) -> None:
        self._next = 0.0
        self._start: Event | None = None

    def open(self) -> None:
        """Begins to show."""

    def close(self) -> None:
        """Shows nothing more."""

    def say(self, text: str) -> None:
        """Prints a line of words."""
        print(text, flush=True)

    def show(self, event: Event) -> None:
        """Shows one more event."""
        now = time.monotonic()
        if event.kind == "plan":
            self.say(plan_line(event))
        elif event.kind == "proof":
            self.say(event.data["sentence"])
        elif event.kind == "start":
            self._start = event
            self.say(start_line(event))
        elif event.kind == "step" and now >= self._next:
            self.say(step_line(event, self._start))
            self._next = now + LINE_SECONDS
        elif event.kind == "evaluation":
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in event.data["metrics"].items())
            self.say(f"epoch {event.epoch:.2f}  test {metrics}")
        elif event.kind == "drift":
            self.say(f"step {event.step}: {event.data['cause']}")
        elif event.kind == "fault" and event.data["action"] != "stops":  # that is told as the error that it ends with
            self.say(f"fault: {event.data['cause']} ({event.data['action']})")


def plan_line(event: Event) -> str:
    """Returns a line on what is taken, why, and how long the steps of the others took."""
    data = event.data
    taken = data["strategy"], data["launcher"]
    others = [
        f"{other['strategy']} on {other['launcher']}: {told}"
        for other in data["candidates"]
        if (other["strategy"], other["launcher"]) != taken and (told := _tried(other))
    ]
    return f"{taken[0]} on {taken[1]}: {data['why']}" + (f" ({'; '.join(others)})" if others else "")


def _tried(candidate: Mapping[str, Any]) -> str:
    """Returns how the trial of a candidate went; empty where it was not tried."""
    if candidate["refused"] is not None:
        return str(candidate["refused"])
    return "" if candidate["step_seconds"] is None else f"{candidate['step_seconds'] * 1e3:.3g} ms"


def start_line(event: Event) -> str:
    """Returns a line on what is about to run."""
    data = event.data
    resumed = f", resumed at step {data['first_step']}" if data["resumed"] else ""
    return (
        f"{data['strategy']} on {data['launcher']} ({data['device']}): {data['parameters']:,} parameters, "
        f"{data['examples']:,} examples, batches of {data['batch_size']}, {data['steps']:,} steps{resumed}"
    )


def step_line(event: Event, start: Event | None) -> str:
    """Returns a line on how far the run is."""
    total = f"/{start.data['steps']}" if start is not None else ""
    return (
        f"epoch {event.epoch:.2f}  step {event.step}{total}  {values_text(event)}  "
        f"{event.data['examples_per_second']:,.0f} examples/s"
    )


def values_text(event: Event) -> str:
    """Returns the last values of a ``step`` event, each with its name."""
    return "  ".join(f"{name} {values[-1]:.4f}" for name, values in event.data["values"].items() if values)
