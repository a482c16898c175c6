"""The rows that a proof on one host needs of a data set whose parts lie on several hosts: they are sent to it, and the
proof says so."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Dataset

from apportion.api.proof_workers import ProofRequest
from apportion.comm.group import broadcast_message, collective
from apportion.comm.world import World
from apportion.core.data.sent_rows import RowsNotSentError, SentRows, send_rows
from apportion.core.parts import PartedDataset, deal_parts, learn_lengths
from apportion.core.workload import Workload
from apportion.runtime.proof.proof import Surveyed
from apportion.runtime.proof.proof_workload import rows_of_proof


@dataclass(frozen=True)
class ProofRows:
    """The rows of all parts that rank 0 has for a proof."""

    sent: SentRows | None = None
    refused: str | None = None
    """The reason why they could not be sent; None where they were, or need not be."""
    apart: bool = False
    """True where several hosts have parts of the data set."""

    def noted_in(self, proof: dict[str, Any], compared: int) -> dict[str, Any]:
        """Returns what a run writes down of its proof, with the rows that were sent before it. ``compared``: those of
        part 0 that every rank was sent."""
        said = [proof["sentence"]]
        if self.sent is not None:
            many = f"{self.sent.rows} rows of the {len(self.sent.parts)} parts"
            said.append(f"for that {many} were sent to rank 0 on host {socket.gethostname()}")
        if self.apart and compared:
            said.append(f"{compared} rows of part 0 were sent to every rank, to compare what an update makes of them")
        return {**proof, "sentence": "; ".join(said)}


@collective
def gather_proof_rows(workload: Workload, dataset: Dataset[Any], world: World, *, known: bool) -> ProofRows:
    """Sends the rows that a proof asks for to rank 0, where several hosts have parts of the data set, and rank 0 does
    not know the answer already (``known``, which counts there alone). Called by all ranks, each with the data set of
    its own parts."""
    if not isinstance(dataset, PartedDataset) or len({*(hosts := world.hosts())}) == 1:
        return ProofRows()
    if broadcast_message(known, world.group(), device=world.device):
        return ProofRows(apart=True)
    batches = [each * world.size + 1 for each in (FEW_EACH, ROWS_EACH)]
    wanted = rows_of_proof(workload, dataset.lengths, batches, STEPS, world.size)
    try:
        sent = send_rows(dataset, [sorted(rows) for rows in wanted], deal_parts(dataset.parts, hosts), world)
    except RowsNotSentError as error:
        return ProofRows(refused=str(error), apart=True)
    return ProofRows(sent, apart=True)


@collective
def rows_of_check(workload: Workload, world: World, steps: int) -> tuple[SentRows | None, tuple[int, ...]]:
    """Sends the rows of ``steps`` whole batches to rank 0; returns them there, and None on the other ranks, with the
    lengths of all parts. Called by all ranks. Raises RowsNotSentError, on all of them, where rows cannot be sent."""
    shards = deal_parts(workload.parts or 1, world.hosts())
    dataset = workload.parted_data()
    learn_lengths(dataset, shards[world.rank], world)
    wanted = rows_of_proof(workload, dataset.lengths, (), steps, world.size)
    return send_rows(dataset, [sorted(rows) for rows in wanted], shards, world), dataset.lengths


# The passes that a proof makes on few rows: how many rows and steps each has, and which rows.


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
