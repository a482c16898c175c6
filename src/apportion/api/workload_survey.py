"""A survey of a workload while its proof begins: a process beside those of the proof, and what it has found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import final

from apportion.api.proof_workers import ProofRequest
from apportion.errors import ApportionError
from apportion.runtime.launch.local import Local
from apportion.runtime.launched.ranks import Ranks, StepPool
from apportion.runtime.proof.proof import Surveyed
from apportion.runtime.worker.job import Job

WAIT_SECONDS = 1.0
"""The seconds that a proof waits for what a survey has found, at the least."""
READING_SECONDS = 5.0
"""The seconds in which the targets of the data are read, at most: a long run gives its proof more than a few rows
take."""


@final
class WorkloadSurvey:
    """A survey that is under way, or over. Where its process fails, nothing was found, and what was found says so."""

    def __init__(self, pool: StepPool | None, *, tries_loss: bool) -> None:
        self._pool = pool
        self._found: Surveyed | None = None
        self._tries_loss = tries_loss

    @staticmethod
    @contextmanager
    def begun(asked: ProofRequest, *, seconds: float, ranks: Ranks) -> Iterator[WorkloadSurvey]:
        """Starts the survey of the workload that is to be proved, and ends it. The loss is tried where the strategy
        divides batches and is held to one device. ``seconds``: those in which targets are read, READING_SECONDS at
        most; ``ranks``: those beside which the process is started."""
        strategy = asked.chosen.strategy
        tries_loss = strategy.exact and strategy.divides_batches and asked.chosen.ranks > 1
        surveyed = Job(
            workload=asked.workload,
            strategy=strategy,
            device="cpu",
            changes={**asked.changes, "precision": "float64", "compile": False},
            lengths=asked.lengths,
            sent=asked.sent,
            plain=asked.plain,
        )
        with ExitStack() as stack:
            pool = None
            try:
                alone = Local(workers=1, threads=surveyed.threads, device="cpu")
                pool = ranks.start("apportion.runtime.worker.entry:survey", surveyed, alone, asked.importer)
                stack.callback(pool.close)
                seconds = min(seconds, READING_SECONDS)
                pool.send({"kind": "survey", "seconds": seconds, "loss": tries_loss, "ranks": asked.chosen.ranks})
            except (ApportionError, ValueError, OSError):  # the processes of the proof report why
                pool = None
            yield WorkloadSurvey(pool, tries_loss=tries_loss)

    def found(self, seconds: float) -> Surveyed:
        """Returns what was found, for which it waits at most ``seconds``, and WAIT_SECONDS at the least."""
        if self._pool is not None and self._found is None:
            try:
                (answer,) = self._pool.answers("surveyed", max(WAIT_SECONDS, seconds))
            except (ApportionError, ValueError, OSError):
                self._pool = None
            else:
                self._found = Surveyed.from_json({name: answer[name] for name in Surveyed.__dataclass_fields__})
        return self._found or Surveyed(left="its process has not answered" if self._tries_loss else None)
