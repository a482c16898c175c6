"""The server's end of a member's process: it starts the process, sends and receives frames without waiting, and notices
its death.

Every process is a program that is started anew, never a fork of the server, which has threads. It ends with the server,
whatever ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any

from apportion.serving.pool.frames import Arena, Frame, Kind, Reader, decode, encode
from apportion.serving.pool.worker_main import NEVER


class WorkerHandle:
    """The handle of a member's process. ``inbox``: where requests' large tensors lie; the process has an outbox of
    ``outbox_bytes`` for large outputs. ``heard``: called with each frame; ``gone``: called once, when the process or
    its socket has ended."""

    def __init__(
        self,
        inbox: Arena,
        outbox_bytes: int,
        heard: Callable[[Frame], None],
        gone: Callable[[], None],
        *,
        threads: int = 1,
    ) -> None:
        self.heard, self.gone = heard, gone
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        self._outbox = Arena(outbox_bytes)
        fixed = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        command = [sys.executable, "-m", "apportion.serving.pool.worker_main"]
        memories = [(arena.descriptor, arena.nbytes) for arena in (inbox, self._outbox)]
        command += [str(n) for n in (os.getpid(), theirs.fileno(), *chain.from_iterable(memories))]
        with theirs, contextlib.ExitStack() as otherwise:
            otherwise.callback(self._socket.close)
            otherwise.callback(self._outbox.close)
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *(descriptor for descriptor, _ in memories)),
                env={**os.environ, **fixed},
            )
            otherwise.pop_all()  # it is there
        self._socket.setblocking(False)
        self._reader, self._unsent, self._over = Reader(), bytearray(), False
        self._loop.add_reader(self._socket, self._readable)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self.process.pid

    @property
    def over(self) -> bool:
        """Return whether the process's socket has ended."""
        return self._over

    def send(self, frame: bytes) -> None:
        """Send a frame now, or as soon as the process has read what was sent before."""
        if self._over:
            return
        if not self._unsent:
            try:
                frame = frame[self._socket.send(frame) :]
            except BlockingIOError:
                pass
            except OSError:
                # Not at once: ``gone`` settles what is in flight and calls the callers, which must not happen while the
                # one that sends is in the middle of its own loop.
                self._loop.call_soon(self._end)
                return
            if frame:
                self._loop.add_writer(self._socket, self._writable)
        self._unsent += frame

    def send_control(self, what: str, **how: Any) -> None:
        """Send a message in JSON that does not belong to a single request."""
        self.send(encode(Kind.CONTROL, 0, NEVER, text=json.dumps({"what": what, **how}).encode()))

    def kill(self) -> None:
        """Kill the process at once; ``gone`` is called."""
        self.process.kill()

    def close(self) -> None:
        """Close the socket: the process ends by itself when it has read the end of it; ``gone`` is not called."""
        self.gone = lambda: None
        self._end()

    def _readable(self) -> None:
        try:
            received = self._socket.recv_into(self._reader.room)
        except BlockingIOError:
            return
        except OSError:
            received = 0
        if not received:
            self._end()
            return
        for frame in self._reader.advance(received):
            try:
                self.heard(decode(frame, self._outbox.memory))
            except Exception as error:  # of one request: the next frame is another's
                self._loop.call_exception_handler({"message": "an answer was not taken", "exception": error})
            if self._over:
                return

    def _writable(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._end()
            return
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        # The order matters: the loop has to forget the descriptor before it is closed, since the number may be reused
        # by the next socket.
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._outbox.close()
        self.gone()

    async def ended(self, seconds: float) -> bool:
        """Return whether the process ends within ``seconds``; its exit status is collected then."""
        end = self._loop.time() + seconds
        while self.process.poll() is None:
            if self._loop.time() >= end:
                return False
            await asyncio.sleep(0.005)
        return True
