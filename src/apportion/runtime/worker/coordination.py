"""The requests that reach a run from outside its loop, and how ranks stop and save at the same step: rank 0 decides,
and announces the step after which it is asked next."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from apportion.comm.group import Group, collective
from apportion.comm.world import World
from apportion.core.event import Event
from apportion.core.policy import Policy
from apportion.core.strategy import Step
from apportion.core.workload import Workload
from apportion.runtime.worker.progress import Progress


@final
class OutsideEvents:
    """Events that are given from one thread and recorded in another. Each has a number, by which one that is given
    twice, since the sender has not learnt that it was recorded, is recorded once."""

    def __init__(self) -> None:
        self._given = queue.SimpleQueue[tuple[int, Event]]()
        self._seen: set[int] = set()
        self._recorded: list[int] = []

    def add_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Adds events, each a mapping of ``number`` and ``event``, its fields; from any thread."""
        for given in events:
            self._given.put((given["number"], Event(**given["event"])))

    def pop_events(self) -> list[tuple[int, Event]]:
        """Returns what was given since the last call, in the order of its numbers."""
        found: dict[int, Event] = {}
        # Only this thread takes from the queue: an event that is seen in it stays there until get().
        while not self._given.empty():
            number, event = self._given.get()
            if number not in self._seen:
                found[number] = event
        self._seen.update(found)
        return sorted(found.items(), key=lambda item: item[0])

    def mark_recorded(self, number: int) -> None:
        """Records that an event has been written."""
        self._recorded.append(number)

    def recorded(self) -> list[int]:
        """Returns the numbers of what has been recorded since the last call."""
        found, self._recorded = self._recorded, []
        return found


ASK_SECONDS = 0.25
"""The seconds between two polls: how long a request to stop may wait for a step that all ranks agree on."""
SAVE_SECONDS, SAVE_SHARE = 2.0, 0.05
"""The seconds between two checkpoints at least, and the share of the time that they take at most, where the policy does
not say how often to save."""


@dataclass
class RunControl:
    """The requests that reach a run from outside its loop, and what the loop shows to those who make them."""

    stop: bool = False
    notice: int = 0
    """The number of the signal by which this rank, or another one, was notified to end; 0: none was."""
    resume: str | None = None
    """How a run goes on that was notified to end."""
    ending: bool = False
    """True once the ranks have agreed to stop."""
    progress: Progress = field(default_factory=Progress)
    """The progress of this rank."""

    outside: OutsideEvents = field(default_factory=OutsideEvents)
    """What another process has seen of this run and this one is to record, where it writes the run directory."""
    begun: threading.Event = field(default_factory=threading.Event)
    """An event that is set once there is a state."""
    save_now: Callable[[], int] = lambda: 0
    """Writes the state after the last update, called from another thread, without waiting for the step under way;
    returns its number. It may be called once ``begun`` is set."""
    opened: Callable[[Workload], None] = lambda workload: None
    """Called by every rank before a strategy is built; it may refuse the run."""
    built: Callable[[Workload, Step], None] = lambda workload, step: None
    """Called by every rank once its step is built; it may refuse the run."""
    settle: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda asked: None
    """Asks whether the run is proved. Called by every rank once its step is built, with ``key`` (rank 0's ``ProofKey``
    as plain JSON, None on the other ranks), ``steps`` and ``parameters``; returns where the run may go on."""
    known: Callable[[Any, int], None] = lambda job, rank: None
    """Called with the job and the rank of this process, once both are known."""
    rejoined: Callable[[World], None] = lambda world: None
    """Called when this rank has its place in a world whose membership has changed."""

    def was_notified(self) -> bool:
        """Tells whether a rank was notified to end by another signal than Ctrl-C: time is short."""
        return self.notice not in (0, signal.SIGINT)


class StepCoordinator:
    """Gives one answer to all ranks, at steps that all know beforehand, so that asking costs one small message a
    while."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        control: RunControl,
        policy: Policy,
        *,
        steps_per_epoch: int,
        done: int,
    ) -> None:
        self._group, self._device, self._control = group, device, control
        interval = policy.interval()
        self._seconds = interval[0] if interval is not None and interval[1] == "s" else None
        self._steps: int | None = None
        if interval is not None and interval[1] != "s":
            self._steps = max(1, round(interval[0] * (steps_per_epoch if interval[1] == "epochs" else 1)))
        self._asked = time.monotonic()
        self._last, self._saved_at, self._gap = done, done, 1
        if not control.progress.saved_at:
            self._note_save()
        self.differ = False
        """True where the last marks were not the same on every rank."""
        self.next = done + 1
        """The step after which ``poll`` is called, by all ranks."""

    def rejoin(self, group: Group, done: int) -> None:
        """Goes on in a world whose membership has changed, where ``poll`` is called before the next step. What was to
        be saved after the last one may not have been."""
        self._group = group
        self._last, self._gap, self.next = done, 1, done
        # The last save may have been lost with the rank that wrote it.
        self._saved_at = min(self._saved_at, max(0, done - 1))

    @collective
    def poll(self, done: int, save_seconds: float, mark: int = 0) -> tuple[bool, bool]:
        """Returns (stop, save), the same on every rank. ``save_seconds``: the seconds that the last checkpoint took;
        ``mark``: a number that is to be the same on every rank (``differ``). Rank 0 decides, but each rank may have
        been notified to end."""
        now, control = time.monotonic(), self._control
        save = self._save_due(done, save_seconds)
        answer = [int(control.stop), int(save), self._next(done, now), control.notice]
        self.differ = False
        if self._group.size > 1:
            # One collective carries all four answers. Columns 0 to 2 count as rank 0 gives them, whose clock decides; a
            # notice counts whichever rank has it.
            gathered = self._group.all_gather(torch.tensor([*answer, mark], dtype=torch.int64, device=self._device))
            self.differ = bool((gathered[:, 4] != gathered[0, 4]).any())
            answer = [*gathered[0, :3].tolist(), int(gathered[:, 3].max())]
        if answer[1]:
            self._note_save()
            self._saved_at = done
        self._asked, self._last, self.next = time.monotonic(), done, answer[2]
        control.notice = answer[3] or control.notice  # one that arrived meanwhile is for the next poll
        control.ending = bool(answer[0] or answer[3])
        return control.ending, bool(answer[1])

    def _save_due(self, done: int, save_seconds: float) -> bool:
        if self._steps is not None:
            return done // self._steps > self._saved_at // self._steps
        interval = self._seconds if self._seconds is not None else max(SAVE_SECONDS, save_seconds / SAVE_SHARE)
        return time.monotonic_ns() - self._control.progress.saved_at >= interval * 1e9

    def _note_save(self) -> None:
        self._control.progress.saved_at = time.monotonic_ns()

    def _next(self, done: int, now: float) -> int:
        seconds_a_step = max(now - self._asked, 1e-9) / max(1, done - self._last)
        # The gap at most doubles: a few fast steps at the start must not put the next poll hours ahead.
        self._gap = max(1, min(2 * self._gap, int(ASK_SECONDS / seconds_a_step)))
        after = done + self._gap
        if self._steps is not None:
            after = min(after, (done // self._steps + 1) * self._steps)
        return after
