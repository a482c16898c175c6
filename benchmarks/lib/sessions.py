"""A side that starts processes of its own leads a session, by which they are known and ended, also where it is dead."""

import contextlib
import os
import signal
import time

from parked import Side


def lead_a_session():
    """Of a side, first of all."""
    os.setsid()


def members(session):
    """The processes of a session."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                found.append(pid)
    return found


class SessionSide(Side):
    """A parked side that leads a session. What it has started ends with it, stopped processes too."""

    def __exit__(self, *error):
        sessions = [process.pid for process in self._processes]
        super().__exit__(*error)
        for _ in range(100):
            left = [pid for session in sessions for pid in members(session)]
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
