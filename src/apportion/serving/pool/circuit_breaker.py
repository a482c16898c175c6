"""The circuit breaker of a member: one that keeps missing deadlines is left out, and asked now and then whether it is
back.

::

    closed  -- `misses` in a row -->  open  -- after `rest` -->  half open: a request probes it without waiting for it
      ^                                ^                           |
      |                                +--- late: rests longer ----+
      +------------------- in time --------------------------------+

(Nygard, "Release It!", 2007.) All of it is pure: it is given what has happened and what time it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BreakerConfig:
    """The settings of a member's circuit breaker."""

    misses: int = 3
    """The number of deadlines missed in a row after which a member is no longer waited for."""
    rest: float = 0.25
    """The seconds until a member that is left out is probed."""
    longest: float = 4.0
    """The longest rest in seconds: rests double up to it while probes come back late, and where a member was left out
    again before it had been back for ``proven`` seconds."""
    proven: float = 10.0

    def __post_init__(self) -> None:
        if self.misses < 1:
            raise ValueError(
                f"misses={self.misses} must be at least 1: after that number in a row a member is left out"
            )
        for name in ("rest", "longest", "proven"):
            if getattr(self, name) <= 0.0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive: it is a time in seconds")
        if self.longest < self.rest:
            raise ValueError(
                f"longest={self.longest} is shorter than rest={self.rest}, the rest that longer ones begin with: use "
                f"longest>={self.rest}"
            )


@dataclass(frozen=True, kw_only=True)
class Breaker:
    """The state of a member's circuit breaker."""

    patience: BreakerConfig = BreakerConfig()
    missed: int = 0
    """The number of deadlines that the member has missed in a row."""
    open_since: float | None = None
    closed_since: float = float("-inf")
    rest: float = 0.0
    """The length of the last rest in seconds; 0 where the member never was left out."""
    probing: bool = False

    def state(self, now: float) -> Literal["closed", "open", "half_open"]:
        """Return the state. closed: the member is waited for. open: it is not asked. half_open: it is asked, and not
        waited for."""
        if self.open_since is None:
            return "closed"
        return "half_open" if self.probing or now >= self.open_since + self.rest else "open"

    def probe_due(self, now: float) -> bool:
        """Return whether the next request should probe the member."""
        return not self.probing and self.state(now) == "half_open"

    def probed(self) -> Breaker:
        """Return the breaker after a probe has been sent to the member."""
        return replace(self, probing=True)

    def in_time(self, now: float) -> Breaker:
        """Return the breaker after the member has answered before the deadline."""
        if self.open_since is not None:
            return replace(self, missed=0, open_since=None, closed_since=now, probing=False)
        return replace(self, missed=0) if self.missed else self

    def late(self, now: float) -> Breaker:
        """Return the breaker after the member was asked and had not answered at the deadline, or kept all others
        waiting."""
        if self.open_since is not None:
            return self._opened(now) if self.probing else self
        missed = self.missed + 1
        return replace(self, missed=missed) if missed < self.patience.misses else self._opened(now)

    def refused(self) -> Breaker:
        """Return the breaker after the member could not be asked, so that a probe that was due is not counted as
        sent."""
        return replace(self, probing=False) if self.probing else self

    def fresh(self, now: float) -> Breaker:
        """Return the breaker after another process has taken the member's place: what is known of the last one does not
        hold for it."""
        return Breaker(patience=self.patience, closed_since=now)

    def _opened(self, now: float) -> Breaker:
        # Rests double after a late probe, and for a member that was left out again soon after it had come back; one
        # that has been in time for ``proven`` seconds starts from the shortest rest.
        again = self.open_since is not None or now - self.closed_since < self.patience.proven
        rest = min(self.patience.longest, 2 * self.rest) if again and self.rest else self.patience.rest
        return replace(self, missed=0, open_since=now, rest=rest, probing=False)
