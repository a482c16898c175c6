"""A conversation of a worker and a server: short messages of whole numbers, and tensors whose sizes both ends know.

Nothing is stored on the word of the other end: who receives a tensor says beforehand where it goes and how long it is.
Any thread may close a conversation; one thread at a time speaks and listens.
"""

from __future__ import annotations

import math
import select
import struct
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from apportion.comm.group import WaitClock
from apportion.comm.network.rank_connection import RankConnection, memory_of, move_until
from apportion.errors import PeerLost

_MESSAGE = struct.Struct("!8q")
NUMBERS = 7
"""The most numbers of a message beside its kind."""
Message = tuple[int, ...]
"""A message: its kind, and NUMBERS numbers."""


@final
class ShardLink:
    """One end of a conversation."""

    def __init__(self, connection: RankConnection, *, clock: WaitClock | None = None) -> None:
        self._connection = connection
        self._clock = clock if clock is not None else WaitClock()
        self._message = bytearray(_MESSAGE.size)

    @property
    def name(self) -> str:
        """What the other end is called in messages of errors."""
        return self._connection.name

    def say(self, kind: int, *numbers: int, tensors: Sequence[Tensor] = ()) -> None:
        """Begins to send a message, and tensors after it, which must stay as they are until ``flush`` returns."""
        padded = (*numbers, *(0 for _ in range(NUMBERS - len(numbers))))
        self._connection.send(memoryview(_MESSAGE.pack(kind, *padded)))
        self.send(*tensors)

    def send(self, *tensors: Tensor) -> None:
        """Begins to send tensors, which are contiguous, and sends what there is room for."""
        for tensor in tensors:
            if tensor.numel():
                self._connection.send(memory_of(tensor))
        self._connection.move()

    def flush(self, seconds: float = math.inf) -> None:
        """Waits until everything has been sent. Raises PeerLost where nothing moves for so many seconds."""
        last = self._connection.started[0]
        self._wait(lambda: self._connection.through[0] >= last, seconds)

    def hear(self, seconds: float = math.inf) -> Message:
        """Waits for the next message. Raises PeerLost where nothing moves for so many seconds."""
        number = self._connection.receive(memoryview(self._message))
        self._wait(lambda: self._connection.through[1] >= number, seconds)
        return _MESSAGE.unpack(self._message)

    def expect(self, kind: int, seconds: float) -> Message:
        """Waits for a message of this kind, and returns its numbers. Raises PeerLost where another one comes."""
        found, *numbers = self.hear(seconds)
        if found != kind:
            raise PeerLost(f"{self.name} answered with message {found} where {kind} was expected")
        return tuple(numbers)

    def take(
        self, tensors: Sequence[Tensor], seconds: float = math.inf, *, arrived: Callable[[int], None] | None = None
    ) -> None:
        """Receives into these tensors, which are contiguous. ``arrived``: called with the number of each as soon as it
        is there. Raises PeerLost where nothing moves for so many seconds."""
        numbers = [self._connection.receive(memory_of(t)) if t.numel() else 0 for t in tensors]
        last, told = max(numbers, default=0), 0

        def tell() -> None:
            nonlocal told
            while arrived is not None and told < len(numbers) and numbers[told] <= self._connection.through[1]:
                arrived(told)
                told += 1

        self._wait(lambda: self._connection.through[1] >= last, seconds, tell)

    def _wait(self, holds: Callable[[], bool], seconds: float, moved: Callable[[], None] | None = None) -> None:
        move_until([self._connection], holds, clock=self._clock, seconds=seconds, moved=moved)

    def has_ended(self) -> bool:
        """Tell whether the other end is gone, while it has nothing to say: it waits for an answer."""
        return bool(select.select([self._connection], [], [], 0.0)[0])

    # Whole objects

    def say_blob(self, kind: int, blob: Tensor, *numbers: int) -> None:
        """Sends a message with bytes whose number the other end does not know: it is the first of its numbers."""
        self.say(kind, blob.numel(), *numbers, tensors=[blob])
        self.flush()

    def take_blob(self, nbytes: int, most: int) -> Tensor:
        """Receives so many bytes that a message has announced. Raises PeerLost where they are more than ``most``."""
        if not 0 <= nbytes <= most:
            raise PeerLost(f"{self.name} announced {nbytes} bytes where {most} are the most")
        blob = torch.empty(nbytes, dtype=torch.uint8)
        self.take([blob])
        return blob

    def close(self) -> None:
        """Ends the conversation: whoever waits in it stops waiting. May be called from any thread."""
        self._connection.close()

    def release(self) -> None:
        """Gives the descriptor back, once nobody waits any more."""
        self._connection.release()
