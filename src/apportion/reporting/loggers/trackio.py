"""trackio: a run of Trackio, which keeps its own files on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from apportion.core.event import Event
from apportion.errors import ApportionError
from apportion.reporting.logger import Log, Logger


@final
@dataclass(frozen=True, repr=False)
class Trackio(Logger):
    """Logs to Trackio, whose dashboard is ``trackio show``."""

    project: str = "apportion"
    """The name of the project."""
    name: str | None = None
    """The name of the run; None: Trackio makes one up."""

    def open(self, run: Mapping[str, Any]) -> Log:
        try:
            import trackio
        except ModuleNotFoundError as error:
            raise ApportionError("Trackio is not installed: pip install trackio") from error
        config = {name: value for name, value in run.items() if isinstance(value, str | int | float)}
        return _TrackioRun(trackio.init(project=self.project, name=self.name, config=config, embed=False))


@final
class _TrackioRun(Log):
    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, event: Event, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=event.step)

    def close(self, reason: str) -> None:
        self._run.finish()
