"""A line on the terminal that shows what the check of a script is doing, and for how long."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType

_CLEAR = "\r\x1b[K"
_SECONDS = 0.5


class ScriptProgress(logging.Handler):
    """A line on standard error, where that is a terminal, that is gone afterwards."""

    def __init__(self, target: str) -> None:
        super().__init__(logging.INFO)
        self._target = target
        self._stage = "starting"
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._logger = logging.getLogger("apportion.script_check")

    def __enter__(self) -> ScriptProgress:
        if sys.stderr is not None and sys.stderr.isatty():
            self._logger.addHandler(self)
            self._logger.setLevel(logging.INFO)
            self._thread = threading.Thread(target=self._draw, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take the stage that the check has reached."""
        self._stage = record.getMessage()

    def _draw(self) -> None:
        while not self._over.wait(_SECONDS):
            seconds = time.monotonic() - self._begun
            sys.stderr.write(f"{_CLEAR}checking {self._target}: {self._stage}, {seconds:.0f} s")
            sys.stderr.flush()
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
