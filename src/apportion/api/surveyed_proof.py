"""A proof on whole batches with all that a run's own proof looks at: the loss by itself, and rare rows of the data."""

from __future__ import annotations

from dataclasses import replace

from apportion.api.proof_passes import STEPS, on_rare_rows
from apportion.api.proof_workers import STEP_SECONDS, ProofRequest
from apportion.api.prover import prove
from apportion.api.workload_survey import READING_SECONDS, WorkloadSurvey
from apportion.runtime.launched.ranks import Ranks
from apportion.runtime.proof.proof import Proof, Surveyed


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
