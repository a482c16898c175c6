"""The passes that a proof makes on few rows: how many rows and steps each has, and which rows."""

from __future__ import annotations

from dataclasses import replace

from apportion.api.proof_workers import ProofRequest
from apportion.runtime.proof.proof import Surveyed

FEW_EACH, ROWS_EACH = 3, 16
"""The numbers of rows that a pass gives each rank, with one more for the first. The larger one is of the pass on rare
rows, so that terms which do not count, or classes, fall unevenly on the ranks."""
STEPS = 4
"""The number of steps that a pass makes: two epochs of a whole batch and a short one."""
EPOCH = 2
"""The number of steps in which a pass meets each of its rows once."""


def on_few_rows(asked: ProofRequest) -> ProofRequest:
    """Returns the request for a first pass, on rows that are taken evenly from the data."""
    return replace(asked, rows=FEW_EACH * asked.chosen.ranks + 1)


def on_rare_rows(asked: ProofRequest, surveyed: Surveyed) -> ProofRequest:
    """Returns the request for a pass whose rows have the rare ones among them that a survey has named. The first pass
    has shown what comes of more steps; ranks that average now and then make as many as in that."""
    rows = ROWS_EACH * asked.chosen.ranks + 1
    steps = asked.steps if asked.steps > STEPS or not asked.chosen.strategy.exact else EPOCH
    return replace(asked, rows=rows, steps=steps, rare=surveyed.rare, run_steps=0, then=None)
