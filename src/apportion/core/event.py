"""The events by which a run tells about itself, as it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from apportion.core.html_table import html_facts

EventKind = Literal[
    "plan", "proof", "start", "step", "speed", "rollouts", "drift", "evaluation", "checkpoint", "fault", "end"
]

EPISODE = "episode.gif"
"""The file in the directory of a run that shows an episode, where the network plays some."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run. ``data`` by kind (every value is plain JSON), of which each value is an
    attribute too, as ``event.learning_rate``:

    - ``plan``: before the start, where no strategy was given. ``strategy``, ``launcher`` (what is taken) and ``why``
      (one line); ``candidates``: the best first, each with ``strategy``, ``launcher``, ``exact``, ``predicted_seconds``
      (a step; None: not known), ``step_seconds`` and ``examples_per_second`` (measured, medians; None: not tried),
      ``refused`` (why it cannot run the workload, or None); ``remembered`` (from an earlier run), ``seconds`` (it took)
    - ``proof``: before the start, where a run on several ranks proves itself. ``verdict`` ("begun", and once it is
      settled "equal", "different", "undecided" or "not proved"), ``sentence`` (the answer in words), ``seconds`` (it
      took), ``remembered`` (an earlier run's)
    - ``start``: ``strategy``, ``launcher`` (as they are typed), ``workers``, ``threads``, ``device``, ``parameters``
      (how many), ``examples`` (in the training set), ``batch_size`` (at most ``examples``), ``steps`` (planned in all),
      ``steps_per_epoch``, ``first_step`` (0, or where a resumed run goes on), ``resumed`` (bool),
      ``proof`` (what a ``proof`` event has, or None: one rank, or it was not asked for), ``frames`` (steps of
      environments in an example, where the network makes its examples by what it does)
    - ``step``: sampled, a few a second at most. ``values``: every named value since the previous event of this kind,
      one list a name, the last belonging to ``step``: ``{"loss": [2.30, 2.28, ...]}``; ``examples_per_second``
      (global, since the previous one), ``learning_rate``
    - ``speed``: sampled, one a rank. ``rank``, ``examples_per_second`` (its own), and seconds a step since the
      previous one: ``loading``, ``computing``, ``waiting`` (in collectives), ``updating``
    - ``rollouts``: sampled, one a rank, where the network makes its examples by what it does. ``rank``, ``frames``
      (steps of environments, its own, of this sitting), and since the previous one: ``frames_per_second`` (its own),
      ``environment`` and ``acting`` (seconds an example, in the environments and in the network; both are parts of
      ``loading``), ``episodes`` (that ended), ``score`` and ``length`` (their means; None: none ended)
    - ``drift``: steps take 20 % more or less than they should, or again what they should; where that is known only
      roughly, ten times as much. ``cause`` (one line), ``ratio``, ``step_seconds``, ``expected_seconds``
    - ``evaluation``: ``metrics`` (``{"accuracy": 0.97}``), ``final`` (bool), ``best`` (bool: the best so far)
    - ``checkpoint``: ``path``, ``seconds`` (it took), ``bytes``
    - ``fault``: ``rank`` (None: a host with all its ranks), ``cause`` (one line), ``traceback`` (text or None),
      ``action`` (what was decided)
    - ``end``: ``reason`` ("finished", "stopped", "interrupted"), ``examples_per_second``, ``metrics`` (the last),
      ``run_dir``, ``resume`` (how to go on, or None), ``why`` (interrupted: why the last update could not be saved)
    """

    kind: EventKind
    """The kind of the event, of which the class lists what ``data`` holds."""
    step: int
    """The number of updates done in all when the event happened."""
    epoch: float
    """The number of epochs done in all, with the fraction of the current one."""
    seconds: float
    """The seconds since the run (this sitting of it) started. A ``start`` event has those before the first step."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The details of the event by name, plain values as in JSON."""

    def __getattr__(self, name: str) -> Any:
        """The value of ``data`` under a name that is not a field."""
        data = vars(self).get("data", {})
        if name in data:
            return data[name]
        kind = vars(self).get("kind")
        raise AttributeError(f"an event of kind {kind!r} has no {name!r}: it has {', '.join(data) or 'no data'}")


def event_after(last: Event | None, kind: Any, seconds: float, data: Mapping[str, Any]) -> Event:
    """Returns an event that the observer of a run adds itself: of the step at which the last one was."""
    step, epoch = (last.step, last.epoch) if last is not None else (0, 0.0)
    return Event(kind=kind, step=step, epoch=epoch, seconds=seconds, data=data)


@dataclass(frozen=True, kw_only=True)
class Result(Event):
    """What a whole run came to: its ``end`` event."""

    def __str__(self) -> str:
        """What it came to in one line of words, as ``print`` shows it."""
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        speed = f"{self.examples_per_second:,.0f} examples/s"
        return f"{self.reason} at step {self.step:,}{metrics}, {speed}, in {self.run_dir}"

    def _repr_html_(self) -> str:
        """What it came to as a notebook shows it."""
        return html_facts([
            ("run", f"{self.reason} at step {self.step:,}, epoch {self.epoch:.4g}"),
            *((f"test {name}", f"{value:.4g}") for name, value in self.metrics.items()),
            ("examples/s", f"{self.examples_per_second:,.0f}"),
            ("run directory", str(self.run_dir)),
            *([("go on", str(self.data["resume"]))] if self.data.get("resume") else []),
        ])  # fmt: skip

    @property
    def run_dir(self) -> Path:
        """The directory of the run, for ``apportion.load``."""
        return Path(self.data["run_dir"])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last evaluation, by name; empty where nothing was evaluated."""
        return dict(self.data["metrics"])

    @property
    def examples_per_second(self) -> float:
        """The examples that all workers together have trained on in a second."""
        return float(self.data["examples_per_second"])

    @property
    def reason(self) -> str:
        """Why the run ended: "finished", "stopped" or "interrupted"."""
        return str(self.data["reason"])
