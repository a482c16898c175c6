"""The driver's end of the connection to one agent."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, final

from apportion.runtime.agents.agent_command import NO_FOLDER, NO_PYTHON
from apportion.runtime.agents.hosts_launcher import AgentProcess, HostsLauncher
from apportion.runtime.hosts.frames import ALIVE_SECONDS, FrameError, FrameReader, FrameWriter, Message, check_message

_KEPT_LINES = 20
_LAST_WORDS_SECONDS = 0.5
_END_SECONDS = 2.0
"""The seconds that the process of a connection may take to end after it."""
News = tuple[int, Message | bytes | None]
"""The number of a host, and what its agent has sent; None once the connection has ended."""


@final
class AgentConnection:
    """The connection to the agent of one host. What it sends goes into ``news``; what is to be sent to it is queued, so
    that ``send`` never blocks. ``launcher``: what has started ``process``, the connection."""

    def __init__(
        self, number: int, host: str, launcher: HostsLauncher, process: AgentProcess, news: queue.SimpleQueue[News]
    ) -> None:
        self.number, self.host, self._launcher, self._process, self._news = number, host, launcher, process, news
        self._handing = threading.Lock()
        self.is_up = False
        """True once the agent has begun to speak."""
        self.has_ended = False
        """True once nothing more comes from it."""
        self._broken = ""
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._orders: queue.SimpleQueue[Mapping[str, Any] | bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=call, args=(end,), name=f"{host}-{call.__name__}", daemon=True)
            for call, end in (
                (self._read_frames, process.stdout),
                (self._read_stderr, process.stderr),
                (self._write_frames, process.stdin),
            )
        ]
        for thread in self._threads:
            thread.start()

    def hand_over(self, news: queue.SimpleQueue[News]) -> None:
        """Puts the agent's messages into another queue from now on, and moves those there that were not taken yet."""
        with self._handing:
            # Under the lock that the reader takes for each message: one that it has just read goes to the new queue
            # after those that waited in the old one, and none is left behind.
            before, self._news = self._news, news
            with suppress(queue.Empty):
                while True:
                    news.put(before.get_nowait())

    def _publish(self, message: Message | bytes | None) -> None:
        with self._handing:
            self._news.put((self.number, message))

    def send(self, message: Mapping[str, Any] | bytes) -> None:
        """Has a message sent; one to an agent that is gone is lost."""
        self._orders.put(message)

    def end(self) -> None:
        """Ends the conversation, which ends the agent, its ranks and its folder."""
        self._orders.put(None)

    def wait(self, seconds: float) -> bool:
        """Waits until the agent is gone, and returns whether it is."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def abandon(self) -> None:
        """Ends the connection at once, to a host that is heard no more."""
        self._process.kill()
        self._orders.put(None)

    def close(self) -> None:
        """Ends the connection's process, where it has not ended by itself, and closes this end."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._orders.put(None)
        for thread in self._threads:
            thread.join(_LAST_WORDS_SECONDS)
        files = (self._process.stdout, self._process.stderr, self._process.stdin)
        for thread, file in zip(self._threads, files, strict=True):
            if file is not None and not thread.is_alive():  # else something holds the other end: closing would wait
                try:
                    file.close()
                except OSError:  # what was still to be written to an agent that is gone
                    pass

    def why_ended(self) -> str:
        """Returns why the connection has ended, and the cure."""
        self.wait(_END_SECONDS)
        self._threads[1].join(_LAST_WORDS_SECONDS)
        ended = self._process.poll()
        return ending_text(self._launcher, self.host, ended, list(self._said), is_up=self.is_up, broken=self._broken)

    def _read_frames(self, file: BinaryIO) -> None:
        reader = FrameReader(file)
        try:
            if reader.await_greeting():
                self.is_up = True
                while (message := reader.receive()) is not None:
                    if isinstance(message, dict):
                        check_message(message)
                    self._publish(message)
        except FrameError as error:
            self._broken = str(error)
        except (OSError, ValueError) as error:  # the connection was closed here
            self._broken = str(error)
        except Exception as error:  # whatever an agent sends ends its own connection, and nothing else
            self._broken = f"{type(error).__name__}: {error}"
        if self._broken:
            self._process.kill()  # it is believed no more, and may not end by itself
        self.has_ended = True
        self._publish(None)

    def _read_stderr(self, file: BinaryIO) -> None:
        """Keeps what the launcher's program and the agent say, and passes on what comes while the agent runs."""
        try:
            for line in file:
                text = line.decode(errors="replace").rstrip()
                self._said.append(text)
                if self.is_up and not text.startswith(self._launcher.own_words):
                    sys.stderr.write(f"{self.host}: {text}\n")
        except (OSError, ValueError):  # closed here
            pass

    def _write_frames(self, file: BinaryIO) -> None:
        writer = FrameWriter(file)
        try:
            while (message := self._next_order()) is not None:
                writer.send(message)
            file.close()
        except OSError:  # the agent is gone, and the reader says so
            pass

    def _next_order(self) -> Mapping[str, Any] | bytes | None:
        try:
            return self._orders.get(timeout=ALIVE_SECONDS)
        except queue.Empty:
            return {"kind": "alive"}


def ending_text(
    launcher: HostsLauncher, host: str, status: int | None, said: list[str], *, is_up: bool, broken: str = ""
) -> str:
    """Returns why the connection to an agent has ended, in words, with the cure. ``status``: the exit status of its
    process; ``said``: the last lines of its standard error; ``is_up``: the agent had begun to speak; ``broken``: what
    was wrong with what it sent."""
    lines = [line for line in said if line and not line.startswith("Warning: Permanently added")]
    own = [line for line in lines if not line.startswith(launcher.own_words)]
    last = own[-1].removesuffix(".") if own else ""
    if broken:
        return (
            f"host {host}: what its agent sent is not valid ({broken}); it was let go of: is that an agent of this "
            "release?"
        )
    if (lost := launcher.why_lost(host, status, lines, is_up=is_up)) is not None:
        return lost
    if status == NO_PYTHON:
        return (
            f"host {host} has no Python {last}: install it there, or name an interpreter of that host that has "
            "apportion with python="
        )
    if status == NO_FOLDER:
        return f"host {host}: no folder can be made for the run: {last}"
    if "No module named" in last and "apportion" in last:
        return (
            f"host {host} has no apportion, or an older one ({last}): install the same release there, or name an "
            "interpreter that has it with python="
        )
    if status is not None and status > 128:
        how = f"was ended by {_signal_name(status - 128)}, by hand or by the system"
    else:
        how = f"ended with exit status {status}" + (f" ({last})" if last else "")
    if is_up:
        return f"host {host}: its agent {how}, and its ranks ended with it; resume=True goes on"
    return f"host {host}: its agent {how} before it was ready"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
