"""A member as the server sees it: its model, and the process that it has at the moment.

::

    starting --process has the model loaded--> up --its process dies--> down
                                               ^                          |
                                               +---- spare becomes it ----+      its batcher keeps what waits

Everything happens in the event loop's thread; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from apportion.serving.pool.circuit_breaker import Breaker
from apportion.serving.pool.dynamic_batcher import DynamicBatcher, MemberTask
from apportion.serving.pool.frames import Placed
from apportion.serving.pool.worker_handle import WorkerHandle
from apportion.serving.runtimes.runtime import Spec
from apportion.serving.runtimes.source import Source


@dataclass(eq=False)
class Member:
    """A member of the ensemble. ``process_died``: called when its process has ended; the member pool, which gives out
    processes, answers with ``process_started``."""

    source: Source
    batcher: DynamicBatcher
    breaker: Breaker
    process_died: Callable[[Member, WorkerHandle], None]
    state: Literal["starting", "up", "down"] = "starting"
    restarts: int = 0
    """The number of processes that have died since the server was started."""
    inputs: tuple[Spec, ...] = ()
    outputs: tuple[Spec, ...] = ()
    runtime: str = ""
    refusal: str | None = None
    """The reason why the model could not be loaded."""
    missed_at: float = float("-inf")
    """The time at which the member last counted as late."""

    @property
    def name(self) -> str:
        """The name of the member."""
        return self.source.name

    @property
    def process(self) -> WorkerHandle | None:
        """The process that the member has, if any."""
        return self.batcher.process

    @property
    def healthy(self) -> bool:
        """Return whether the member has a process and is waited for."""
        return self.state == "up" and self.breaker.open_since is None

    def process_started(self, process: WorkerHandle, answer: dict[str, Any]) -> None:
        """Take a process that has become this member; ``answer``: what it reported of the model."""
        self.batcher.process_started(process, batched=answer["batched"])
        self.state, process.gone = "up", self._gone
        self.inputs, self.outputs = (tuple(map(Spec.from_json, answer[what])) for what in ("inputs", "outputs"))
        self.runtime = answer["runtime"]
        self.batcher.times.restarted(answer.get("seconds", []))
        self._probe()

    def _probe(self) -> None:
        """Send a first request to the process, which shows that it answers: the sample, or zeros."""
        rows = self.source.rows() or [spec.filled(1) for spec in self.inputs]
        tensors = [Placed(spec.datatype, row) for spec, row in zip(self.inputs, rows, strict=True)]
        self.batcher.submit(MemberTask(tensors, 1, float("inf"), lambda outcome: None, alone=True), first=True)

    def check(self, now: float) -> None:
        """Kill a process that no longer says anything, and drop work that has expired. Called now and then."""
        if (process := self.process) is not None and self.batcher.hung(now):
            process.kill()
        else:
            self.batcher.drop_expired(now)

    def close(self) -> None:
        """Close the member for good, because the server ends."""
        process, self.state = self.process, "down"
        if process is not None:
            process.close()
        self.batcher.close()

    def _gone(self) -> None:
        process, self.state = self.process, "down"
        assert process is not None
        # The pool is informed before the batcher settles the lost requests: a caller that asks again finds the
        # replacement already under way.
        self.restarts += 1
        self.process_died(self, process)
        self.batcher.process_died()
