"""What the workers of one host share, as the agent of that host holds it: memory, their progress, and the page that
says who is in the run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

from apportion.comm.channel import Message, SharedMemoryOwner
from apportion.comm.membership import HostShare, Membership
from apportion.runtime.hosts.protocol.follower import Follower
from apportion.runtime.worker import progress
from apportion.runtime.worker.progress import Progress

LOOK_SECONDS = 0.001
"""The seconds between two looks at which workers have answered a change."""
Send = Callable[[Mapping[str, Any]], None]
Begin = Callable[[Sequence[int]], None]


@final
class HostMembers:
    """The memory of the workers of this host, and their membership. ``address``: where the ranks of all hosts meet,
    were rank 0 on this host. Its methods may be called from any thread."""

    def __init__(self, slots: int, share: HostShare | None, address: str, send: Send) -> None:
        self._memory, self._slots, self._address, self._send = SharedMemoryOwner(), slots, address, send
        self._lines = progress.lines(self._memory.map("progress", progress.NBYTES * slots))
        page = memoryview(self._memory.map("members", Membership.nbytes(slots)))
        self.page = Membership(page, slots)
        if share is not None:  # else the first table that comes takes its workers in
            self.page.begin(share)
        self.follower = Follower(slots if share is not None else 0)
        """What this host makes of the driver's orders."""
        self._held: socket.socket | None = None
        self._lock = threading.Lock()

    def hand_out(self, asked: Message) -> tuple[Message, list[int]]:
        """Returns the answer to a worker that asks for memory, and the descriptors that go with it."""
        reply = {"kind": "shared", "name": asked["name"]}
        try:
            with self._lock:
                return reply, [self._memory.fd(asked["name"], asked["nbytes"])]
        except OSError as error:
            return {**reply, "refused": error.strerror or str(error)}, []

    def progress(self) -> tuple[int, list[list[int]]]:
        """Returns the generation and the numbers of every slot in it, and lets the workers know that this process
        runs."""
        self.page.tick()
        with self._lock:
            lines: list[list[int]] = self._lines.tolist()
            return self.follower.generation, lines

    @property
    def stepped(self) -> bool:
        """True once a worker of this host has made a step."""
        return bool(self._lines[:, Progress.step.index].any())

    # A change

    def open(self, generation: int, living: Collection[int]) -> None:
        """Begins a change, unless the driver's order is an old one, and has each answer to it sent to the driver.
        ``living``: the slots whose processes may still live."""
        with self._lock:
            begins = self.follower.open(generation, living)
        if begins:
            self.page.open_change(generation)
            host, port = self._reserve_port()
            self._send({"kind": "reserved", "generation": generation, "address": host, "port": port})
            threading.Thread(target=self._hear_answers, args=(generation,), daemon=True).start()

    def _hear_answers(self, generation: int) -> None:
        waits = threading.Event()  # never set
        while asked := self._asked(generation):
            for slot in filter(self.page.acknowledged, asked):
                with self._lock:
                    is_new = self.follower.note_answer(slot, generation)
                if is_new:
                    self._send({"kind": "answered", "slot": slot, "generation": generation})
            waits.wait(LOOK_SECONDS)

    def _asked(self, generation: int) -> list[int]:
        """Returns the slots whose workers have not answered this change yet; none where it is over."""
        with self._lock:
            return self.follower.asked if self.follower.generation == generation else []

    def close(self, order: Mapping[str, Any], living: Collection[int], begin: Begin) -> Sequence[int]:
        """Ends the open change by its table; returns the slots whose processes it leaves out, which are to end.
        ``begin``: starts new processes in these slots. A table of another change is left alone."""
        with self._lock:
            taken = self.follower.close(order, living)
            if taken is None:
                return ()
            if order["began"] == order["generation"]:  # with memory of their own
                self._memory.keep("progress", "members")
                self._lines[:] = 0
            for slot in taken.fresh:
                self._lines[slot, [Progress.waiting.index, Progress.begun.index]] = 0
        self._release_port()
        share = HostShare(order["first"], order["size"], order["address"], order["port"])
        # Started before the page is even again: from then on the other ranks wait for these processes.
        begin(taken.fresh)
        self.page.close_change(
            order["slots"], ending=order["ending"], share=share, began=order["began"], saved=order["saved"]
        )
        return taken.left_out

    def _reserve_port(self) -> tuple[str, int]:
        """Keeps a free port until the next table, and returns the address and it."""
        with self._lock:
            self._release_port()
            family = socket.getaddrinfo(self._address, 0, type=socket.SOCK_STREAM)[0][0]
            self._held = socket.socket(family, socket.SOCK_STREAM)
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind((self._address, 0))
            port: int = self._held.getsockname()[1]
            return self._address, port

    def _release_port(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            with suppress(OSError):
                held.close()
