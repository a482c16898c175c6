"""The contract of a launcher: a value that says where ranks run, and has verbs carried out there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol, Self

from apportion.core.value import Value


class Carried(Protocol):
    """Something that ranks carry out, with a method for each way in which ranks come to run."""

    def on_processes(self, launcher: Any) -> Any:
        """Does it on processes of this machine, which are started for it."""

    def on_running_ranks(self, launcher: Any) -> Any:
        """Does it on ranks that are running already, of which this process is one. All of them call it."""

    def on_hosts(self, launcher: Any) -> Any:
        """Does it on ranks that are started on other hosts for it."""


class Launcher(Value, ABC):
    """Where ranks run. A launcher is a file in ``runtime/launch``, or an entry point of an installed package; nothing
    else asks of which class it is."""

    device: str | None
    """The device type, "cpu" or "cuda"; None: the GPUs where there are any."""
    loaders: int
    """The number of data-loading processes of each worker."""
    launched: ClassVar[bool] = False
    """True where the ranks are running already, and need not be started."""

    @abstractmethod
    def with_workers(self, workers: int) -> Self:
        """Returns this launcher for ``workers`` workers, of each host where there are several. Raises ValueError where
        the ranks are running already."""

    @abstractmethod
    def dispatch(self, carried: Carried) -> Any:
        """Has something done on these ranks, and returns what came of it."""
