"""wandb: a run of Weights & Biases, in its service or offline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from apportion.core.event import Event
from apportion.errors import ApportionError
from apportion.reporting.logger import Log, Logger


@final
@dataclass(frozen=True, repr=False)
class Wandb(Logger):
    """Logs to Weights & Biases."""

    project: str = "apportion"
    """The name of the project."""
    name: str | None = None
    """The name of the run; None: the service makes one up."""
    mode: Literal["online", "offline"] | None = None
    """"offline" writes below ``folder``, for ``wandb sync``; None: as WANDB_MODE says."""
    folder: str | None = None
    """Where the files are written; None: ``wandb/`` in the current folder."""

    def open(self, run: Mapping[str, Any]) -> Log:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ApportionError("Weights & Biases is not installed: pip install wandb") from error
        config = {name: value for name, value in run.items() if isinstance(value, str | int | float)}
        begun = wandb.init(project=self.project, name=self.name, mode=self.mode, dir=self.folder, config=config)
        return _WandbRun(begun)


@final
class _WandbRun(Log):
    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, event: Event, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=event.step)

    def close(self, reason: str) -> None:
        self._run.finish(exit_code=0 if reason in ("finished", "stopped") else 1)
