"""The events of a run as lines of words."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from apportion.core.event import Event

LINE_SECONDS = 2.0
"""The seconds between two plain lines of a kind."""


class PlainLines:
    """Shows one plain line now and then."""

    def __init__(self, words: Callable[[str], str] = str) -> None:
        """``words``: what is made of a message before it is shown, as its arguments written as flags."""
        self._words = words
        self._next = 0.0
        self._start: Event | None = None
        self._scores: dict[int, float] = {}
        self._proved = False
        """True once the sentence of the run's proof has been shown."""

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
            self.say(self._words(plan_line(event)))
        elif event.kind == "proof":
            self._proved = event.data["verdict"] != "begun"
            self.say(self._words(event.data["sentence"]))
        elif event.kind == "start":
            self._start = event
            if event.data["proof"] is not None and not self._proved:  # it was made by the ranks, or earlier
                self.say(self._words(event.data["proof"]["sentence"]))
            self.say(start_line(event))
        elif event.kind == "step" and now >= self._next:
            self.say(step_line(event, self._start, self._score()))
            self._next = now + LINE_SECONDS
        elif event.kind == "evaluation":
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in event.data["metrics"].items())
            self.say(f"{place_text(event, self._start)}  test {metrics}")
        elif event.kind == "rollouts" and event.data["score"] is not None:
            self._scores[event.data["rank"]] = event.data["score"]
        elif event.kind == "drift":
            self.say(f"step {event.step}: {event.data['cause']}")
        elif event.kind == "fault" and event.data["action"] != "stops":  # that is shown as the error that it ends with
            self.say(self._words(f"fault: {event.data['cause']} ({event.data['action']})"))

    def _score(self) -> float | None:
        """Returns the mean of what each worker's last episodes have scored, where there are episodes."""
        return sum(self._scores.values()) / len(self._scores) if self._scores else None


def plan_line(event: Event) -> str:
    """Returns a line on what is taken, why, and how long the steps of the others took."""
    data = event.data
    taken = data["strategy"], data["launcher"]
    others = [
        f"{other['strategy']} on {other['launcher']}: {tried}"
        for other in data["candidates"]
        if (other["strategy"], other["launcher"]) != taken and (tried := _tried(other))
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
    frames = frames_of(event)
    if frames:
        resumed += ", its environments begin new episodes" if resumed else ""
        trained = f"{frames:,} frames a step"
    else:
        trained = f"{data['examples']:,} examples, batches of {data['batch_size']}"
    return (
        f"{data['strategy']} on {data['launcher']} ({data['device']}): {data['parameters']:,} parameters, "
        f"{trained}, {data['steps']:,} steps{resumed}"
    )


def frames_of(start: Event | None) -> int:
    """Returns the steps of environments in a step of the training; 0 where it has none."""
    return 0 if start is None else int(start.data.get("frames", 0)) * int(start.data["batch_size"])


def place_text(event: Event, start: Event | None) -> str:
    """Returns how far the run is: in epochs, or in frames."""
    frames = frames_of(start)
    return f"frames {event.step * frames:,}" if frames else f"epoch {event.epoch:.2f}"


def speed_text(examples_per_second: float, start: Event | None) -> str:
    """Returns the examples a second, or the frames."""
    frames = 0 if start is None else int(start.data.get("frames", 0))
    return f"{examples_per_second * (frames or 1):,.0f} {'frames' if frames else 'examples'}/s"


def step_line(event: Event, start: Event | None, score: float | None = None) -> str:
    """Returns a line on how far the run is. ``score``: of the last episodes, where there are any."""
    total = f"/{start.data['steps']}" if start is not None else ""
    scored = "" if score is None else f"  score {score:.2f}"
    return (
        f"{place_text(event, start)}  step {event.step}{total}  {values_text(event)}{scored}  "
        f"{speed_text(event.data['examples_per_second'], start)}"
    )


def values_text(event: Event) -> str:
    """Returns the last values of a ``step`` event, each with its name."""
    return "  ".join(f"{name} {values[-1]:.4f}" for name, values in event.data["values"].items() if values)
