"""Ctrl-C during a run: when it is raised, and what is done first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class Interrupts:
    """Raises Ctrl-C as KeyboardInterrupt, but once, and not where it would leave a process behind.

    ``outside()`` is called before it is raised in the body of the user's loop; what that returns is told with it.
    Nothing is changed where the program has a handler of its own, or runs in another thread than the main one.
    """

    def __init__(self, outside: Callable[[], str]) -> None:
        self._outside, self._held, self._installed = outside, False, False
        self.outside = False
        """True while the program is in the body of the loop."""
        self.pending = self.again = False
        """The flags that Ctrl-C has come, and that it has come a second time."""

    def install(self) -> None:
        """Installs the handler of Ctrl-C."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True

    def restore(self) -> None:
        """Puts Python's own handler back, where ``install`` has replaced it."""
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    def hold(self) -> None:
        """Holds Ctrl-C back: it is only noted, and not raised."""
        self._held = True

    def release(self) -> None:
        """Lets Ctrl-C be raised again, and raises it now where one was noted."""
        self._held = False
        if self.pending:
            self._held = True
            raise KeyboardInterrupt

    def _note(self, number: int, frame: Any) -> None:
        if self._held:
            self.again, self.pending = self.pending, True
            return
        self._held = self.pending = True
        interrupt = KeyboardInterrupt()
        if self.outside:
            interrupt.add_note(self._outside())
            self._held = False  # the run is over: the next one is the program's own
        raise interrupt
