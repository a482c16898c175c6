"""Ctrl-C and the notice to end during a run: when they are raised, and what is done first."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from apportion.runtime.notice import SAME_SECONDS, RunHandlers, explain, raised_by


class Interrupts:
    """Raises Ctrl-C as KeyboardInterrupt, and the notice to end as ToldToEnd, but once, and not where it would leave a
    process behind.

    ``outside()`` is called before it is raised in the body of the user's loop, with what is going to be raised; what
    that returns is added to it as an explanation. ``notices``: whether the notice to end is raised, too; else it ends
    the process. Nothing is changed where the program has a handler of its own, or runs in another thread than the main
    one."""

    def __init__(self, outside: Callable[[BaseException], str], *, notices: bool = True) -> None:
        self._outside, self._held = outside, False
        self._handlers = RunHandlers(self._on_signal, notices=notices)
        self.outside = False
        """True while the program is in the body of the loop."""
        self.pending = self.again = False
        """The flags that a signal has come, and that it has come a second time."""
        self._number, self._at = 0, 0.0

    def install(self) -> None:
        """Installs the handlers."""
        self._handlers.install()

    def restore(self) -> None:
        """Puts the handlers back that ``install`` has replaced."""
        self._handlers.restore()

    def hold(self) -> None:
        """Holds a signal back: it is only noted, and not raised."""
        self._held = True

    def release(self) -> None:
        """Lets signals be raised again, and raises the one that was noted."""
        # Held again before it is raised: what catches it saves the run and ends processes, and must not be interrupted.
        self._held = False
        if self.pending:
            self._held = True
            raise raised_by(self._number)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._held:
            # A shell passes on the SIGHUP that it gets itself: several of them are no request to end without the save.
            later = number == signal.SIGINT or time.monotonic() - self._at > SAME_SECONDS
            self.again = self.again or (self.pending and later and number != signal.SIGHUP)
            self._remember(number)
            return
        # Held from the first signal on: a second one during the save must cut it short (`again`), not raise out of it.
        self._held = True
        self._remember(number)
        interrupt = raised_by(number)
        if self.outside:
            explain(interrupt, self._outside(interrupt))
            self._held = False  # the run is over: the next one is the program's own
        raise interrupt

    def _remember(self, number: int) -> None:
        if not self.pending:
            self.pending, self._number, self._at = True, number, time.monotonic()
