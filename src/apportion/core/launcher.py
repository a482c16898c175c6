"""The contract of a launcher: a value that says where ranks run, and carries verbs out there."""

from __future__ import annotations

from typing import Any, Protocol


class Carried(Protocol):
    """Something that ranks do, which says how it is done on each kind of ranks."""

    def on_processes(self, launcher: Any) -> Any:
        """Does it on processes of this machine, which are started for it."""

    def on_running_ranks(self, launcher: Any) -> Any:
        """Does it on ranks that are running already, of which this process is one. All of them call it."""

    def on_hosts(self, launcher: Any) -> Any:
        """Does it on ranks that are started on other hosts for it."""


class Launcher(Protocol):
    """Where ranks run. A launcher is one file in ``runtime/launch``, or an entry point of an installed package."""

    @property
    def device(self) -> str | None:
        """The device type, "cpu" or "cuda"; None: the GPUs where there are any."""

    @property
    def loaders(self) -> int:
        """The number of data-loading processes of each worker."""

    @property
    def launched(self) -> bool:
        """True where the ranks are running already."""

    def with_workers(self, workers: int) -> Launcher:
        """Returns this launcher for so many workers, of each host where there are several. Raises ValueError where the
        ranks are running already."""

    def dispatch(self, carried: Carried) -> Any:
        """Has something done on these ranks, and returns what came of it."""
