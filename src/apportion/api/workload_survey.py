"""A look at a run's workload while its proof begins: a process beside those of the proof, and what it has found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import final

from apportion.errors import ApportionError
from apportion.runtime.launch.local import Local
from apportion.runtime.launched.running_ranks import RunningRanks
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.runtime.worker.job import Job

WAIT_SECONDS = 1.0
"""The seconds that a proof waits for what a look has found, at the least."""


@dataclass(frozen=True)
class Surveyed:
    """What a look at a workload has found."""

    rare: tuple[int, ...] = ()
    """The rows that few others are like, the rarest first."""
    read: int = 0
    """The number of rows whose targets were read."""
    of: int = 0
    """The number of rows of the data; 0: they were not looked at."""
    terms: str = ""
    """What the loss terms are, in words."""
    problem: str | None = None
    """What is wrong with the loss where a batch is divided."""
    left: str | None = None
    """Why the loss could not be tried by itself."""

    @property
    def scope(self) -> str:
        """What of the rows and of the loss the look has covered, as the end of a sentence."""
        said = []
        if self.of and self.read == self.of:
            said.append(f"rare rows were looked for among the targets of all {self.of:,}")
        elif self.of:
            share = 100 * self.read / self.of
            said.append(f"rare rows were looked for among the targets of {share:.2g} % of {self.of:,}")
        if self.terms.startswith("derived"):
            said.append(f"loss terms {self.terms}")
        if self.left is not None:
            said.append(f"the loss was not tried by itself: {self.left}")
        return "".join(f"; {text}" for text in said)


@final
class WorkloadSurvey:
    """A look that is under way, or over. Where its process fails, nothing was found: the proof goes on without."""

    def __init__(self, pool: WorkerPool | None) -> None:
        self._pool = pool
        self._found: Surveyed | None = None

    @staticmethod
    @contextmanager
    def begun(
        job: Job, *, threads: int, seconds: float, tries_loss: bool, ranks: RunningRanks | None
    ) -> Iterator[WorkloadSurvey]:
        """Starts the look, and ends it. ``seconds``: those in which targets are read; ``tries_loss``: whether the loss
        is tried; ``ranks``: running ranks, beside which the process is started."""
        looked = replace(
            job, launcher="local", threads=threads, device="cpu", loaders=0, run_dir=None, resume=False, prove=False,
            replaceable=False, changes={**job.changes, "precision": "float64", "compile": False},
        )  # fmt: skip
        with ExitStack() as stack:
            pool = None
            try:
                alone = Local(workers=1, threads=threads, device="cpu")
                pool = WorkerPool(alone, "apportion.runtime.worker.entry:survey", looked, 1)
                stack.callback(pool.close)
                if ranks is not None:
                    stack.enter_context(ranks.beside(pool))
                pool.send({"kind": "survey", "seconds": seconds, "loss": tries_loss})
            except (ApportionError, ValueError, OSError):  # the processes of the proof will tell why
                pool = None
            yield WorkloadSurvey(pool)

    def found(self, seconds: float) -> Surveyed:
        """Returns what was found, for which it waits at most so many seconds."""
        if self._pool is not None and self._found is None:
            try:
                (told,) = self._pool.answers("surveyed", max(WAIT_SECONDS, seconds))
            except (ApportionError, ValueError, OSError):
                self._pool = None
            else:
                named = {name: told[name] for name in ("read", "of", "terms", "problem", "left")}
                self._found = Surveyed(**named, rare=tuple(told["rare"]))
        return self._found or Surveyed()
