"""Which hosts can still be heard, which are waited for, and which connections between them were lost: state machines
that read no clock and send nothing.

A host that says nothing is suspected, and given up some time later. Until then a run only pauses: a cable that is cut
for a moment costs nothing but that. Time in which the driver itself could not look does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final

from apportion.errors import WorkerFailed

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
CAUSE_SECONDS = 1.0
"""The seconds in which the loss of a worker or a host may turn out to be the cause."""
MOST_TIMES = 5
"""The number of times that the connections of one step may be lost."""


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


@final
class AbsentHosts:
    """The hosts that a run has lost and waits for. ``limit``: the seconds for which each is; None: no host is waited
    for."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._lost: dict[int, tuple[float, str]] = {}
        self._given_up = False

    def add(self, host: int, now: float, why: str) -> str | None:
        """Notes that a host is lost at this time, in seconds. Returns what is done about it; None: it is not waited
        for."""
        if self._limit is None or self._given_up:
            return None
        self._lost.setdefault(host, (now, why))
        return f"is waited for, {self._limit:g} s at most"

    def remove(self, host: int) -> None:
        """Notes that a host takes part again."""
        self._lost.pop(host, None)

    def overdue(self, now: float) -> str | None:
        """Returns why the run ends, where a host was waited for longer than the limit: from then on none is."""
        late = [why for since, why in self._lost.values() if self._limit is not None and now - since > self._limit]
        if not late:
            return None
        self._given_up = True
        self._lost.clear()
        return f"{late[0]}; it was waited for {self._limit:g} s (host_wait); resume=True goes on"

    def __bool__(self) -> bool:
        """True while a host is waited for."""
        return bool(self._lost)


@final
class TornLinks:
    """The connections between hosts that ranks have reported as lost, though no host and no worker was: the ranks meet
    again, and go on."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._step, self._times = -1, 0

    def note_torn(self, current: bool, now: float) -> None:
        """Notes that a rank has lost a connection. ``current``: in the generation that holds, and no older one."""
        if current and self._since is None:
            self._since = now

    def is_old(self, now: float) -> bool:
        """Tells whether a connection was lost so long ago that nothing else is its cause."""
        return self._since is not None and now - self._since > CAUSE_SECONDS

    def forget(self) -> None:
        """Forgets reports about connections that no rank has any longer, since all ranks have met again."""
        self._since = None

    def note_reconnected(self, step: int) -> None:
        """Notes that all ranks meet again, after this number of steps. Raises WorkerFailed where they have done so too
        often with no step in between."""
        if self._since is not None:
            self._times = self._times + 1 if step == self._step else 1
            self._step = step
        self.forget()
        if self._times > MOST_TIMES:
            raise WorkerFailed(
                f"the connections between the hosts were lost {MOST_TIMES} times at step {step}, and every host still "
                "answers: is the network between them overloaded, or a firewall in the way? resume=True goes on"
            )
