"""Which hosts can still be heard: a state machine that is given the time that has passed.

A host that says nothing is suspected, and given up some time later. Until then a run only pauses: a cable that is cut
for a moment costs nothing but that. Time in which the driver itself could not look does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final

SUSPECT_SECONDS, SUSPECT_STEPS = 2.0, 10
"""A host is suspected after it has said nothing for SUSPECT_SECONDS, or SUSPECT_STEPS median steps, whichever is
more."""
START_SECONDS = 10.0
"""The same before the first step: processes import and open data then, and may leave an agent little of its cores."""
LATE_FACTOR = 4.0
"""A host whose words usually come so far apart that this many of such gaps are more than SUSPECT_SECONDS has that
long."""
BEAT_SECONDS = 0.25
"""The seconds after which each end says that it is there."""
_SMOOTH = 0.1


@dataclass(frozen=True)
class Silence:
    """A change in what is thought of a host."""

    host: int
    thought: Literal["suspected", "back", "given up"]
    seconds: float
    """The seconds for which the host has said nothing, or had said nothing."""


@dataclass
class _HostState:
    silent: float = 0.0
    gap: float = BEAT_SECONDS
    suspected: bool = False
    given_up: bool = False


@final
class Liveness:
    """What is thought of each host. ``grace``: the seconds from the suspicion of a host until it is given up."""

    def __init__(self, hosts: Iterable[int], grace: float) -> None:
        self.grace = grace
        """The seconds from the suspicion of a host until it is given up."""
        self._hosts = {host: _HostState() for host in hosts}

    def note_heard(self, host: int) -> list[Silence]:
        """Notes that a host has said something; returns that it is back, where it was suspected."""
        state = self._hosts.get(host)
        if state is None or state.given_up:
            return []
        if not state.suspected:
            state.gap += _SMOOTH * (state.silent - state.gap)
        back = [Silence(host, "back", state.silent)] if state.suspected else []
        state.silent, state.suspected = 0.0, False
        return back

    def pass_time(self, seconds: float, step_seconds: float | None) -> list[Silence]:
        """Lets time pass, and returns what has changed by it. ``step_seconds``: the median of the steps so far; None:
        there were none yet."""
        least = START_SECONDS if step_seconds is None else max(SUSPECT_SECONDS, SUSPECT_STEPS * step_seconds)
        changed = []
        for host, state in self._hosts.items():
            if state.given_up:
                continue
            state.silent += seconds
            limit = max(least, LATE_FACTOR * state.gap)
            if not state.suspected and state.silent > limit:
                state.suspected = True
                changed.append(Silence(host, "suspected", state.silent))
            if state.suspected and state.silent > limit + self.grace:
                state.given_up = True
                changed.append(Silence(host, "given up", state.silent))
        return changed

    def is_suspected(self, host: int) -> bool:
        """Tells whether a host has said nothing for too long."""
        return host in self._hosts and self._hosts[host].suspected

    def forget(self, host: int) -> None:
        """Expects nothing of a host any more."""
        self._hosts.pop(host, None)

    def expect(self, host: int) -> None:
        """Expects a host to say something from now on."""
        self._hosts[host] = _HostState()
