"""Standard streams that outlive what they lead to: a terminal that has gone away, a pipe without a reader.

A training goes on for hours after the window that started it was closed. What is printed from then on is dropped, and
nothing else changes. Other errors, a full disk among them, are raised as ever: what was printed to a file may be the
result.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

_GONE = frozenset((errno.EIO, errno.EPIPE, errno.ENXIO, errno.EBADF, errno.ECONNRESET))
"""What a write raises where its terminal, pipe or socket is gone."""


class _Lasting(io.FileIO):
    """A descriptor that leads nowhere from the first write on that finds its other end gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            # The descriptor keeps its number, so that C code and children drop their output as well.
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes


def outlive_terminal() -> None:
    """Let this process, and what it forks, print to standard output and error for as long as they are read, and drop
    what comes later. For processes of this package alone: a program that imports it keeps its own streams."""
    _open_closed()
    sys.stdout = _lasting(sys.stdout, 1)
    sys.stderr = _lasting(sys.stderr, 2)


def _open_closed() -> None:
    """Open the standard descriptors that were closed when the process began: a socket that gets their number would be
    printed to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)


def _lasting(stream: Any, number: int) -> Any:
    """Returns a stream like this one, of the same descriptor. One that the program has put in the place of Python's
    own stays."""
    if stream is None:  # Python's word for a descriptor that was closed
        return io.TextIOWrapper(io.BufferedWriter(_Lasting(number, "wb", closefd=False)), "utf-8", "backslashreplace")
    if not isinstance(stream, io.TextIOWrapper) or isinstance(getattr(stream.buffer, "raw", stream.buffer), _Lasting):
        return stream
    try:
        if stream.fileno() != number:
            return stream
    except OSError:  # it has none: what is printed stays in memory
        return stream
    with suppress(OSError):
        stream.flush()
    raw = _Lasting(number, "wb", closefd=False)
    buffer: Any = raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
