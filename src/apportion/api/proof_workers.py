"""The processes of a proof: three worker pools that make the same steps, and the folder in which they leave states."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from apportion.comm.channel import Message
from apportion.core.data.sent_rows import SentRows
from apportion.core.workload import Workload
from apportion.errors import ApportionError, WorkerFailed
from apportion.planner.trials.trial import Candidate
from apportion.runtime.launch.local import Local
from apportion.runtime.launched.ranks import Ranks, StepPool
from apportion.runtime.proof.coarse_rounding import eps_of
from apportion.runtime.proof.limits import ProofLimits
from apportion.runtime.proof.proof import Proof, Surveyed
from apportion.runtime.spawn.template import Spare
from apportion.runtime.worker.job import Job

STEP_SECONDS = 600.0
GRADIENT_STEPS = 2
"""The number of steps of rate 1, which are few, since a network would not stand many."""


@dataclass(frozen=True, kw_only=True)
class ProofRequest:
    """A request to prove a strategy, and how thoroughly."""

    workload: Workload | str
    chosen: Candidate
    steps: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the workload that the run replaces."""
    rows: int = 0
    """The examples in a batch; 0: the workload's own number."""
    rare: tuple[int, ...] = ()
    """The rows that are to be among them, the rarest first."""
    many: bool = False
    """True where a step on as many rows as the run has in a batch, or the most that fit the time, is made at the
    end."""
    short: bool = False
    """True where the proof is made on the beginnings of the sequences."""
    seconds: float | None = None
    """The seconds that the proof may take; None: as long as it does."""
    parameters: int = 0
    """The number of parameters of the network, where that is known before it is built; else 0."""
    least: bool = False
    """True where one step is made whatever the time, and as many more as there is time for, in float64 alone."""
    brief: bool = False
    """True where a first difference is enough."""
    contract: bool = True
    """True where what ranks predict, and the step after a state that was loaded, are compared too."""
    plain: tuple[str, ...] = ()
    """The fast paths that are switched off."""
    lengths: tuple[int, ...] = ()
    """The lengths of the parts of the data, where they are known."""
    sent: SentRows | None = None
    """The rows of the parts that were sent to this host, where other hosts have some of the parts."""
    run_steps: int = 0
    """The number of steps of the run that waits for the proof."""
    share: float = 0.0
    """The share of the run that the proof may take, where that is more than ``seconds``."""
    hosts: int = 1
    """The number of hosts that the ranks run on."""
    then: Callable[[Proof], ProofRequest | None] | None = None
    """What is to be proved by the same processes afterwards, given what was found; it has to be of the same workload.
    Where the time does not suffice for it, what was found stands."""
    added: bool = False
    """True where the answer is added to that of the proof which this one follows, as that of its rare rows; False
    where it takes its place."""
    importer: Spare | None = None
    """The process that those of the proof are forked from; None: each imports the workload's packages by itself."""
    cuts: tuple[str, ...] = ()
    """The layers before which ranks that are running already cut their stages, as the run does."""


@final
class ProofWorkers:
    """The worker pools of a proof, while they run: the strategy's (``tried``), its reference's, and those of a
    reference that is led astray by rounding (``nudged``), where rounding is allowed for."""

    def __init__(
        self,
        asked: ProofRequest,
        limits: ProofLimits,
        ranks: Ranks,
        pools: Sequence[StepPool],
        folder: Path,
    ) -> None:
        """Takes the pools: the strategy's, and those of its references. ``ranks``: those that make the strategy's
        steps."""
        self._asked, self._limits, self._ranks = asked, limits, ranks
        self._pools = list(pools)
        self.tried, self.reference = self._pools[:2]
        self.folder = folder
        """The folder for states: it outlives the processes, any of which may still be writing when another fails."""
        self.linear = False
        """True where every optimizer of the model is plain SGD."""
        self.whole = False
        """True where every rank takes whole batches, and may compute a part of the network alone."""
        self.can_repeat = False
        """True where a step of the strategy can be made again from the state before it."""
        self.batch_size = 0

    @property
    def one_folder(self) -> bool:
        """True where every rank sees the folder of the proof."""
        return self._ranks.one_folder

    @property
    def nudged(self) -> StepPool:
        """The pool of the reference that is led astray by rounding."""
        return self._pools[2]

    @staticmethod
    @contextmanager
    def started(asked: ProofRequest, limits: ProofLimits, precision: str, ranks: Ranks) -> Iterator[ProofWorkers]:
        """Has ``ranks`` build the strategy's step in this precision, and processes beside them its references; ends
        them."""
        tried, *references = _jobs(asked, precision)
        if _replays(asked):
            del references[1:]
        alone = Local(workers=1, threads=references[0].threads, device="cpu")
        entry = "apportion.runtime.worker.entry"
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="apportion-check-"))
            chosen = asked.chosen
            pools = [ranks.begin(tried, chosen.launcher, chosen.ranks, cuts=asked.cuts, importer=asked.importer)]
            stack.callback(pools[0].close)
            for job in references:
                pools.append(ranks.start(f"{entry}:reference", job, alone, asked.importer))
                stack.callback(pools[-1].close)
            yield ProofWorkers(asked, limits, ranks, pools, Path(folder))

    def again(self, precision: str, *, gradients: bool = False, coarse: bool = False, rows: int | None = None) -> None:
        """Lets all of them build anew, in another precision or with other optimizers; ``coarse``: the reference that is
        led astray rounds as the coarsest types of the model do; ``rows``: those of the one step that is made."""
        asked = self._asked if rows is None else replace(self._asked, rows=rows, steps=1)
        self._send(precision, asked, gradients, coarse)
        self.built()

    def _send(self, precision: str, asked: ProofRequest, gradients: bool = False, coarse: bool = False) -> None:
        fields = ("changes", "nudge", "jitter", "coarse", "gradients", "cut", "rows", "rare")
        for pool, job in zip(self._pools, _jobs(asked, precision, gradients, coarse), strict=False):
            pool.send({"kind": "again", "job": {name: getattr(job, name) for name in fields}})

    def take(self, asked: ProofRequest, limits: ProofLimits) -> Message:
        """Lets all of them build for another proof of the same workload; returns what ``built`` does."""
        self._asked, self._limits = asked, limits
        self._send("float64", asked)
        return self.built()

    def built(self) -> Message:
        """Waits until everything is built; returns what the strategy's first rank reports. Raises OutOfMemoryError
        where the proof would not fit."""
        built, *_ = (self.answers(pool, "built")[0] for pool in self._pools)
        self.linear, self.whole, self.batch_size = built["linear"], built["whole"], built["batch_size"]
        self.can_repeat = built["again"]
        must_fit(self._asked, self._limits, built["parameters"], self._ranks)
        return built

    def ask(self, pool: StepPool, order: Mapping[str, Any], kind: str) -> list[Message]:
        """Sends an order to every rank; returns their answers."""
        pool.send(order)
        return self.answers(pool, kind)

    def answers(self, pool: StepPool, kind: str) -> list[Message]:
        """Returns one message of this kind from every rank, by rank. Raises OutOfTimeError, and what a worker fails
        with."""
        left = min(STEP_SECONDS, self._limits.seconds_left)
        if left <= 0:
            raise self._limits.out_of_time()
        try:
            return pool.answers(kind, left)
        except WorkerFailed:
            if self._limits.seconds_left <= 0:
                raise self._limits.out_of_time() from None
            raise


def must_fit(asked: ProofRequest, limits: ProofLimits, parameters: int, ranks: Ranks) -> None:
    """Raises OutOfMemoryError where all the processes of the proof that this host has together would not fit what is
    free."""
    limits.must_fit(parameters, ranks.ranks_here(asked.chosen.ranks) + 2, 2 * asked.steps + GRADIENT_STEPS)


def _replays(asked: ProofRequest) -> bool:
    return asked.chosen.strategy.replays(asked.chosen.launcher.workers or 1)


def _jobs(asked: ProofRequest, precision: str, gradients: bool = False, coarse: bool = False) -> tuple[Job, Job, Job]:
    """Returns the jobs of the strategy, of its reference, and of the reference that is led astray by rounding."""
    launcher, ranks, strategy = asked.chosen.launcher, asked.chosen.ranks, asked.chosen.strategy
    steps = min(asked.steps, GRADIENT_STEPS) if gradients else asked.steps
    tried = Job(
        workload=asked.workload,
        strategy=strategy,
        launcher=str(launcher),
        threads=launcher.threads_each(ranks),
        device=launcher.device,
        changes={
            **asked.changes,
            "precision": precision,
            **({"compile": False} if precision == "float64" or asked.rows else {}),
        },
        workers=launcher.workers or 1,
        proof=True,
        rows=asked.rows,
        rare=asked.rare,
        short=asked.short,
        lengths=asked.lengths,
        sent=asked.sent,
        cut=steps if steps > 1 and strategy.exact else 0,
        gradients=gradients,
        plain=asked.plain,
    )
    # A sum by other threads is another sum: what is to have the same bits has as many.
    single = replace(tried, threads=tried.threads if _replays(asked) else 1, device="cpu")
    # Weights stay float32 under autocast; it is the gradients that come in the shorter type.
    weights = "float64" if precision == "float64" else "float32"
    return tried, single, replace(single, nudge=eps_of(weights), jitter=eps_of(precision) / 2, coarse=coarse)


# A survey of a workload while its proof begins: a process beside those of the proof, and what it has found.


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
