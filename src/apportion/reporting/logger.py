"""A logger of runs, which is fed from the events alone: what it is, and the scalars of an event."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from apportion.core.event import Event
from apportion.core.value import Value, value_of

LOGGERS = "apportion.reporting.loggers"
"""The folder of the loggers: one file each."""


class Logger(Value, ABC):
    """A program that keeps the scalars of runs. A value: what it has open lives in the ``Log`` that it opens."""

    @abstractmethod
    def open(self, run: Mapping[str, Any]) -> Log:
        """Begin to log a run. ``run``: the data of its ``start`` event, plain values. ApportionError where the program
        is not installed or cannot be reached."""


class Log(ABC):
    """A run that is being logged."""

    @abstractmethod
    def write(self, event: Event, scalars: Mapping[str, float]) -> None:
        """Log the scalars of an event, by tag."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """End. ``reason``: that of the run's ``end`` event, or "failed"."""


def loggers_of(given: Sequence[Logger | str]) -> list[Logger]:
    """The loggers that are given by themselves or as text. Raises ValueError where one is neither."""
    if isinstance(given, str | Logger):
        raise ValueError(f"loggers={given!r} must be a list: loggers=[{given!r}]")
    return [value_of(one, LOGGERS, Logger) for one in given]


def logged(events: Generator[Event, None, None], loggers: Sequence[Logger]) -> Generator[Event, None, None]:
    """Yields the events, each logged on its way. What a logger raises after the start is a warning: a training does not
    end because a program that watches it does."""
    logs: list[Log] = []
    reason = "failed"
    try:
        for event in events:
            if event.kind == "start":
                logs += [logger.open({**event.data, "first_step": event.step}) for logger in loggers]
            if event.kind == "end":
                reason = str(event.data["reason"])
            if scalars := scalars_of(event):
                for log in [*logs]:
                    try:
                        log.write(event, scalars)
                    except Exception as error:  # of the other program
                        logs.remove(log)
                        kind = type(log).__module__.rpartition(".")[2]
                        warnings.warn(f"{kind} logs no more: {type(error).__name__}: {error}", stacklevel=2)
            yield event
    finally:
        events.close()
        for log in logs:
            try:
                log.close(reason)
            except Exception as error:
                warnings.warn(f"a logger did not end: {type(error).__name__}: {error}", stacklevel=2)


def scalars_of(event: Event) -> dict[str, float]:
    """Return the scalars of this event, by tag. Where there are several values, it is the last: the one
    that belongs to the step."""
    data = event.data
    if event.kind == "step":
        scalars = {name: values[-1] for name, values in data.get("values", {}).items() if values}
        scalars |= {name: data.get(name) for name in ("learning_rate", "examples_per_second")}
    elif event.kind == "speed":
        scalars = {f"worker/{data['rank']}/examples_per_second": data.get("examples_per_second")}
    elif event.kind == "rollouts":
        names = "frames_per_second", "score", "length", "environment", "acting"
        scalars = {f"worker/{data['rank']}/{name}": data.get(name) for name in names}
    elif event.kind == "evaluation":
        scalars = {f"evaluation/{name}": value for name, value in data.get("metrics", {}).items()}
    else:
        scalars = {}
    return {tag: float(value) for tag, value in scalars.items() if isinstance(value, int | float)}
