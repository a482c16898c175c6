"""Connections between hosts that were lost though no host and no worker was: the ranks meet again, and go on."""

from __future__ import annotations

from typing import final

from apportion.errors import WorkerFailed

CAUSE_SECONDS = 1.0
"""The seconds in which the loss of a worker or a host may turn out to be the cause."""
MOST_TIMES = 5
"""The number of times that the connections of one step may be lost."""


@final
class TornLinks:
    """The connections between hosts that ranks have reported as lost."""

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
