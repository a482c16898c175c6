"""Micro-batches that have other weights in a step's gradient on the ranks than in one process.

Where a step accumulates, no weights of whole ranks make up the gradient of one process: each micro-batch has others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.script_check.comparison.combination import combination
from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.comparison.tensors import Array
from apportion.script_check.findings import Finding

_Weights = list[list[float]]
"""The weight of each rank's part, by micro-batch and then by rank."""


def ranks_weighted_alike(evidence: Evidence) -> Finding | None:
    """Returns the finding that the ranks' parts of each micro-batch are averaged with equal weights, and in one process
    with unequal ones; each micro-batch as a whole has the same weight in both."""
    if not found_in(evidence):
        return None
    weights = _relative(evidence)
    at = max(range(len(weights)), key=lambda number: max(weights[number]) - min(weights[number]))
    shown = " and ".join(f"{weight:.6g} on rank {rank}" for rank, weight in enumerate(weights[at]))
    backward = evidence.window(evidence.ranks[0], "criterion", "backward")
    return evidence.finding(
        "ranks_weighted_alike",
        "The ranks are weighted alike, though each rank's loss is a mean over a count of its own: in one process "
        f"their weights in micro-batch {at + 1} of {len(weights)} of a step are {shown}"
        f"{_counts(evidence, weights, at)}.",
        "Divide each rank's summed loss by the count (rows, tokens) of all ranks, best of all micro-batches of the "
        "step, and multiply by the number of ranks where the wrapper averages.",
        site=backward[0]["site"] if backward else evidence.found.site,
        factor=weights[at][0],
    )


def summed_again(evidence: Evidence) -> Finding | None:
    """Returns the finding that the ranks sum what is already accumulated again with each micro-batch, so that the first
    ones have the greatest weights."""
    parts = _parts(evidence)
    count = len(parts) // evidence.count
    if count < 2 or not evidence.ranks_agree:
        return None
    known = {name for name in parts[0] if all(name in part for part in parts)}
    given = combination({n: a for n, a in evidence.gradients[0].items() if n in known}, parts)
    wanted = combination({n: a for n, a in evidence.reference.items() if n in known}, parts)
    if not (given.exact and wanted.exact and wanted.alike) or given.left_out:
        return None
    factors = np.array(given.factors).reshape(evidence.count, count)
    if not np.allclose(factors, factors[0], rtol=1e-6) or np.allclose(factors, factors[0, 0], rtol=1e-6):
        return None
    relative = factors[0] / factors[0, -1]
    found = evidence.found
    sums = [event["site"] for event in evidence.window(evidence.ranks[0], "collective") if event.get("site")]
    return evidence.finding(
        "micro_batches_unequal",
        f"The {count} micro-batches that a step accumulates are weighted differently on the ranks, relative to the "
        f"last one by {', '.join(f'{each:.6g}' for each in relative)}: what is already accumulated is summed over the "
        "ranks again with each of them.",
        "Sum the gradients over the ranks once for each step, after its last micro-batch.",
        site=sums[0] if sums else found.site,
        factor=float(relative[0]),
    )


def found_in(evidence: Evidence) -> bool:
    """Whether such weights explain the difference to the last digit."""
    if not evidence.ranks_agree or not evidence.micro_batches:
        return False
    given, wanted = evidence.micro_batches_of_ranks, evidence.micro_batches_in_reference
    if not given.exact or not wanted.exact or not given.alike or wanted.left_out or min(wanted.factors) <= 0:
        return False
    totals = np.reshape(wanted.factors, (evidence.count, -1)).sum(0)
    return bool(np.allclose(totals, totals[0], rtol=1e-6)) and not wanted.alike


def _relative(evidence: Evidence) -> _Weights:
    """The weights in one process over their mean."""
    weights = np.reshape(evidence.micro_batches_in_reference.factors, (evidence.count, -1))
    return [list(map(float, column / column.mean())) for column in weights.T]


def _counts(evidence: Evidence, weights: _Weights, at: int) -> str:
    """The numbers of targets or rows that explain the weights of one micro-batch."""
    losses = [evidence.window(record, "criterion") for record in evidence.ranks]
    if any(len(each) != len(weights) for each in losses):
        return ""
    for field, what in (("counted", "targets"), ("rows", "rows")):
        counts: Sequence[int] = [each[at].get(field) or 0 for each in losses]
        if all(counts) and np.allclose(np.array(weights[at]) / np.array(counts), weights[at][0] / counts[0], 1e-6):
            return f" ({', '.join(map(str, counts[:-1]))} and {counts[-1]} {what})"
    return ""


def _parts(evidence: Evidence) -> list[dict[str, Array]]:
    """What each backward of each rank adds, rank by rank; empty where the ranks call backward unequally often."""
    found = list[dict[str, Array]]()
    sizes = set[int]()
    for rank, record in enumerate(evidence.ranks):
        for event in record.events_of("contributions"):
            if event["optimizer"] == evidence.found.optimizer and event["number"] == evidence.found.step:
                own = {evidence.names[rank].get(name, name): each for name, each in event["own"].items() if each}
                sizes |= {len(each) for each in own.values()}
                found += [
                    {name: each[at] for name, each in own.items() if at < len(each)}
                    for at in range(max(map(len, own.values()), default=0))
                ]
    return found if len(sizes) == 1 and len(found) == evidence.count * sizes.pop() else []
