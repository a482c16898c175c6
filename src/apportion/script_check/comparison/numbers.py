"""The findings from gradients, weights and their scales, and the further passes that can change the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apportion.script_check.comparison import (
    accumulation,
    against_reference,
    beginnings,
    clipped,
    held,
    ranks_agree,
    rearrangement,
    with_union,
)
from apportion.script_check.comparison.rearrangement import Rearranged
from apportion.script_check.comparison.tensors import StepBounds
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord


@dataclass(frozen=True)
class Further:
    """The records of further passes of one process, where they were run. ``split``: rows are split in each module;
    ``joined``: the graphs of collectives are joined; ``by_rank``: modules that mix rows run on each rank's rows;
    ``rearranged``: the steps whose rows were distributed differently over their micro-batches.
    ``by_function``: the gradients of the user's function that ``function`` names.
    ``bounds``: what rounding may change in all of them."""

    split: RankRecord | None = None
    joined: RankRecord | None = None
    by_rank: RankRecord | None = None
    rearranged: Sequence[Rearranged] = ()
    by_function: RankRecord | None = None
    function: str = ""
    bounds: StepBounds = None

    @property
    def about(self) -> list[str]:
        """What the further passes were for, in sentences."""
        split = "A further pass split the rows in each module, to find those whose output for a row depends on others."
        joined = "A further pass gave the outputs of collectives the graph of their input."
        by_rank = "Compared also with one process whose layers take the statistics of each rank's rows alone."
        rearranged = (
            f"Compared also with one process in which the same rows are distributed differently over the micro-batches "
            f"of a step, at {len(self.rearranged)} steps."
        )
        steps = 0 if self.by_function is None else len(self.by_function.events_of("reference"))
        stated = (
            f"Compared also with {self.function}: the gradient of its loss over all rows of a step, at {steps} steps."
        )
        passes = (
            (steps, stated),
            (self.split, split),
            (self.joined, joined),
            (self.by_rank, by_rank),
            (self.rearranged, rearranged),
        )
        return [sentence for recorded, sentence in passes if recorded]


def findings(ranks: Sequence[RankRecord], union: RankRecord | None, further: Further = Further()) -> list[Finding]:
    """Returns what the ranks' numbers show, compared with each other and with one process. ``union``: the record of
    one process; None where the script does not run as one."""
    own = [*held.findings(ranks), *beginnings.loaded_weights(ranks)]
    if union is None:
        return [*own, *accumulation.findings(ranks[0])]
    whole = all(event["length"] == event["full"] for record in ranks for event in record.events_of("iteration"))
    if with_union.evidence_of(ranks, union) is not None:  # weights that are broadcast after a first forward agree
        own += beginnings.findings(ranks, union)
    own += [*with_union.cut_gradients(union, further.joined, further.bounds), *accumulation.findings(union, whole)]
    # what begins or goes on with other weights, or leaves out a step, also has other gradients, and says nothing more
    first = [f for f in own if f.name in ("different_beginnings", "loaded_weights")] + ranks_agree.findings(ranks)
    until = min((finding.step for finding in first if finding.step is not None), default=None)
    compared = with_union.findings(ranks, union, further.split, until, further.bounds)
    if further.by_rank is not None and any(finding.name == "batch_statistics" for finding in compared):
        compared += with_union.findings_by_rank(ranks, further.by_rank, further.bounds)
    if further.by_function is not None:
        compared += against_reference.findings(ranks, union, further.by_function, further.function, further.bounds)
    if not own and not compared:
        own = clipped.findings(ranks, union)
    return [*own, *compared, *rearrangement.findings(ranks, further.rearranged, further.split)]
