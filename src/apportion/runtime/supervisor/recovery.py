"""Watches a worker pool in a thread of its own: lost workers are replaced whatever the body of the user's loop does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from apportion.comm.channel import Message
from apportion.errors import ApportionError
from apportion.runtime.supervisor.failures import (
    Action,
    Finish,
    GoOn,
    Notice,
    Replace,
    Restart,
    Shrink,
    Stop,
    WorkerLost,
)
from apportion.runtime.supervisor.rank_pool import OpenChange, RankPool
from apportion.runtime.supervisor.watchdog import LOOK_SECONDS, Allowance

ANSWER_SECONDS = 0.001
"""The seconds between two looks at which ranks have answered that another is lost."""
STEP_SECONDS = 0.002
"""The seconds between two looks whether the training goes on."""
SPARE_SECONDS = 0.5
"""The seconds from the first step to the start of a spare: the run's start is over by then, and a short run needs
none."""
SPARES = 5
"""The number of spares that are started in a run at most, where they are lost too."""
LEAVE_SECONDS = 3.5
"""The seconds that the workers that are left may take to save the last update before a run is stopped."""
CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class RankMessage:
    """A message that a rank has sent."""

    rank: int
    message: Message


@dataclass(frozen=True)
class Fault:
    """A loss, and what was done about it."""

    loss: WorkerLost
    action: str


News = RankMessage | Fault | Notice | Finish | Stop | Exception
"""The news of a recovery loop; after Finish, Stop or an exception nothing more comes."""


@final
class RecoveryLoop:
    """Listens to a worker pool, does what is decided about its losses, and passes on what the user is to know."""

    def __init__(self, pool: RankPool, *, spares: bool) -> None:
        self._pool, self._spares_left = pool, SPARES if spares else 0
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._closing = False
        self._replaced: _Replaced | None = None
        self._first_step: float | None = None
        self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)
        self._thread.start()

    def news(self, seconds: float) -> News | None:
        """Returns the next news, or None where none comes within this time."""
        try:
            return self._news.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stops looking after the worker pool, and then ends it."""
        # The flag is set before the wake: `_run` is either about to look at it, or is woken from `hear` to do so. The
        # pool is closed from this thread only after the other has ended, since two threads must not reap one process.
        self._closing = True
        self._pool.wake()
        self._thread.join(CLOSE_SECONDS)
        self._pool.close()

    def _run(self) -> None:
        try:
            last = self._until_the_end()
        except Exception as error:
            self._news.put(error)
        else:
            self._report_replaced(at_once=True)
            if last is not None:
                self._news.put(last)

    def _until_the_end(self) -> Finish | Stop | None:
        seconds: float | None = 0.0
        while not self._closing:
            self._pass_on_messages(
                STEP_SECONDS if self._replaced else LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS)
            )
            # Before the decision: what is reported of one loss must not come after the report of the next.
            self._report_replaced()
            self._prepare_spare()
            action = self._pool.action()
            for notice in self._pool.notices():
                self._news.put(notice)
            if isinstance(action, Replace | Shrink | Restart):
                action = self._change(action)
            elif isinstance(action, GoOn) and self._pool.offered():
                action = self._grow()
            if isinstance(action, Finish):
                self._pass_on(self._pool.hear_leaving())
            if isinstance(action, Stop) and action.lost:
                self._save_and_end(action.lost)
            if isinstance(action, Finish | Stop):
                return action
            seconds = action.seconds if isinstance(action, GoOn) else 0.0
        return None

    def _pass_on_messages(self, seconds: float) -> None:
        self._pass_on(self._pool.hear(seconds))

    def _pass_on(self, messages: Iterable[tuple[int, Message]]) -> None:
        for rank, message in messages:
            self._news.put(RankMessage(rank, message))

    # What is lost

    def _change(self, action: Replace | Shrink | Restart) -> Action:
        """Takes the lost workers out of the run, and those that are lost meanwhile, too. Returns what was decided in
        the end, and done."""
        self._report_replaced(at_once=True)
        began = time.monotonic()
        if isinstance(action, Restart):
            self._pass_on(self._pool.restart(action.losses))
            self._report(action.losses, "all workers are started again")
            return GoOn()
        # Nothing is replaced before all others have answered: until then one of them may still write, in memory that a
        # replacement is about to read, what belongs to the old generation.
        lost = [loss.rank for loss in action.losses]
        decided = self._settled(self._pool.open_change(lost), lost)
        self._close_change(decided, began)
        return decided

    def _grow(self) -> Action:
        """Takes in the workers that are offered, between two steps. Returns what was decided in the end, and done."""
        self._report_replaced(at_once=True)
        began = time.monotonic()
        if not self._pool.survives:
            self._pass_on(self._pool.restart(()))
            return GoOn()
        decided = self._settled(self._pool.admit(), [])
        if isinstance(decided, GoOn) and not self._closing:
            self._pool.grow()
        self._close_change(decided, began)
        return decided

    def _close_change(self, decided: Action, began: float) -> None:
        """Closes a change that has settled, with others in the places of the lost, or without them."""
        if isinstance(decided, Replace):
            step = self._pool.step
            away = self._pool.replace(decided.losses)
            self._report_smaller(away)
            if replaced := tuple(loss for loss in decided.losses if loss not in away):
                self._replaced = _Replaced(replaced, began, step)
        elif isinstance(decided, Shrink):
            self._pool.shrink(decided.losses)
            self._report_smaller(decided.losses)

    def _report_smaller(self, losses: Sequence[WorkerLost]) -> None:
        left = self._pool.ranks
        self._report(losses, f"goes on with {left} worker{'s' * (left > 1)}")

    def _settled(self, change: OpenChange, lost: list[int]) -> Action:
        """Waits until all lost workers have ended and all others have left the old world, and returns what is decided
        then. ``lost``: the ranks that are lost so far."""
        while not self._closing:
            # The order matters: what `settled` finds out (a rank that does not answer is a loss) must be part of the
            # decision. Asked the other way round, a change could be closed with a rank in it that is being killed.
            settled = change.settled(lost)
            decided = self._pool.action()
            if isinstance(decided, Finish | Stop | Restart):
                return decided
            if isinstance(decided, GoOn) and settled:
                # Without a loss this change was opened to take workers in. Else the others have finished meanwhile, and
                # are only let go.
                if not lost and not self._pool.finishing:
                    return decided
                self._pool.dismiss()
                self._pass_on(self._pool.hear_leaving())
                return Finish()
            if isinstance(decided, Replace | Shrink):
                # A rank that was lost since the change was opened is not in `lost` yet: it is killed and waited for as
                # well, before the table is written for all losses at once.
                if settled and len(decided.losses) == len(lost):
                    return decided
                lost = [loss.rank for loss in decided.losses]
            self._pass_on_messages(ANSWER_SECONDS)
        return GoOn()

    def _save_and_end(self, lost: Sequence[int]) -> None:
        """Lets the workers that are left save the last update and end, in the little time that there is."""
        self._report_replaced(at_once=True)
        allowed = Allowance(LEAVE_SECONDS)
        change = self._pool.open_change(lost)
        while not change.settled(lost):
            if self._closing or allowed.left < 0:
                return
            self._pass_on_messages(ANSWER_SECONDS)
        self._pool.dismiss()
        self._pass_on(self._pool.hear_leaving(allowed.left))

    def _report_replaced(self, *, at_once: bool = False) -> None:
        """Reports that the training goes on after a loss, once it does. ``at_once``: reports the replacement now,
        whether the training goes on or not."""
        replaced = self._replaced
        if replaced is None:
            return
        if self._pool.step > replaced.step:
            self._report(replaced.losses, f"replaced in {time.monotonic() - replaced.began:.2f} s")
        elif at_once:
            self._report(replaced.losses, "replaced")
        else:
            return
        self._replaced = None

    def _report(self, losses: Sequence[WorkerLost], action: str) -> None:
        reported = set[str]()
        for loss in losses:  # of a host that is lost each of its ranks is one, for one cause
            if loss.cause not in reported:
                reported.add(loss.cause)
                self._news.put(Fault(loss, action))

    def _prepare_spare(self) -> None:
        """Starts the spare that replacements are forked from, once the run is under way, and another one where it was
        lost too."""
        pool = self._pool
        # A spare that could not stand by for this workload would not be able to the next time either.
        if pool.spare is not None and pool.spare.gone:
            self._spares_left = 0 if pool.spare.unfit() else self._spares_left
            pool.spare.close()
            pool.spare = None
        if pool.spare is not None or not self._spares_left or pool.step == 0:
            return
        now = time.monotonic()
        self._first_step = self._first_step or now
        if now - self._first_step >= SPARE_SECONDS:
            self._spares_left -= 1
            try:
                pool.prepare_spare()
            except ApportionError:  # no process is left to be had: the run does without
                self._spares_left = 0


@dataclass(frozen=True)
class _Replaced:
    """Workers that were replaced, for which the time until the next step is not reported yet."""

    losses: tuple[WorkerLost, ...]
    began: float
    step: int
