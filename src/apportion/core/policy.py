"""The policy of a run: how often it saves, and what it does when a worker is lost or a loss is not finite."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, final

from apportion.core.value import Value


@final
@dataclass(frozen=True, repr=False)
class Policy(Value):
    """The policy that keeps a run safe."""

    checkpoint_every: str | None = None
    """The interval between checkpoints: "30 s", "20 steps" or "1 epoch"; None: every 2 s, or less often where that
    would cost over 5 % of the time."""
    keep: int = 2
    """The number of checkpoints that are kept, besides the best."""
    max_restarts: int = 10
    """The number of workers that a run may lose, where its strategy survives that; the next loss ends it, with a
    checkpoint."""
    on_loss: Literal["replace", "shrink"] = "replace"
    """The answer to the loss of a worker: put another worker in its place, or go on with those that are left."""
    copies: int = 1
    """The number of hosts that keep the checkpoints: with 2 those of a host that is lost are on another one, too."""
    host_grace: str = "4 s"
    """The time from the suspicion that a host is lost, since nothing is heard of it, until the others go on without it.
    Until then a cable that is cut only makes the run pause."""
    on_host_loss: Literal["shrink", "wait"] = "shrink"
    """The answer to the loss of a host: go on with those that are left, until it can be reached again, or wait for it,
    so that all steps are made by as many workers."""
    host_wait: str = "600 s"
    """The time for which a lost host is waited for under "wait"; then the run ends, with a checkpoint."""
    on_nan: Literal["stop", "warn", "ignore"] = "stop"
    """The effect of a loss that is not finite: it ends the run, it is reported once, or nothing looks at it. Under
    "stop" and "warn" a state with a weight that is NaN is never written over a checkpoint."""

    requeue: bool = False
    """True has Slurm requeue the job, once a run that was signalled to end is saved."""

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None:
            self.interval()
        self._must_be_whole("keep", unit="checkpoint")
        self._must_be_whole("copies", unit="host")
        if not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts!r} must be a whole number of workers, 0 or more")
        if self.on_loss not in ("replace", "shrink"):
            raise ValueError(f'on_loss={self.on_loss!r} must be "replace" or "shrink" (go on with fewer workers)')
        if self.on_host_loss not in ("shrink", "wait"):
            raise ValueError(
                f'on_host_loss={self.on_host_loss!r} must be "shrink" (go on with the hosts that are left) or "wait"'
            )
        self.grace_seconds()
        self.wait_seconds()
        if not isinstance(self.requeue, bool):
            raise ValueError(f"requeue={self.requeue!r} must be True or False")
        if self.on_nan not in ("stop", "warn", "ignore"):
            raise ValueError(f'on_nan={self.on_nan!r} must be "stop" (the run ends), "warn" or "ignore"')

    def grace_seconds(self) -> float:
        """``host_grace`` in seconds."""
        return self._seconds("host_grace", "4 s")

    def wait_seconds(self) -> float:
        """``host_wait`` in seconds."""
        return self._seconds("host_wait", "600 s")

    def _seconds(self, name: str, example: str) -> float:
        match = re.fullmatch(r"\s*(\d+\.?\d*)\s*s\s*", str(getattr(self, name)))
        if match is None:
            raise ValueError(f'{name}={getattr(self, name)!r} must be a number of seconds, like "{example}"')
        return float(match[1])

    def interval(self) -> tuple[float, str] | None:
        """The interval as (number, "s" | "steps" | "epochs"), None for automatic."""
        if self.checkpoint_every is None:
            return None
        match = re.fullmatch(r"\s*(\d+\.?\d*)\s*(s|steps?|epochs?)\s*", str(self.checkpoint_every))
        if match is None or float(match[1]) <= 0:
            raise ValueError(f'checkpoint_every={self.checkpoint_every!r} must be like "30 s", "20 steps" or "1 epoch"')
        unit = match[2] if match[2] == "s" else match[2].rstrip("s") + "s"
        return float(match[1]), unit
