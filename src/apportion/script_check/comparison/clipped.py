"""Gradients before they were clipped: clipping hides that they are a multiple of those of one process.

The ranks are also compared with a function of the user's here: with the gradient of its loss over all rows of a step. A
function returns a loss, and what a script does to gradients between backward and the step is not in it. Clipping is
undone where the norms that it used are known on all ranks, and is otherwise applied to the function's gradient, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from apportion.script_check.comparison.first_difference import FirstDifference, first_difference
from apportion.script_check.comparison.tensors import (
    Array,
    StepBounds,
    events_before_step,
    places,
    scale_of,
    shown,
    step_of,
)
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
    step = step_of(record, optimizer, number)
    own = set() if step is None else set(step["gradients"])
    return [event for event in events_before_step(record, optimizer, number, "clip") if own & set(event["names"])]


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


_UNKNOWN = ("LBFGS",)
"""The optimizers whose gradients are computed within the step."""


def against_function(
    ranks: Sequence[RankRecord], union: RankRecord, by_function: RankRecord, function: str, bounds: StepBounds = None
) -> list[Finding]:
    """Returns how the gradients of the ranks differ from those of a function. ``union``: the record of one process;
    ``by_function``: that of the pass that computed the function's gradients."""
    undone = all(event["norm"] is not None for record in ranks for event in record.events_of("clip"))
    own = [_unclipped(record) for record in ranks] if undone else ranks
    found, _ = first_difference(own, _with_gradients(union, by_function, None if undone else ranks[0]), bounds)
    return [] if found is None else [_function_finding(found, union, function)]


def _function_finding(found: FirstDifference, union: RankRecord, function: str) -> Finding:
    names = tuple(shown(name, found.compared) for name in found.names)
    first, ratio = found.differences_of(found.names[0])[0], found.differences[0].ratio
    alike = all(each.scaled and np.isclose(each.ratio, ratio, rtol=1e-6) for each in found.differences)
    if alike and len(names) == len(found.compared):
        what = f"every gradient is {ratio:.6g} times that of {function}"
    else:
        what = (
            f"{len(names)} of {len(found.compared)} gradients differ from those of {function}, {names[0]} first (ratio "
            f"{first.ratio:.6g}, cosine {first.cosine:.6g} on rank {first.rank})"
        )
    sentence = f"From step {found.shown} on, {what} over all rows of the step."
    remedy = (
        "Look for what the script does otherwise than the function: by what the loss of each micro-batch is divided, "
        "how the ranks are averaged, and what is done to gradients before the step."
    )
    site = next((str(event["site"]) for event in union.events_of("backward") if event["site"]), found.site)
    return Finding(
        "reference_differs", "difference", sentence, remedy, names, (), found.shown, site, ratio if alike else None
    )


def _with_gradients(union: RankRecord, by_function: RankRecord, clipping: RankRecord | None) -> RankRecord:
    """The record of one process with the gradients of the function in place of its own, at the steps that have them.
    ``clipping``: of a rank whose clipping is made with them, too."""
    gradients = {event["step"] + 1: event["gradients"] for event in by_function.events_of("reference")}
    events = list[Event]()
    last: Mapping[str, Array | None] = {}
    for event in union.events:
        if event["kind"] != "step":
            events.append(event)
            continue
        # several optimizers make their steps with the gradients of the same rows
        last = gradients.get(event["step"], last)
        known = {name: last[name] for name in event["gradients"] if name in last}
        if known and event["type"] not in _UNKNOWN:
            clipped = known if clipping is None else _clip_like_rank(clipping, event, known)
            events.append({**event, "gradients": clipped, "weights": {}})
    return RankRecord(union.rank, tuple(events))


def _unclipped(record: RankRecord) -> RankRecord:
    """A record with the gradients as they were before they were clipped by a norm that is known."""
    events = list[Event]()
    for event in record.events:
        clip = _clip(record, event) if event["kind"] == "step" else None
        if clip is not None and clip["norm"] is not None:
            # The factor by which torch clips, with its 1e-6 and without a gradient that grows.
            factor = min(1.0, clip["limit"] / (clip["norm"] + 1e-6))
            names = _clip_names(clip, event)
            gradients = {n: a / factor if a is not None and n in names else a for n, a in event["gradients"].items()}
            event = {**event, "gradients": gradients}
        events.append(event)
    return RankRecord(record.rank, tuple(events))


def _clip_like_rank(
    record: RankRecord, event: Event, gradients: Mapping[str, Array | None]
) -> Mapping[str, Array | None]:
    """The function's gradients, clipped as a rank clips its own for the same step."""
    step = step_of(record, event["optimizer"], event["number"])
    clip = None if step is None else _clip(record, step)
    if step is None or clip is None:
        return gradients
    names, limit = _clip_names(clip, step), float(clip["limit"])
    held = {name: array for name, array in gradients.items() if array is not None and name in names}
    if clip["function"] == "clip_grad_value_":
        return {**gradients, **{name: np.clip(array, -limit, limit) for name, array in held.items()}}
    factor = min(1.0, limit / (scale_of(held) + 1e-6))
    return {**gradients, **{name: array * factor for name, array in held.items()}}


def _clip(record: RankRecord, step: Event) -> Event | None:
    """The call that clipped the gradients of a step; None where nothing or more than one call clipped them."""
    own = set(step["gradients"])
    clips = events_before_step(record, step["optimizer"], step["number"], "clip")
    clips = [event for event in clips if not all(event["names"]) or own & set(event["names"])]
    return clips[0] if len(clips) == 1 else None


def _clip_names(clip: Event, step: Event) -> set[str]:
    """The tensors of a step that a call clipped: all, where some of them are not known."""
    own = set(step["gradients"])
    named = own & set(clip["names"])
    return named if len(named) == len(clip["names"]) else own
