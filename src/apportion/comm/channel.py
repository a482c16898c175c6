"""The channel between a worker and its host's supervisor: JSON lines over a Unix socket, and shared memory."""

from __future__ import annotations

import json
import mmap
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

from apportion.errors import ApportionError

Message = dict[str, Any]

_CHUNK = 1 << 16


class Lines:
    """JSON messages over a stream socket, some with a file descriptor."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any], *fds: int) -> None:
        """Send a message. Raises OSError where the other side is gone."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            # The lock covers the whole message: the descriptors must arrive with the first bytes of their own line.
            if fds:
                sent = socket.send_fds(self.socket, [data], list(fds))
                data = data[sent:]
            if data:
                self.socket.sendall(data)

    def receive(self) -> list[Message] | None:
        """Read once, and return the complete messages so far; None at the end of the stream."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, _CHUNK, 16)
        except OSError:
            return None
        self._fds.extend(fds)
        if not data:
            return None
        self._buffer += data
        if b"\n" not in data:  # a long message is searched once, not again with each piece
            return []
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def take_fd(self) -> int:
        """The oldest descriptor received: it came with the message that says so."""
        return self._fds.pop(0)

    def close(self) -> None:
        # shutdown wakes a thread that is blocked in receive; close alone does not.
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.socket.close()
        while self._fds:
            os.close(self._fds.pop())


class Channel:
    """The worker's end of the channel. Commands of the supervisor arrive in ``commands``; None there means that it is
    gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._lines = Lines(sock)
        self.commands: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[tuple[Message, int | None] | None] = queue.SimpleQueue()
        self._asking = threading.Lock()
        """The lock that is held by the thread that waits for a reply: replies come in the order of what was asked."""
        self._maps: dict[str, mmap.mmap] = {}
        # A daemon: it blocks in ``receive`` until the supervisor is gone, and must not keep the process from ending.
        threading.Thread(target=self._listen, name="channel", daemon=True).start()

    def _listen(self) -> None:
        while (messages := self._lines.receive()) is not None:
            for message in messages:
                if message["kind"] == "shared":
                    self._replies.put((message, None if "refused" in message else self._lines.take_fd()))
                else:
                    self.commands.put(message)
        self.commands.put(None)
        self._replies.put(None)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the supervisor."""
        self._lines.send(message)

    def shared(self, name: str, nbytes: int) -> memoryview:
        """Return the memory of ``World.shared``. The wait has no deadline: a supervisor that runs answers at once, one
        that is stopped (by a debugger, or with its container) answers when it goes on, and the end of one closes the
        channel. ApportionError where it is gone, or cannot have the memory."""
        with self._asking:
            if name not in self._maps:
                self._maps[name] = self._asked(name, nbytes)
            return memoryview(self._maps[name])

    def _asked(self, name: str, nbytes: int) -> mmap.mmap:
        self.send({"kind": "shared", "name": name, "nbytes": nbytes})
        while True:
            reply = self._replies.get()
            if reply is None:
                self._replies.put(None)  # for the thread that asks next
                raise ApportionError(f"the supervisor was gone before it gave the shared memory {name}")
            message, fd = reply
            if fd is None:
                raise ApportionError(
                    f"{nbytes:,} bytes of shared memory for {name} cannot be had: {message['refused']}"
                )
            try:
                if message["name"] == name:  # another one is of a wait that was cut off
                    return mmap.mmap(fd, nbytes)
            finally:
                os.close(fd)  # the mapping keeps one of its own

    def close(self) -> None:
        """Close the channel to the supervisor."""
        self._lines.close()


def memory_file(name: str) -> int:
    """The descriptor of a new file in memory that has no path."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"apportion-{name}", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


class SharedMemoryOwner:
    """The supervisor's end of ``World.shared``: unnamed files in memory, gone with the last process that maps them."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def fd(self, name: str, nbytes: int) -> int:
        """The descriptor of the named memory, made on first request."""
        if name not in self._files:
            self._files[name] = memory_file(name)
            os.ftruncate(self._files[name], nbytes)
        return self._files[name]

    def map(self, name: str, nbytes: int) -> mmap.mmap:
        """Map the named memory in this process."""
        return mmap.mmap(self.fd(name, nbytes), nbytes)

    def keep(self, *names: str) -> None:
        """Let go of all other memory: who asks for it again is given new memory, which is zeroed."""
        for name in self._files.keys() - set(names):
            os.close(self._files.pop(name))

    def close(self) -> None:
        """Let go of all memory; ranks that map it keep it."""
        self.keep()
