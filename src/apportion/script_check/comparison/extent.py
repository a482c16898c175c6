"""What a check has compared, in numbers: ranks, steps, tensors, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apportion.script_check.record import RankRecord

REFERENCE = "the script as one process on the union of the ranks' rows"


def extent(ranks: Sequence[RankRecord], union: RankRecord | None, reference: str = REFERENCE) -> dict[str, Any]:
    """Returns the number of ranks, of the optimizer steps that all of them and the reference have made, and of the
    tensors in these. ``union``: the record of the reference; None where the ranks are compared with each other alone,
    and ``reference`` is left out."""
    records = [*ranks, *([] if union is None else [union])]
    steps = min((len(record.steps) for record in records), default=0)
    tensors = {name for record in ranks for step in record.steps[:steps] for name in step["weights"]}
    compared = {"ranks": len(ranks), "steps": steps, "tensors": len(tensors)}
    return {**compared, "reference": reference if union is not None else "each other"}
