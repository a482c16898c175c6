"""A change of who is in a run, from its opening until its table can be written (see comm/membership.py)."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import final

from apportion.comm.membership import Membership
from apportion.errors import WorkerFailed
from apportion.runtime.supervisor.rank_pool import OpenChange, PoolHistory
from apportion.runtime.supervisor.watchdog import Watchdog
from apportion.runtime.supervisor.worker_channels import WorkerChannels

KILL_SECONDS = 30.0
"""The seconds that a killed worker may take to end: it is not replaced before, since it could write to what it
shares."""


@final
class MembershipChange(OpenChange):
    """An open change of the membership: the lost are killed, and all others have to answer."""

    def __init__(self, channels: WorkerChannels, members: Membership, watch: Watchdog, history: PoolHistory) -> None:
        self._channels, self._members, self._history = channels, members, history
        members.open_change()
        self._silence = watch.silence()

    def settled(self, lost: Collection[int]) -> bool:
        """Tells whether the lost have been waited for, and all others have answered or ended. A rank that does not
        answer is ended. Raises WorkerFailed where a killed process has not ended within KILL_SECONDS."""
        channels = self._channels
        listened = {channels.rank_of(slot) for slot in channels.open_slots()}
        asked = [r for r in listened.difference(lost) if not self._members.acknowledged(channels.slots[r])]
        late = self._silence.broken_by(asked, time.monotonic()) if asked else None
        if late is not None:
            self._history.add(late)
            channels.kill(late.ranks)
        undead = listened.intersection(lost)
        channels.kill(undead)  # also who was found to be lost since the change was opened
        if undead and self._history.quiet > KILL_SECONDS:
            raise WorkerFailed(
                f"rank {min(undead)} was killed, and has not ended within {KILL_SECONDS:.0f} s: it waits for a "
                "device, or the process that it was forked from is stopped"
            )
        return not asked and not undead
