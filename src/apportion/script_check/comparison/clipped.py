"""Gradients before they were clipped: clipping hides that they are a multiple of those of one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.script_check.comparison.tensors import places, step_of
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord

_ROUNDING = 1e-7
"""What rounding may change of a factor that clipping has made, relative to it."""


def findings(ranks: Sequence[RankRecord], union: RankRecord) -> list[Finding]:
    """Returns that gradients which agree were, before they were clipped, a multiple of those of one process by the
    number of ranks or its inverse. ``ranks`` and ``union``: of passes whose gradients agree."""
    count = len(ranks)
    for optimizer, number in places(union):
        alone = factor(union, optimizer, number)
        own = [factor(record, optimizer, number) for record in ranks]
        times = [alone / each for each in own if each and alone]
        if len(times) < count or max(times) - min(times) > _ROUNDING * max(times):
            continue
        time = times[0]
        for expected in (float(count), 1 / count):
            if count > 1 and np.isclose(time, expected, rtol=_ROUNDING):
                return [_finding(time, count, _clips(ranks[0], optimizer, number)[0], number)]
    return []


def factor(record: RankRecord, optimizer: int, number: int) -> float | None:
    """Returns by how much clipping by the norm has made gradients smaller before a step of an optimizer; None where
    nothing was clipped, or more than once."""
    clips = _clips(record, optimizer, number)
    return clips[0]["factor"] if len(clips) == 1 and clips[0]["function"] != "clip_grad_value_" else None


def _clips(record: RankRecord, optimizer: int, number: int) -> list[Event]:
    """The calls between two steps of an optimizer that clip what it is given."""
    step, before = step_of(record, optimizer, number), step_of(record, optimizer, number - 1)
    first = 0 if before is None else before["step"]
    found = (
        [] if step is None else [event for event in record.events_of("clip") if first <= event["step"] < step["step"]]
    )
    return [event for event in found if step is not None and set(event["names"]) & set(step["gradients"])]


def _finding(time: float, count: int, clip: Event, number: int) -> Finding:
    if time > 1:
        why = "the ranks' gradients are summed and not averaged, and the loss is a mean over each rank's rows"
        remedy = f"Divide the summed gradients by the number of ranks ({count}), or the loss by the rows of all ranks."
    else:
        why = (
            f"the loss is a sum over rows and the gradients of {count} ranks are averaged, or they are divided by the "
            "number of ranks twice"
        )
        remedy = f"Multiply the loss by the number of ranks ({count}), or divide by it once."
    return Finding(
        "scale",
        "warning",
        f"Before they are clipped at {clip['site']}, all gradients are {time:.10g} times those of one process: {why}. "
        "Clipping hides this where it bites, and does not where the norm is below its limit.",
        remedy,
        tuple(name for name in clip["names"] if name),
        (),
        number,
        clip["site"],
        time,
    )
