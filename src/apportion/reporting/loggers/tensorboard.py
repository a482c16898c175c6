"""tensorboard: TensorBoard's files of scalars, which a run directory has anyway where the package is installed."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from apportion.core.event import Event
from apportion.errors import ApportionError
from apportion.reporting.logger import Log, Logger, scalars_of
from apportion.runtime.checkpoint.durable_files import NO_ROOM


@final
@dataclass(frozen=True, repr=False)
class Tensorboard(Logger):
    """Writes the scalars of a run into a folder, in TensorBoard's format."""

    positional: ClassVar[tuple[str, ...]] = ("folder",)

    folder: str = "tensorboard"
    """The folder of all runs that are compared; each is written into one of its own below it, named by the time."""

    def open(self, run: Mapping[str, Any]) -> Log:
        log = Scalars(Path(self.folder) / time.strftime("%Y%m%d-%H%M%S"), purge=int(run["first_step"]) or None)
        if not log.is_installed():
            raise ApportionError("TensorBoard's package is not installed: pip install tensorboard")
        return log


@final
class Scalars(Log):
    """TensorBoard's file of scalars, made with its first one: finding and importing tensorboard takes 0.1 s.

    Written by tensorboard's own record writer and not by torch.utils.tensorboard, which imports TensorFlow where that
    is installed (seconds, in which the driver would see no worker die), buffers for two minutes what a killed driver
    then loses, and keeps a thread.
    """

    def __init__(self, folder: Path, *, purge: int | None = None) -> None:
        """``purge``: the step from which on what an earlier sitting recorded is dropped."""
        self._folder = folder
        self._records: Any = None
        self._formats: Any = None
        self._missing = False
        self._purge = purge
        self._full = False

    def record(self, event: Event) -> None:
        """Write the scalars of an event; a start says where the run goes on."""
        if event.kind == "start" and event.data.get("first_step"):
            # What an earlier sitting recorded beyond the checkpoint is done again: TensorBoard drops it.
            self._purge = int(event.data["first_step"]) + 1
        self.write(event, scalars_of(event))

    def write(self, event: Event, scalars: Mapping[str, float]) -> None:
        try:
            self._write(event, scalars)
            self._full = False
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not self._full:
                self._full = True
                warnings.warn(f"the disk is full: {self._folder} misses scalars; make room there", stacklevel=3)

    def _write(self, event: Event, scalars: Mapping[str, float]) -> None:
        if scalars and self._open():
            record = self._formats.Event(step=event.step)
            for tag, value in scalars.items():
                record.summary.value.add(tag=tag, simple_value=value)
            self._keep(record)

    def close(self, reason: str = "") -> None:
        if self._records is not None:
            with suppress(OSError):  # a full disk was reported already
                self._records.close()
            self._records = None
        self._missing = True

    def is_installed(self) -> bool:
        """Tells whether tensorboard can be imported; a file is begun where it can."""
        return self._open()

    def _open(self) -> bool:
        if self._missing or self._records is not None:
            return not self._missing
        try:
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except Exception as error:  # a protobuf that does not fit raises TypeError: no reason to end a training
            self._missing = True
            if not isinstance(error, ModuleNotFoundError):
                warnings.warn(f"no TensorBoard files, importing tensorboard failed: {error}", stacklevel=2)
            return False
        self._formats = event_pb2
        self._folder.mkdir(parents=True, exist_ok=True)
        self._records = RecordWriter(open(self._folder / _scalars_name(), "ab"))  # noqa: SIM115 (closed by close)
        self._keep(event_pb2.Event(file_version="brain.Event:2"))
        if self._purge is not None:
            started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._keep(event_pb2.Event(step=self._purge, session_log=started))
        return True

    def _keep(self, record: Any) -> None:
        record.wall_time = time.time()
        self._records.write(record.SerializeToString())
        self._records.flush()


def _scalars_name() -> str:
    """Return the name of a new file of scalars: TensorBoard takes the files of a folder in the order of their names, so
    the time comes first."""
    return f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
