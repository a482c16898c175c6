"""Waits for the ranks of a pass, and distinguishes ranks that wait for each other from ranks that compute.

A rank has ended when its record says so: its process then stays until it is killed. Ranks hang when, for longer than
any earlier pause of this script, no rank that is still running has recorded anything, used a processor, waited for one,
or waited for a disk. So a busy machine, a large data set or a slow step does not count as a hang.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from apportion.script_check.hangs.states import begun_call
from apportion.script_check.processes import Activity, activity, family, handles, processor_times, rank_processes
from apportion.script_check.record import read_records
from apportion.script_check.recording.stacks import SIGNAL, file_of

SHORTEST = 8.0
"""Seconds without any activity after which ranks that are all inside of collectives count as hanging."""
AFTER_AN_END = 4.0
"""The same, once a rank has ended, for which no rank needs to wait any longer."""
OUTSIDE = 14.0
"""The same, where a rank is not inside of a collective: it may be asleep on purpose."""
SPINNING = 60.0
"""Seconds without a new event after which ranks inside of collectives count as hanging though they use processors, as
NCCL does while it waits."""
TIMES = 8.0
"""How many times as long as the longest pause so far from which the script went on by itself."""
_POLL_SECONDS = 0.1
_LONGEST_POLL_SECONDS = 1.0
"""The most seconds that count between two polls: where more have passed, the machine has stopped this process too."""
_NOTICED = 1.0
"""Processes are not examined in pauses shorter than this, so that watching costs nothing while a script runs."""
_STRAY = 0.15
"""The share of polls that may find a process active in a pause: threads that wake up at intervals."""


@dataclass(frozen=True)
class WaitOutcome:
    """How the wait ended. ``how``: all ranks "ended", they "hang", or the "limit" has passed. ``unfinished``: the ranks
    that have not ended, and of these ``died``: those whose process has. ``quiet``: seconds without activity;
    ``unrecorded``: seconds since any rank recorded an event; ``stacks``: by rank, what ``faulthandler`` has written of
    those that have not ended."""

    how: Literal["ended", "hang", "limit"]
    unfinished: tuple[int, ...] = ()
    died: tuple[int, ...] = ()
    quiet: float = 0.0
    unrecorded: float = 0.0
    stacks: Mapping[int, str] = field(default_factory=dict)


def wait_for_ranks(record: Path, ranks: int, roots: Sequence[int], deadline: float) -> WaitOutcome:
    """Wait until all ranks have ended, or hang, or the deadline has passed.

    ``record``: the folder of their records; ``roots``: the processes that were started, ranks or parents of ranks;
    ``deadline``: of ``time.monotonic()``.
    """
    watch = _Watch(record, ranks, roots)
    while True:
        watch.poll()
        now = time.monotonic()
        hanging = watch.hanging()
        if not watch.running or hanging or now > deadline:
            how: Literal["ended", "hang", "limit"] = "ended" if not watch.running else "hang" if hanging else "limit"
            died = tuple(sorted(watch.died))
            unfinished = tuple(sorted((*watch.running, *died)))
            quiet, unrecorded = watch.now - watch.quiet_since, watch.now - watch.recorded_at
            return WaitOutcome(how, unfinished, died, quiet, unrecorded, watch.stacks())
        time.sleep(_POLL_SECONDS)


class _Watch:
    """The activity of the ranks so far."""

    def __init__(self, record: Path, ranks: int, roots: Sequence[int]) -> None:
        self._record, self._roots = record, roots
        self._ranks = range(ranks)
        self._pids = dict[int, int]()
        self._sizes = dict[int, int]()
        self._last = dict[int, Activity]()
        self._processors = processor_times()
        self._samples = deque[tuple[float, bool]]()
        self._longest = 0.0
        self._inside: tuple[float, bool] = (0.0, False)
        self.running: list[int] = list(self._ranks)
        self.died = set[int]()
        self._polled_at = time.monotonic()
        self.now = self.recorded_at = self.quiet_since = 0.0
        """Seconds of watching, without those in which this process was stopped itself."""

    def poll(self) -> None:
        """Examine the records and, in a pause, the processes."""
        before, self._polled_at = self._polled_at, time.monotonic()
        self.now += min(self._polled_at - before, _LONGEST_POLL_SECONDS)
        now = self.now
        if len(self._pids) < len(self._ranks):
            self._pids |= rank_processes(self._roots)
        ended = [rank for rank in self._ranks if (self._record / f"rank{rank}.end").exists()]
        self.died = {rank for rank in self._ranks if rank not in ended and not self._alive(rank)}
        running = [rank for rank in self._ranks if rank not in ended and rank not in self.died]
        if self._records_changed() or running != self.running:
            # A pause has ended by itself: the script pauses that long without hanging, and only a multiple of it
            # counts.
            self._longest = max(self._longest, now - self.quiet_since if self._samples else 0.0)
            self._samples.clear()
            self._last.clear()
            self.recorded_at = self.quiet_since = now
        self.running = running
        # To read /proc takes time on a machine with many threads, and a rank that records events does not hang.
        if now - self.recorded_at > _NOTICED:
            self._samples.append((now, self._active()))
            self._drop_busy(now)

    def hanging(self) -> bool:
        """Whether the ranks hang."""
        if not self.running:
            return False
        now = self.now
        # Ranks inside of collectives while none of them uses a processor hang. A rank outside of one may sleep on
        # purpose, so it is given longer. Ranks that use processors inside of collectives may spin, as NCCL does, and
        # then only the record shows that nothing goes on.
        shortest = AFTER_AN_END if len(self.running) < len(self._ranks) else SHORTEST
        needed = max(shortest, TIMES * self._longest)
        if now - self.quiet_since > needed:
            return now - self.quiet_since > max(OUTSIDE, needed) or self._all_inside()
        return now - self.recorded_at > max(SPINNING, needed) and self._all_inside()

    def stacks(self) -> dict[int, str]:
        """Returns the Python stacks of the ranks that have not ended, which these are asked for."""
        asked = [self._pids[rank] for rank in self.running if rank in self._pids]
        found = self._request_stacks(asked)
        children = [pid for rank in asked for pid in family(rank) if pid != rank]
        return (
            self._request_stacks(children) if children else found
        )  # after the ranks' own: they write to the same files

    def _request_stacks(self, asked: Sequence[int]) -> dict[int, str]:
        """Asks processes for their stacks; returns the contents of the files of their ranks once these no longer
        change."""
        for pid in asked:
            if handles(pid, SIGNAL):
                with contextlib.suppress(OSError):
                    os.kill(pid, SIGNAL)
        found = dict[int, str]()
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            texts = {rank: self._stack(rank) for rank in self.running if rank in self._pids}
            if texts == found and all(texts.values()):
                break
            found = texts
            time.sleep(_POLL_SECONDS)
        return found

    def _stack(self, rank: int) -> str:
        try:
            return file_of(self._record, rank).read_text(errors="replace")
        except OSError:
            return ""

    def _alive(self, rank: int) -> bool:
        """Whether a rank's process is there, or has yet to be started."""
        pid = self._pids.get(rank)
        return any(map(_running, self._roots)) if pid is None else _running(pid)

    def _records_changed(self) -> bool:
        sizes = dict[int, int]()
        for rank in self._ranks:
            try:
                sizes[rank] = (self._record / f"rank{rank}.pkl").stat().st_size
            except OSError:
                sizes[rank] = 0
        changed, self._sizes = sizes != self._sizes, sizes
        return changed

    def _active(self) -> bool:
        """Whether a rank has used a processor or a disk since the last poll, or waits for one."""
        active = False
        processors = processor_times()
        spare, self._processors = processors.spare(self._processors), processors
        for rank in self.running:
            done = activity(self._pids[rank]) if rank in self._pids else None
            if done is None:
                active = True  # nothing is known of it
                continue
            before = self._last.get(rank)
            self._last[rank] = done
            active = active or (before is not None and done.since(before, spare=spare))
        return active

    def _drop_busy(self, now: float) -> None:
        """Has the pause begin after the last time at which ranks were active, but for stray threads."""
        busy = sum(active for _, active in self._samples)
        # From the oldest poll on, until few enough of the rest are active: the pause begins with the last one dropped.
        while self._samples and busy > max(1, _STRAY * len(self._samples)):
            self.quiet_since, active = self._samples.popleft()
            busy -= active
        if not self._samples:
            self.quiet_since = now

    def _all_inside(self) -> bool:
        """Whether each rank that has not ended is inside of a collective."""
        # Read once in a pause: the records do not change until it ends.
        if self._inside[0] != self.recorded_at:
            records = [each for each in read_records(self._record) if each.rank in self.running]
            inside = bool(records) and all(begun_call(each) is not None for each in records)
            self._inside = self.recorded_at, inside
        return self._inside[1]


def _running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        pass
    if Path("/proc/self").exists():
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
