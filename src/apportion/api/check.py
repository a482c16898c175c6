"""Prove that a strategy computes what it must, when a user asks for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from apportion.api.arguments import check_steps, check_workload, launcher_of, strategy_of
from apportion.api.proof_rows import STEPS, on_rare_rows
from apportion.api.proof_workers import READING_SECONDS, STEP_SECONDS, ProofRequest, WorkloadSurvey
from apportion.api.prover import prove
from apportion.api.verb import DrivenVerb
from apportion.comm.group import collective
from apportion.comm.world import World
from apportion.core.data.sent_rows import SentRows
from apportion.core.launcher import Launcher
from apportion.core.named_arguments import named_arguments
from apportion.core.strategy import Strategy
from apportion.core.workload import Workload
from apportion.planner.trials.trial import candidate
from apportion.runtime.launched.driving import ranks_by_host
from apportion.runtime.launched.ranks import Ranks, local_layout
from apportion.runtime.proof.proof import Proof, Surveyed
from apportion.runtime.worker.job import Job


@final
@dataclass(frozen=True, kw_only=True)
class Check(DrivenVerb[Proof]):
    """One proof of a strategy."""

    strategy: Strategy
    steps: int
    sent: SentRows | None = None
    """The rows of the data set's parts that were sent to rank 0, where several hosts have some of them each."""
    lengths: tuple[int, ...] = ()
    """The lengths of these parts."""

    def jobs(self, launcher: str, ranks: int) -> list[Job]:
        local_layout(self.strategy, ranks)  # refuses a strategy that does not run on them
        job = Job(workload=self.workload, strategy=self.strategy, launcher=launcher, prove=True, workers=ranks)
        return [replace(job, lengths=self.lengths)]

    @collective
    def opened(self, workload: Workload, world: World) -> Check:
        hosts = len(ranks_by_host(world))
        if hosts > 1 and not self.strategy.referenced_across_hosts:
            raise ValueError(
                f"{self.strategy} changes what hosts send each other, and its reference is of one host: check it on "
                "one host, or without compress="
            )
        if workload.parts is None or hosts == 1:
            return self
        from apportion.api.proof_rows import rows_of_check  # few data are in parts

        sent, lengths = rows_of_check(workload, world, self.steps)
        return replace(self, sent=sent, lengths=lengths)

    def answer(self, ranks: Ranks) -> dict[str, Any]:
        asked = ProofRequest(
            workload=self.workload,
            chosen=candidate(self.strategy, ranks.layout(self.strategy)),
            steps=self.steps,
            hosts=ranks.hosts,
            sent=self.sent,
            lengths=self.lengths,
        )
        return prove_with_survey(asked, ranks).to_json()

    def value(self, answer: Any, launcher: Launcher) -> Proof:
        return Proof.from_json(answer)


@named_arguments("check")
def check(
    workload: Workload | str,
    strategy: Strategy | str,
    *,
    workers: int | None = None,
    steps: int = 8,
    launcher: Launcher | str | None = None,
) -> Proof:
    """Run a strategy and its reference side by side, and compare what both have changed after every step.

    First in float64 (floating inputs, weights and buffers), where nothing but rounding may differ: at most 1e-10 of
    the largest change, or 100 times the rounding noise measured; then the gradients, by plain SGD of rate 1 in the
    place of each optimizer; then in the run's own precision, against its noise. A model that fixes float32 is
    reported, and checked in float32. Dropout is turned off for it, and named. A schedule that begins at next to
    nothing is begun where weights move. Where a network amplifies rounding so much that its bound would be above 1e-3
    of the change, nothing above that is called equal; where too little moves to tell, the answer is undecided.

    Where workers go their own ways, and the strategy writes down which (``Strategy.replays``), all make the steps
    without waiting for each other, and one process makes the same updates again: to the last bit, in both precisions.

    Meanwhile the loss is tried by itself on made-up outputs, where the strategy divides batches, and the targets of the
    data are read. A loss that is wrong where a batch is divided makes the answer "different". Then steps are made on
    rows that have the rare ones among them, unless the steps before have had all rows (``Proof.survey``,
    ``Proof.rare``).

    Under ``launcher=env()`` every rank calls it, in the same way: the strategy runs on the CPUs of these very ranks,
    over the connections that they have, the reference in processes of rank 0, and all ranks return the same proof or
    raise the same error. With ``launcher=ssh("a", "b:4")`` the ranks are started on these hosts for it, and do the
    same.
    """
    check_workload(workload, "check")
    value = strategy_of(strategy)
    check_steps(steps)
    where = launcher_of(launcher)
    if workers is not None:
        where = where.with_workers(workers)
    proof: Proof = where.dispatch(Check(workload=workload, strategy=value, steps=steps))
    return proof


# A proof on whole batches with all that a run's own proof looks at: the loss by itself, and rare rows of the data.


def prove_with_survey(asked: ProofRequest, ranks: Ranks) -> Proof:
    """Proves a strategy while a survey of the workload is made, and then on the rare rows that it names, unless the
    steps before have had all rows. Raises what ``prove`` does, to which ``ranks`` are given."""
    with WorkloadSurvey.begun(asked, seconds=READING_SECONDS, ranks=ranks) as survey:

        def rare(found: Proof) -> ProofRequest | None:
            """Returns the request for the steps on rare rows; None where they could show nothing further."""
            surveyed = survey.found(STEP_SECONDS)
            known = found.verdict == "different" or surveyed.problem is not None
            if known or not surveyed.rare or _had_all(found, surveyed, asked):
                return None
            request = on_rare_rows(asked, surveyed)
            return replace(request, steps=min(asked.steps, STEPS), brief=True, added=True)

        proof = prove(replace(asked, then=rare), ranks)
        return proof.with_survey(survey.found(STEP_SECONDS))


def _had_all(found: Proof, surveyed: Surveyed, asked: ProofRequest) -> bool:
    """Tells whether the steps of a proof have had all rows of the data among theirs. The number of rows of a rank is
    rounded up, so that a batch may have fewer than all of them together."""
    strategy, ranks = asked.chosen.strategy, asked.chosen.ranks
    batch = (found.rows - 1) * ranks + 1 if strategy.divides_batches else found.rows
    return found.rounds[0].steps * batch >= surveyed.of
