"""The order in which a run passes on the events that its ranks send."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import pytest

from apportion.core.event import Event
from apportion.runtime.supervisor.run import TrainingRun
from apportion.runtime.worker.job import Job


class Sent(TrainingRun):
    """A run whose ranks are the test."""

    def _open(self) -> None:
        raise NotImplementedError

    def _fail(self, news: Any) -> Generator[Event, None, Exception]:
        raise NotImplementedError

    def _save(self, interrupt: BaseException | None) -> str | None:
        raise NotImplementedError

    def _is_whole(self, finished: Event, why: str | None) -> bool:
        raise NotImplementedError

    def _interrupted_end(self, why: str | None) -> Event:
        raise NotImplementedError

    def _send_stop(self, notice: int) -> None:
        raise NotImplementedError

    def _give_up_left(self) -> None:
        raise NotImplementedError

    def _complete_left(self) -> None:
        raise NotImplementedError

    def passed_on(self, *sent: tuple[int, str]) -> list[tuple[str, int]]:
        """The kinds and the ranks of the events that it yields for these, each a rank and a kind."""
        events = (Event(kind=cast(Any, kind), step=0, epoch=0.0, seconds=0.0, data={"rank": r}) for r, kind in sent)
        return [(found.kind, found.data["rank"]) for event in events for found in self._take_event(0, event)]


@pytest.mark.parametrize("kind", ["speed", "rollouts"])
def test_the_start_comes_before_what_a_rank_that_is_ahead_has_measured(kind: str) -> None:
    run = Sent(cast(Job, None))
    sent = [(1, kind), (2, kind), (0, "start"), (1, kind), (0, "step")]
    assert run.passed_on(*sent) == [("start", 0), (kind, 1), (kind, 2), (kind, 1), ("step", 0)]


def test_after_a_restart_nothing_is_held_back() -> None:
    run = Sent(cast(Job, None))
    sent = [(0, "start"), (0, "step"), (1, "speed"), (0, "start"), (1, "speed")]
    assert run.passed_on(*sent) == [(kind, rank) for rank, kind in sent]
