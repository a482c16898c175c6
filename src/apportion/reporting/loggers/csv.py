"""csv: a table of scalars that every program reads."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from apportion.core.event import Event
from apportion.errors import ApportionError
from apportion.reporting.logger import Log, Logger

COLUMNS = ("step", "epoch", "seconds", "name", "value")


@final
@dataclass(frozen=True, repr=False)
class Csv(Logger):
    """Writes a line for each scalar, ``step,epoch,seconds,name,value``; a run that is resumed goes on in its file."""

    positional: ClassVar[tuple[str, ...]] = ("path",)

    path: str = "metrics.csv"
    """The path of the file; its folder must be there."""

    def open(self, run: Mapping[str, Any]) -> Log:
        return _Table(Path(self.path), go_on=bool(run["first_step"]))


@final
class _Table(Log):
    def __init__(self, path: Path, *, go_on: bool) -> None:
        begins = not (go_on and path.is_file())
        try:
            self._file = open(path, "w" if begins else "a", newline="")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise ApportionError(f"csv(path={str(path)!r}) cannot be written: {error.strerror}") from error
        self._rows = csv.writer(self._file)
        if begins:
            self._rows.writerow(COLUMNS)

    def write(self, event: Event, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._rows.writerow([event.step, f"{event.epoch:.6g}", f"{event.seconds:.6g}", name, repr(value)])
        self._file.flush()

    def close(self, reason: str) -> None:
        self._file.close()
