"""What was compared, in numbers; how much of the ranks' work has a counterpart in one process; whether both computed
with the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.script_check.comparison.tensors import difference, placed, scale_of, step_of
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord

ROW_DIGITS = 6
"""The digits after the point by which rows are compared: an input that was computed is the same but for rounding."""


@dataclass(frozen=True)
class Coverage:
    """``steps``: the optimizer steps compared; ``tensors``: the trained tensors compared; ``missing``: those that have
    no counterpart in one process, or on no rank; ``finite``: whether all gradients of one process are finite at any of
    these steps."""

    steps: int
    tensors: int
    missing: tuple[str, ...]
    finite: bool = True

    @property
    def undecided(self) -> str:
        """Why the comparison says too little; empty where it says enough."""
        if not self.steps:
            return "no optimizer step of one process corresponds to one of the ranks"
        if self.missing:
            return (
                f"{len(self.missing)} trained tensors of the ranks and of one process have no counterpart, "
                f"{self.missing[0]} among them"
            )
        if not self.finite:
            return (
                "gradients of one process are infinite or not a number at every step, and nothing can be compared with "
                "them: give the script arguments with which its loss is finite, such as a smaller learning rate"
            )
        return ""


def coverage(ranks: Sequence[RankRecord], union: RankRecord) -> Coverage:
    """Returns what of the ranks' steps has a counterpart in one process."""
    names = placed(ranks, union)
    compared, finite, tensors, missing = 0, False, set[str](), dict[str, None]()
    for step in union.steps:
        steps = [step_of(record, step["optimizer"], step["number"]) for record in ranks]
        found = set[str]()
        for own, other in zip(names, steps, strict=True):
            if other is not None:
                found |= {own[name].name if name in own else name for name in other["gradients"]}
        if not found:
            continue
        compared += 1
        finite = finite or bool(np.isfinite(scale_of(step["gradients"])))
        tensors |= found & set(step["gradients"])
        missing |= dict.fromkeys(sorted(found ^ set(step["gradients"])))
    return Coverage(compared, len(tensors), tuple(missing), finite)


def not_finite(record: RankRecord) -> str | None:
    """Returns the first tensor whose gradient before the first step is infinite or no number; None where there is
    none."""
    gradients = record.steps[0]["gradients"] if record.steps else {}
    return next((name for name, each in gradients.items() if each is not None and not np.isfinite(each).all()), None)


def untrained(ranks: Sequence[RankRecord], union: RankRecord) -> list[Finding]:
    """Returns that all gradients of all ranks and of one process are zero, with which equal weights prove little."""
    gradients = [each for record in (*ranks, union) for step in record.steps for each in step["gradients"].values()]
    if not union.steps or any(each is not None and np.any(each) for each in gradients):
        return []
    sentence = (
        f"All gradients are zero in all {len(union.steps)} steps: the loss does not depend on the weights, and "
        f"equal weights prove little."
    )
    remedy = "See that the loss can change; the cross entropy of a single class, for example, is always 0."
    return [Finding("zero_gradients", "note", sentence, remedy, site=union.steps[0]["site"])]


def same_rows(ranks: Sequence[RankRecord], union: RankRecord, steps: int) -> bool:
    """Whether the networks of one process were called, up to a number of steps, with the rows of all ranks.

    A script that reads from a loader has them, as one process is fed with what the ranks have read, unless it reads
    from loaders that the ranks do not have; so has one of which no rows were recorded.
    """
    if any(event["step"] < steps for record in ranks for event in record.events_of("batch")):
        return any(event["step"] < steps for event in union.events_of("batch"))
    for step in range(steps):
        wanted, found = set[Any](), set[Any]()
        for record in ranks:
            wanted |= _rows(record, step)
        found = _rows(union, step)
        if wanted and found and wanted != found:
            return False
    return True


def gradients_alike(ranks: Sequence[RankRecord], number: int) -> bool:
    """Whether all ranks have the same gradients before a step."""
    steps = [record.steps[number - 1]["gradients"] for record in ranks if len(record.steps) >= number]
    scale = scale_of(steps[0]) if steps else 0.0
    return len(steps) == len(ranks) and all(
        other.keys() == steps[0].keys()
        and all(difference(name, rank, other[name], steps[0][name], scale) is None for name in other)
        for rank, other in enumerate(steps)
    )


def _rows(record: RankRecord, step: int) -> set[Any]:
    """The rows of a step: those of the networks' inputs, or where these have none, of all that was brought into it."""
    calls = [e["rows"] for e in record.events_of("forward") if e["step"] == step and e["rows"]]
    if calls:
        return {row for rows in calls for row in rows}
    brought = [e["values"] or () for e in record.events_of("constant") if e["step"] == step]
    return {
        row.tobytes()
        for values in brought
        for each in values
        if each.values.ndim
        for row in (np.round(each.values, ROW_DIGITS) + 0 if each.values.dtype.kind in "fc" else each.values)
    }


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
