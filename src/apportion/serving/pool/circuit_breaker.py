"""Who is waited for: a member that keeps missing deadlines is left out, and asked now and then whether it is back.

::

    closed  -- `misses` in a row -->  open  -- after `rest` -->  half open: one request probes it, nobody waits for that
      ^                                ^                           |
      |                                +--- late: rests longer ----+
      +------------------- in time --------------------------------+

(Nygard, "Release It!", 2007.) Pure: told what has happened and what time it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BreakerConfig:
    """With one member."""

    misses: int = 3
    """In a row, until it is no longer waited for."""
    rest: float = 0.25
    """Seconds until it is probed."""
    longest: float = 4.0
    """Rests double up to this while probes come back late, and while it does not stay ``proven`` seconds."""
    proven: float = 10.0

    def __post_init__(self) -> None:
        if self.misses < 1:
            raise ValueError(f"misses={self.misses} must be at least 1: a member is left out after so many in a row")
        for name in ("rest", "longest", "proven"):
            if getattr(self, name) <= 0.0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive: it is a time in seconds")


@dataclass(frozen=True, kw_only=True)
class Breaker:
    """What is known of one member."""

    patience: BreakerConfig = BreakerConfig()
    missed: int = 0
    """In a row."""
    open_since: float | None = None
    closed_since: float = float("-inf")
    rest: float = 0.0
    """The last one, in seconds; 0: it never was out."""
    probing: bool = False

    def state(self, now: float) -> Literal["closed", "open", "half_open"]:
        """closed: waited for. open: not asked. half_open: asked, and not waited for."""
        if self.open_since is None:
            return "closed"
        return "half_open" if self.probing or now >= self.open_since + self.rest else "open"

    def probe_due(self, now: float) -> bool:
        """Should the next request probe it?"""
        return not self.probing and self.state(now) == "half_open"

    def probed(self) -> Breaker:
        """It has been asked."""
        return replace(self, probing=True)

    def in_time(self, now: float) -> Breaker:
        """It has answered before the deadline."""
        if self.open_since is not None:
            return replace(self, missed=0, open_since=None, closed_since=now, probing=False)
        return replace(self, missed=0) if self.missed else self

    def late(self, now: float) -> Breaker:
        """It was asked and had not answered at the deadline, or kept everybody waiting."""
        if self.open_since is not None:
            return self._opened(now) if self.probing else self
        missed = self.missed + 1
        return replace(self, missed=missed) if missed < self.patience.misses else self._opened(now)

    def refused(self) -> Breaker:
        """It could not be asked: who was to probe it has not."""
        return replace(self, probing=False) if self.probing else self

    def fresh(self, now: float) -> Breaker:
        """Another process has taken its place: what is known of the last one does not hold for it."""
        return Breaker(patience=self.patience, closed_since=now)

    def _opened(self, now: float) -> Breaker:
        again = self.open_since is not None or now - self.closed_since < self.patience.proven
        rest = min(self.patience.longest, 2 * self.rest) if again and self.rest else self.patience.rest
        return replace(self, missed=0, open_since=now, rest=rest, probing=False)
