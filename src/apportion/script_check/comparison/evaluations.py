"""Evaluations: rows that count twice, and figures that differ from those of one process with the same weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from apportion.script_check.comparison.reading import Iteration, unlike_selections
from apportion.script_check.comparison.shared_rows import SPLIT_ALIKE
from apportion.script_check.comparison.tensors import listed
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord

TOLERANCE = 1e-6
"""What rounding, and a different order of sums, may change of a figure, relative to it."""
_SHOWN = 4
_FEW = 4
"""The most numbers of one figure: more are values of rows or batches, which one process computes in another order."""

Place = tuple[int, str, str]
"""A step, a line, and a function that takes numbers out of a tensor."""


@dataclass
class _Figures:
    """The numbers taken out of tensors at one place in an evaluation. ``calls``: one list for each call. ``after``: the
    numbers of forwards before them, one where they were taken one after the other, as a sum and a count are."""

    calls: list[list[float]] = field(default_factory=list)
    after: set[int] = field(default_factory=set)
    reduced: bool = False
    """Whether the tensors were the results of collectives, or computed from such."""
    direct: bool = True
    """Whether the script's own lines took the numbers, and not a library that they call."""

    @property
    def values(self) -> list[float]:
        return sorted(value for call in self.calls for value in call)

    @property
    def numbers(self) -> list[float]:
        """The values in their order; sorted ones of a single call."""
        return self.values if len(self.calls) == 1 else [value for call in self.calls for value in call]


def findings(
    ranks: Sequence[RankRecord],
    readings: Sequence[Sequence[Iteration]],
    union: RankRecord | None,
    again: RankRecord | None = None,
) -> list[Finding]:
    """Returns the first figure that differs, and rows that count twice. ``union``: the script as one process on the
    rows that the ranks evaluated, each once; None where its weights are not those of the ranks. ``again``: a repeat of
    it; figures that change between the two, such as times, do not belong to the evaluation."""
    twice, dropping = _rows_twice(ranks, readings), _gathers_for_metrics(ranks)
    records = [record for record in (*ranks, union, again) if record is not None]
    batches = {place for record in records for place in _of_batches(record)}
    figures = [_figures(record, batches) for record in ranks]
    alone = _figures(union, batches) if union is not None else {}
    if again is not None:
        repeated = _figures(again, batches)
        alone = {place: each for place, each in alone.items() if place in repeated and _repeats(each, repeated[place])}
    for place, reference in alone.items():
        found = [each[place] for each in figures if place in each]
        value = _aggregated(found, len(ranks))
        single = len(reference.after) == 1 and reference.direct and len(reference.numbers) <= _FEW
        if value is None or not single or len(value) != len(reference.numbers):
            continue  # values of rows, batches or ranks, from which a figure may be computed later
        if not _equal(value, reference.numbers, len(ranks)) and not _proportional(value, reference.numbers):
            return [_differs(place, value, reference.numbers, None if dropping else twice, len(ranks))]
    if twice is not None and not _dropped(figures, alone, len(ranks)) and not dropping:
        return [twice]
    return []


def _aggregated(found: Sequence[_Figures], ranks: int) -> list[float] | None:
    """The figure of a place where all ranks have one and the same, or one rank alone has the result of a collective;
    None elsewhere: a rank may print what it has computed on its own rows."""
    if not found or any(len(each.after) != 1 for each in found):
        return None
    if len(found) != ranks and not (len(found) == 1 and found[0].reduced):
        return None
    values = found[0].numbers
    return values if all(each.calls == found[0].calls for each in found) else None


def _repeats(one: _Figures, other: _Figures) -> bool:
    return len(one.values) == len(other.values) and all(map(_close, one.values, other.values))


def _equal(found: Sequence[float], reference: Sequence[float], ranks: int) -> bool:
    """Whether figures are the same, or sums over the ranks of what is divided by their number later, or parts of equal
    size of what is summed over the ranks later."""
    return all(
        any(_close(one, factor * two) for factor in (1, ranks, 1 / ranks))
        for one, two in zip(found, reference, strict=True)
    )


def _proportional(found: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether several figures are one multiple of those of one process, as a sum and a count whose ratio is taken."""
    factor = next((one / two for one, two in zip(found, reference, strict=True) if one and two), 1.0)
    return len(found) > 1 and all(_close(one, factor * two) for one, two in zip(found, reference, strict=True))


def _close(one: float, two: float) -> bool:
    return one == two or (one != one and two != two) or abs(one - two) <= TOLERANCE * max(abs(one), abs(two)) + 1e-9


def _dropped(figures: Sequence[dict[Place, _Figures]], alone: dict[Place, _Figures], ranks: int) -> bool:
    """Whether numbers that all ranks, or rank 0, have in an evaluation are those of one process, so that rows read
    twice were dropped before."""
    for place, reference in alone.items():
        found = [each[place] for each in figures if place in each]
        if len(found) not in (1, ranks) or any(each.values != found[0].values for each in found):
            continue
        values = found[0].values
        if len(values) == len(reference.values) and all(map(_close, values, reference.values)):
            return True
    return False


def _gathers_for_metrics(ranks: Sequence[RankRecord]) -> bool:
    return all(record.events_of("gather_for_metrics") for record in ranks)


def _of_batches(record: RankRecord) -> set[tuple[str, str]]:
    """The lines and functions that take numbers out of tensors between the batches of an evaluation: they do so after
    its last batch as well where a loader finds its end before it hands that one out, as accelerate's do."""
    return {(event["site"], event["function"]) for event, when, _ in _in_evaluations(record) if when == "batch"}


def _figures(record: RankRecord, batches: Container[tuple[str, str]]) -> dict[Place, _Figures]:
    """The numbers taken after the end of an evaluation, or after forwards without gradients that no loader feeds, and
    before the next forward with gradients. ``batches``: the lines and functions that take those of single batches."""
    found = dict[Place, _Figures]()
    for event, when, forwards in _in_evaluations(record):
        of_batch = when == "batch" or (when == "ahead" and (event["site"], event["function"]) in batches)
        if event["site"] and not of_batch:
            figures = found.setdefault((event["step"], event["site"], event["function"]), _Figures())
            figures.calls.append(event["values"])
            figures.after.add(forwards)
            figures.reduced |= event["reduced"]
            figures.direct &= event["direct"]
    return found


def _in_evaluations(record: RankRecord) -> Iterator[tuple[Event, Literal["batch", "ahead", "after"], int]]:
    """Yields the numbers taken in evaluations, when they were, and the number of forwards before: while a loader was
    read, after its end, or after that and the last batch, which a loader that is read ahead hands out after its end."""
    evaluating = reading = ended = ahead = False
    forwards = 0
    for event in record.events:
        kind = event["kind"]
        if kind == "forward":
            evaluating, forwards = not event["gradients"], forwards + 1
            reading = reading and evaluating
            ahead = ended
        elif kind == "iteration":
            reading, ended, ahead = True, False, False
        elif kind == "taken":
            reading = True
        elif kind == "exhausted":
            reading, ended, ahead = False, True, False
        elif kind == "figure" and evaluating:
            yield event, "batch" if reading else "ahead" if ahead else "after", forwards


def _rows_twice(ranks: Sequence[RankRecord], readings: Sequence[Sequence[Iteration]]) -> Finding | None:
    """Rows of an evaluation that some ranks read twice, unless each rank reads all rows."""
    places = dict.fromkeys(
        (each.loader, each.number) for iterations in readings for each in iterations if each.evaluation
    )
    for loader, number in places:
        found = [
            each for iterations in readings for each in iterations if (each.loader, each.number) == (loader, number)
        ]
        rows = [each.rows for each in found]
        if not all(batch.indexed for each in found for batch in each.batches):
            continue
        counts = Counter(row for each in rows for row in each)
        twice = [row for row in counts if counts[row] > 1]
        if twice and any(set(each) != set(counts) for each in rows):
            return _padded(found, twice, sum(counts.values()), len(counts))
        if twice and any(len(each) != len(set(each)) for each in rows):
            return _padded(found, twice, sum(counts.values()), len(counts))
    return None


def _padded(found: Sequence[Iteration], twice: Sequence[Hashable], read: int, rows: int) -> Finding:
    iteration, apart = found[0], unlike_selections(found)
    rows_listed = f"{', '.join(map(str, twice[:_SHOWN]))}{', ...' if len(twice) > _SHOWN else ''}"
    named = f"{len(twice)} of them" if iteration.local else f"{'row' if len(twice) == 1 else 'rows'} {rows_listed}"
    why = ", as its data set has different rows on each rank" if apart else ""
    return Finding(
        "evaluation",
        "warning",
        f"The evaluation over the loader at {iteration.loader} reads {read} rows, of which {rows} are different: "
        f"{named} {'counts' if len(twice) == 1 else 'count'} twice{why}.",
        SPLIT_ALIKE
        if apart
        else "Evaluate each row once: give each rank its own part without padding, and divide the sum over all ranks "
        "by the number of rows.",
        step=iteration.batches[-1].step - 1 or None,
        site=iteration.site,
    )


def _differs(
    place: Place, value: Sequence[float], alone: Sequence[float], twice: Finding | None, ranks: int
) -> Finding:
    step, site, _ = place
    cause = (
        twice.sentence
        if twice is not None
        else "Batches, or ranks, of unequal size are weighted equally, only a part of the rows counts, or the figure "
        "is not one of this evaluation, but of the last loss of the training."
    )
    one, two = next(pair for pair in zip(value, alone, strict=True) if not _equal(pair[:1], pair[1:], ranks))
    mean = one / ranks  # which the script may compute later, from the number that it took out of the sum
    summed = abs(mean - two) < abs(one - two)
    shown = f"{mean:.9g} ({one:.9g} as a sum over {ranks} ranks)" if summed else f"{one:.9g}"
    what, other = f"figure of the evaluation at {site} is {shown}", f"{two:.9g}"
    if len(value) > 1:
        what = f"figures of the evaluation at {site} are {_listed(value)}"
        other = f"they are {_listed(alone)}"
    sentence = (
        f"The {what}, and {other} for one process that evaluates the same rows once with the same weights. {cause}"
    )
    remedy = "Sum over the rows of all batches and ranks, each row once, and divide by the number of rows of all ranks."
    return Finding("evaluation", "warning", sentence, remedy, step=step or None, site=site)


def _listed(values: Sequence[float]) -> str:
    return listed([f"{value:.9g}" for value in values])
