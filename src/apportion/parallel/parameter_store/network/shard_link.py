"""A conversation of a worker and a server: short messages of whole numbers, and tensors whose sizes both ends know.

Nothing is stored on the word of the other end: who receives a tensor says beforehand where it goes and how long it is.
It is received by one call of the system, straight into its place. What is sent leaves as far as there is room for it,
so that a server goes on while a worker is slow. Any thread may close a conversation; one thread at a time speaks and
listens.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from apportion.comm.network.address import is_readable
from apportion.comm.network.rank_connection import WAKE_BYTES, PeerSocket, memory_of
from apportion.errors import PeerLost

_MESSAGE = struct.Struct("!8q")
_SECONDS = struct.Struct("@ll")
NUMBERS = 7
"""The most numbers of a message beside its kind."""
Message = tuple[int, ...]
"""A message: its kind, and NUMBERS numbers."""
_LONGEST = 1 << 30
"""The most seconds of a deadline that is passed to the system."""


@final
class ShardLink(PeerSocket):
    """One end of a conversation. ``name``: what the other end is called in messages of errors."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        super().__init__(sock, name)
        sock.settimeout(None)
        self._message = bytearray(_MESSAGE.size)
        self._sends: deque[memoryview] = deque()
        self._seconds = math.inf

    # What is sent

    def send_message(self, kind: int, *numbers: int, tensors: Sequence[Tensor] = ()) -> None:
        """Begins to send a message, and tensors after it, which must stay as they are until ``flush`` returns, or an
        answer has come."""
        padded = (*numbers, *(0 for _ in range(NUMBERS - len(numbers))))
        self._sends.append(memoryview(_MESSAGE.pack(kind, *padded)))
        self.send(*tensors)

    def send(self, *tensors: Tensor) -> None:
        """Begins to send tensors, which are contiguous, and sends what there is room for."""
        self._sends.extend(memory_of(tensor) for tensor in tensors if tensor.numel())
        self._push(socket.MSG_DONTWAIT)

    def flush(self, seconds: float = math.inf) -> None:
        """Wait until everything has been sent. Raises PeerLost where nothing can be sent for that many seconds."""
        if self._sends:
            self._wait_at_most(seconds)
            self._push(0)

    def _push(self, flags: int) -> None:
        try:
            while self._sends:
                gone = self._sock.sendmsg([*self._sends][:2], [], flags)
                while gone:
                    first = self._sends[0]
                    if gone < len(first):
                        self._sends[0] = first[gone:]
                        break
                    gone -= len(self._sends.popleft())
        except BlockingIOError as error:
            if not flags:
                raise self._lost(f"nothing could be sent for {self._seconds:.0f} s") from error
        except OSError as error:
            raise self._lost(error.strerror or type(error).__name__) from error

    # What is received

    def receive_message(self, seconds: float = math.inf) -> Message:
        """Waits for the next message, once everything has been sent. Raises PeerLost where nothing comes for that many
        seconds."""
        self.flush(seconds)
        self._wait_at_most(seconds)
        self._fill(memoryview(self._message))
        return _MESSAGE.unpack(self._message)

    def expect(self, kind: int, seconds: float) -> Message:
        """Waits for a message of this kind, and returns its numbers. Raises PeerLost where another one comes."""
        found, *numbers = self.receive_message(seconds)
        if found != kind:
            raise PeerLost(f"{self.name} answered with message {found} where {kind} was expected")
        return tuple(numbers)

    def receive_tensors(
        self, tensors: Sequence[Tensor], seconds: float = math.inf, *, arrived: Callable[[int], None] | None = None
    ) -> None:
        """Receives into these tensors, which are contiguous. ``arrived``: called with the number of each as soon as it
        is there. Raises PeerLost where nothing comes for that many seconds."""
        self._wait_at_most(seconds)
        for number, tensor in enumerate(tensors):
            if tensor.numel():
                self._fill(memory_of(tensor))
            if arrived is not None:
                arrived(number)

    def _fill(self, into: memoryview) -> None:
        most = len(into) - WAKE_BYTES
        if most > WAKE_BYTES and self._sock.family != socket.AF_UNIX:  # the system wakes this thread less often
            self._wake_from(WAKE_BYTES)
            try:
                self._fill_all(into[:most])
            finally:
                self._wake_from(1)
            into = into[most:]
        self._fill_all(into)

    def _wake_from(self, nbytes: int) -> None:
        with contextlib.suppress(OSError):  # where the connection has ended, it is found out at once
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _fill_all(self, into: memoryview) -> None:
        while len(into):
            began = time.monotonic()
            try:
                received = self._sock.recv_into(into, len(into), socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise self._lost(f"nothing has come for {self._seconds:.0f} s") from error
            except OSError as error:
                raise self._lost(error.strerror or type(error).__name__) from error
            if not received:
                raise self._lost("it ended")
            if received < len(into) and time.monotonic() - began > self._seconds:
                raise self._lost(f"not all has come within {self._seconds:.0f} s")
            into = into[received:]

    def _wait_at_most(self, seconds: float) -> None:
        if seconds != self._seconds:
            self._seconds = seconds
            whole = 0 if seconds > _LONGEST else max(seconds, 1e-3)
            limit = _SECONDS.pack(int(whole), int(whole % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                with contextlib.suppress(OSError):  # where the connection has ended, it is found out at once
                    self._sock.setsockopt(socket.SOL_SOCKET, option, limit)

    def has_ended(self) -> bool:
        """Tell whether the other end is gone, while it has nothing to say: it waits for an answer."""
        return is_readable(self._sock, 0.0)

    # Whole objects

    def send_blob(self, kind: int, blob: Tensor, *numbers: int) -> None:
        """Sends a message with bytes whose number the other end does not know: it is the first of its numbers."""
        self.send_message(kind, blob.numel(), *numbers, tensors=[blob])
        self.flush()

    def receive_blob(self, nbytes: int, most: int) -> Tensor:
        """Receive the bytes that a message has announced. Raises PeerLost where they are more than ``most``."""
        if not 0 <= nbytes <= most:
            raise PeerLost(f"{self.name} announced {nbytes} bytes where {most} are the most")
        blob = torch.empty(nbytes, dtype=torch.uint8)
        self.receive_tensors([blob])
        return blob
