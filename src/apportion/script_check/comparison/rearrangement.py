"""One process against itself with the same rows distributed differently over the micro-batches of each window.

The gradients are the same but for rounding, unless rows have weights by their micro-batch. A weight by the position in
the window is a mistake. A weight by a count of the micro-batch, such as its tokens, is one where the ranks do take the
count of all of them. Batch statistics, losses that compare rows, and means over micro-batches of unequal size are what
many scripts mean to train with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from apportion.script_check.comparison.accumulation import REGULAR
from apportion.script_check.comparison.causes import statistics
from apportion.script_check.comparison.combination import Divisors, adds_up, divisors, position_weights
from apportion.script_check.comparison.reading import reading
from apportion.script_check.comparison.tensors import (
    Array,
    TensorDifference,
    contributions_of,
    difference,
    events_before_step,
    scale_of,
    shown,
    step_of,
)
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord
from apportion.script_check.rows import count

Place = tuple[str, int, int]
"""The loader of a batch, the number of the iteration over it, and that of the batch in it."""


@dataclass(frozen=True)
class AccumulationWindow:
    """The micro-batches of one step of all optimizers. ``batches``: the place of each batch; ``rows``: what identifies
    the rows of each batch; ``sizes``: the rows of each micro-batch, of which a step that divides the one batch that it
    reads has several; ``moved``: by how many places a further pass moves the rows."""

    batches: tuple[Place, ...]
    rows: tuple[tuple[Hashable, ...], ...]
    sizes: tuple[int, ...]
    moved: int

    @property
    def moves_whole(self) -> bool:
        """Whether the further pass changes the order of the micro-batches alone, and not which rows share one."""
        return self.moved == self.sizes[0]


def windows(record: RankRecord) -> dict[int, AccumulationWindow]:
    """Returns the windows of several micro-batches by the step of all optimizers that they end with, counted from 1.

    Every other one, and each whose micro-batches are of unequal size, has its rows moved by half a micro-batch, the
    rest by a whole one. Steps for which several loaders
    are read are left out, as the rows of one may belong to those of the other.
    """
    parts = _parts(record)
    found = dict[int, AccumulationWindow]()
    for step, batches in sorted(trained_batches(record).items()):
        places, rows = tuple(place for place, _ in batches), tuple(each for _, each in batches)
        sizes = tuple(map(len, rows))
        if len({loader for loader, _, _ in places}) > 1 or not all(sizes):
            continue
        if len(places) == 1 and (several := parts.get(step, 1)) > 1:
            sizes = tuple([sizes[0] // several] * several)
        if len(sizes) > 1:
            half = sizes[0] // 2 if len(found) % 2 == 0 or len(set(sizes)) > 1 else 0
            found[step] = AccumulationWindow(places, rows, sizes, half or sizes[0])
    return found


def trained_batches(record: RankRecord) -> dict[int, list[tuple[Place, tuple[Hashable, ...]]]]:
    """Returns the places, and what identifies the rows, of the batches that a rank read for each step and trained on,
    by the step of all optimizers, counted from 1."""
    read = defaultdict[int, list[tuple[Place, tuple[Hashable, ...]]]](list)
    for iteration in reading(record):
        for number, batch in enumerate(iteration.batches):
            if batch.trained and not iteration.evaluation:
                read[batch.step].append(((iteration.loader, iteration.number, number), batch.rows))
    return dict(read)


def _parts(record: RankRecord) -> Mapping[int, int]:
    """The number of equal parts of its rows in which each step computes its loss, where it reads one batch and each row
    counts once."""
    read, losses = defaultdict[int, list[int | None]](list), defaultdict[int, list[int]](list)
    for event in record.events_of("batch"):
        read[event["step"] + 1].append(count(event["rows"]) or len(event["indices"] or ()))
    for event in record.events_of("criterion"):
        losses[event["step"] + 1].append(event["rows"] or 0)
    return {step: len(rows) for step, rows in losses.items() if len(set(rows)) == 1 and [sum(rows)] == read.get(step)}


Kind = Literal["position", "counts", "sizes", "unknown"]


@dataclass(frozen=True)
class Rearranged:
    """One step in both distributions of its rows. ``differences``: of its gradients; ``kind``: why they differ;
    ``weights``: of each micro-batch, relative to the last one for "position", the counts for "counts"; ``site``: the
    line that calls backward."""

    window: AccumulationWindow
    step: Event
    differences: tuple[TensorDifference, ...] = ()
    kind: Kind = "unknown"
    weights: tuple[float, ...] = ()
    site: str = ""


def compared(union: RankRecord, other: RankRecord) -> list[Rearranged]:
    """Returns the steps that can be compared: those that begin with the same weights and compute with the same rows,
    of which ``other`` has them distributed differently, draw nothing at random, and have finite gradients."""
    found, own, changed = list[Rearranged](), windows(union), windows(other)
    for step in union.steps:
        again = step_of(other, step["optimizer"], step["number"])
        first, second = own.get(step["step"]), changed.get(step["step"])
        if again is None or first is None or second is None or again["weights_before"] != step["weights_before"]:
            continue
        if first.sizes != second.sizes and not (first.moves_whole and sorted(first.sizes) == sorted(second.sizes)):
            continue
        if _sorted(first) != _sorted(second) or first.rows == second.rows:
            continue
        finite = np.isfinite(scale_of(step["gradients"])) and np.isfinite(scale_of(again["gradients"]))
        if finite and not (_draws(union, step) or _draws(other, again)):
            found.append(_judged(union, other, Rearranged(first, step), again))
    return found


def findings(
    ranks: Sequence[RankRecord], steps: Sequence[Rearranged], split: RankRecord | None = None
) -> list[Finding]:
    """Returns how the micro-batches of a step are weighted, from the steps that were compared. ``split``: of a pass
    that looked for modules that mix rows, where it was run."""
    by_position = _by_position(steps)
    if by_position is not None:
        return [by_position]
    differing = [each for each in steps if each.differences]
    counts = [each for each in differing if each.kind == "counts"]
    sizes = [each for each in differing if each.kind == "sizes"]
    others = [each for each in differing if each.kind in ("unknown", "position")]
    found = [_counts(counts, ranks)] if counts else []
    found += [_sizes(sizes)] if sizes else []
    return [*found, _unknown(others, split)] if others else found


def _sorted(window: AccumulationWindow) -> list[str]:
    return sorted(repr(row) for rows in window.rows for row in rows)


def _draws(record: RankRecord, step: Event) -> bool:
    """Whether anything was drawn at random for a step: it belongs to a place in the window, and not to a row."""
    before = step_of(record, step["optimizer"], step["number"] - 1)
    if before is not None and before["generators"] != step["generators"]:
        return True
    first, computes = 0 if before is None else before["step"], before is not None
    for event in record.events_of("draw", "forward"):
        if first <= event["step"] < step["step"]:
            computes = computes or (event["kind"] == "forward" and event["gradients"])
            if event["kind"] == "draw" and computes:
                return True
    return False


def _judged(union: RankRecord, other: RankRecord, found: Rearranged, again: Event) -> Rearranged:
    """Adds the differences of the gradients, and why they differ."""
    step, window = found.step, found.window
    scale = scale_of(step["gradients"])
    pairs = ((name, again["gradients"].get(name), array) for name, array in step["gradients"].items())
    differences = tuple(d for name, a, b in pairs if (d := difference(name, 0, a, b, scale)) is not None)
    if not differences:
        return found
    for site, first, second in _contributions_by_line(union, other, step, len(window.sizes)):
        kind, weights = _kind(window, first, second, _counted(union, step), _counted(other, again))
        if kind != "unknown":
            return Rearranged(window, step, differences, kind, weights, site)
    return Rearranged(window, step, differences)


def _contributions_by_line(
    union: RankRecord, other: RankRecord, step: Event, parts: int
) -> Iterator[tuple[str, list[Array], list[Array]]]:
    """Yields for each line that calls backward once for each micro-batch what each of them has added in both
    distributions, as vectors of all tensors."""
    found = [contributions_of(record, step["optimizer"], step["number"]) for record in (union, other)]
    events = [event for event in found if event is not None]
    if len(events) != 2:
        return
    names = dict[tuple[str, ...], list[str]]()
    for name, sites in events[0]["sites"].items():
        if len(sites) >= parts and events[1]["sites"].get(name) == sites:
            names.setdefault(tuple(sites), []).append(name)
    for sites, tensors in names.items():
        for site in dict.fromkeys(sites):
            at = [position for position, each in enumerate(sites) if each == site]
            if len(at) == parts:
                first, second = (
                    [np.concatenate([event["own"][name][position].ravel() for name in tensors]) for position in at]
                    for event in events
                )
                yield site.partition(" ")[0], first, second


def _counted(record: RankRecord, step: Event) -> list[float] | None:
    """The targets that count in each micro-batch of a step, where a loss function of torch was called for each."""
    events = events_before_step(record, step["optimizer"], step["number"], "criterion")
    if any(event["counted"] is None or event["reduction"] != "mean" for event in events):
        return None
    return [float(event["counted"]) for event in events]


def _kind(
    window: AccumulationWindow,
    first: Sequence[Array],
    second: Sequence[Array],
    counted: Sequence[float] | None,
    counted_again: Sequence[float] | None,
) -> tuple[Kind, tuple[float, ...]]:
    if window.moves_whole:
        weights = position_weights(first, second)
        return ("unknown", ()) if weights is None else ("position", weights)
    sizes = tuple(map(float, window.sizes))
    if len(set(sizes)) > 1 and adds_up(first, sizes, second, sizes):
        return "sizes", sizes
    known = counted and counted_again and len(counted) == len(counted_again) == len(first)
    if known and counted and counted_again and adds_up(first, counted, second, counted_again):
        return "counts", tuple(counted)
    found = divisors(first, second)
    return _kind_of(window, found) if found is not None else ("unknown", ())


def _kind_of(window: AccumulationWindow, found: Divisors) -> tuple[Kind, tuple[float, ...]]:
    if found.proportional_to(window.sizes):
        return ("sizes", found.first) if len(set(window.sizes)) > 1 else ("unknown", ())
    if np.allclose(found.first, found.second, rtol=1e-6):
        return "position", tuple(found.first[-1] / each for each in found.first)
    return ("counts", found.first) if found.same_total else ("unknown", ())


def _by_position(steps: Sequence[Rearranged]) -> Finding | None:
    """The finding that positions in a window have weights, the same ones in most windows."""
    for optimizer in dict.fromkeys(each.step["optimizer"] for each in steps):
        own = [each for each in steps if each.step["optimizer"] == optimizer and each.window.moves_whole]
        found = [each for each in own if each.kind == "position"]
        found = [e for e in found if len(e.weights) == len(found[0].weights)]
        found = [e for e in found if np.allclose(e.weights, found[0].weights, rtol=1e-6)]
        if len(found) > max(1, REGULAR * len(own)):
            return _position(found[0])
    return None


def _position(first: Rearranged) -> Finding:
    shares = ", ".join(f"{weight:.6g}" for weight in first.weights)
    sentence = (
        f"The {len(first.weights)} micro-batches that a step accumulates are weighted by their position in the step, "
        f"relative to the last one by {shares}: {_changed(first, 'the same micro-batches in another order')}."
    )
    remedy = "Divide the loss of each micro-batch by the same number, that of the micro-batches of the step."
    return _finding("micro_batches_unequal", "difference", sentence, remedy, first, first.weights[0])


def _counts(steps: Sequence[Rearranged], ranks: Sequence[RankRecord]) -> Finding:
    first = steps[0]
    whole = all(float(weight).is_integer() for weight in first.weights)
    counts = ", ".join(f"{weight:g}" if whole else f"{weight:.6g}" for weight in first.weights)
    sentence = (
        f"The {len(first.weights)} micro-batches that a step accumulates are weighted alike, though each one's loss "
        f"is a mean over a count of its own ({'' if whole else 'relative to their mean '}{counts}): "
        f"{_changed(first, 'the same rows distributed differently over them')}."
    )
    remedy = (
        "Divide the summed loss of each micro-batch by the count (rows, tokens) of all micro-batches of the step; if "
        "the mean of the micro-batches' own means is meant: --accept micro_batches_weighted_alike."
    )
    severity: Literal["warning", "note"] = "warning" if len(steps) > 1 and _read_apart(ranks) else "note"
    return _finding("micro_batches_weighted_alike", severity, sentence, remedy, first)


def _sizes(steps: Sequence[Rearranged]) -> Finding:
    first = steps[0]
    sentence = (
        f"The micro-batches of step {first.step['number']} have {', '.join(map(str, first.window.sizes))} rows and are "
        f"weighted alike, so that the rows of the smaller ones count more: "
        f"{_changed(first, 'the same rows distributed differently over them')}."
    )
    remedy = (
        "Weight each micro-batch by its rows where that is not meant, or leave out the last batch (drop_last=True)."
    )
    return _finding("uneven_micro_batches", "note", sentence, remedy, first)


def _unknown(steps: Sequence[Rearranged], split: RankRecord | None) -> Finding:
    first, count = steps[0], len(steps[0].window.sizes)
    layers = statistics.modules(split) if split is not None else ()
    if split is not None and layers:
        kind = next(event["type"] for event in split.events_of("mixes_rows") if event["module"] == layers[0])
        layer = shown(layers[0], list(first.step["gradients"]))
        why = f"Layer {layer} ({kind}) takes statistics of the rows of one micro-batch"
    else:
        why = f"A step's gradient depends on which rows share one of its {count} micro-batches, or on their order"
    sentence = f"{why}: {_changed(first, 'the same rows distributed differently over them')}."
    remedy = "Nothing, where that is meant: the ranks train what one process trains with the same micro-batches."
    return _finding("micro_batch_statistics", "note", sentence, remedy, first)


def _changed(first: Rearranged, how: str) -> str:
    """Returns by how much the gradients change, in words."""
    names, total = [each.name for each in first.differences], len(first.step["gradients"])
    largest = max(each.relative for each in first.differences)
    return f"with {how}, {len(names)} of {total} gradients differ, by up to {largest:.2g} of their norm"


def _finding(
    name: str,
    severity: Literal["difference", "warning", "note"],
    sentence: str,
    remedy: str,
    first: Rearranged,
    factor: float | None = None,
) -> Finding:
    names = tuple(shown(each.name, list(first.step["gradients"])) for each in first.differences)
    site = first.site or first.step["site"]
    return Finding(name, severity, sentence, remedy, names, (), first.step["number"], site, factor)


def _read_apart(ranks: Sequence[RankRecord]) -> bool:
    """Whether the ranks read different rows for their first step, so that their counts are added up over the ranks."""
    first = [
        {row for iteration in reading(record) for batch in iteration.trained if batch.step == 1 for row in batch.rows}
        for record in ranks
    ]
    return any(rows != first[0] for rows in first[1:])
