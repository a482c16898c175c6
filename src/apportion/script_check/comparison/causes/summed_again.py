"""Micro-batches that the ranks weight unequally in a step's gradient, where one process weights them alike."""

from __future__ import annotations

import numpy as np

from apportion.script_check.comparison.combination import combination
from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.comparison.tensors import Array
from apportion.script_check.findings import Finding


def cause(evidence: Evidence) -> Finding | None:
    """Returns the finding that the ranks sum what is already accumulated again with each micro-batch, so that the first
    ones have the greatest weights."""
    parts = _parts(evidence)
    count = len(parts) // evidence.count
    if count < 2 or not evidence.alike:
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
    return Finding(
        "micro_batches_unequal",
        "difference",
        f"The {count} micro-batches that a step accumulates are weighted differently on the ranks, relative to the "
        f"last one by {', '.join(f'{each:.6g}' for each in relative)}: what is already accumulated is summed over the "
        "ranks again with each of them.",
        "Sum the gradients over the ranks once for each step, after its last micro-batch.",
        evidence.shown(found.names),
        (),
        found.shown,
        sums[0] if sums else found.site,
        float(relative[0]),
    )


def _parts(evidence: Evidence) -> list[dict[str, Array]]:
    """What each backward of each rank adds, rank by rank; none where the ranks have not equally many of them."""
    found = list[dict[str, Array]]()
    sizes = set[int]()
    for rank, record in enumerate(evidence.ranks):
        for event in record.of("contributions"):
            if event["optimizer"] == evidence.found.optimizer and event["number"] == evidence.found.step:
                own = {evidence.names[rank].get(name, name): each for name, each in event["own"].items() if each}
                sizes |= {len(each) for each in own.values()}
                found += [
                    {name: each[at] for name, each in own.items() if at < len(each)}
                    for at in range(max(map(len, own.values()), default=0))
                ]
    return found if len(sizes) == 1 and len(found) == evidence.count * sizes.pop() else []
