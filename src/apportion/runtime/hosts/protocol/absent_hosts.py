"""The hosts that a run has lost and waits for, as the driver decides it: no clock is read here, and nothing is sent."""

from __future__ import annotations

from typing import final


@final
class AbsentHosts:
    """The hosts that are waited for. ``limit``: the seconds for which each is; None: no host is waited for."""

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
