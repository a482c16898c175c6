"""What a run loses at a resume: rows of the epoch in which it was saved and, in a process of its own, the weights or
the state of an optimizer."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from apportion.script_check.comparison.reading import Iteration, ReadBatch, listed_rows
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord

RESTORES = ("restore", "load", "load_state")
_SHOWN = 6


@dataclass(frozen=True)
class _ResumePoint:
    """A load after which a run goes on from the weights that an earlier step left. ``saved`` and ``loaded``: positions
    in the record of that step and of the load; ``step``: the number of that step; ``until``: the position of the next
    load."""

    saved: int
    loaded: int
    step: int
    until: int


def findings(ranks: Sequence[RankRecord], readings: Sequence[Sequence[Iteration]]) -> list[Finding]:
    """Returns the rows that are read again, or left out, after the first resume at which it is so."""
    found = list[tuple[int, Finding]]()
    for record, iterations in zip(ranks, readings, strict=True):
        for resume in _resumes(record):
            finding = _compare(record, iterations, resume)
            if finding is not None:
                found.append((record.rank, finding))
                break
    return [finding for _, finding in found[:1]]


def _resumes(record: RankRecord) -> list[_ResumePoint]:
    found = list[_ResumePoint]()
    steps = list[tuple[int, Event]]()
    loaded: int | None = None
    for position, event in enumerate(record.events):
        if event["kind"] in RESTORES:
            loaded = position if loaded is None else loaded
        elif event["kind"] == "step":
            if loaded is not None:
                saved = next((at for at in reversed(steps) if at[1]["weights_after"] == event["weights_before"]), None)
                if saved is not None:
                    found.append(_ResumePoint(saved[0], loaded, saved[1]["step"], len(record.events)))
                loaded = None
            steps.append((position, event))
    ends = [following.loaded for following in found[1:]] + [len(record.events)]
    return [replace(resume, until=end) for resume, end in zip(found, ends, strict=False)]


def _compare(record: RankRecord, iterations: Sequence[Iteration], resume: _ResumePoint) -> Finding | None:
    before = next(
        (
            iteration
            for iteration in reversed(iterations)
            if any(batch.position < resume.saved for batch in iteration.trained)
        ),
        None,
    )
    if before is None or before.begun["replacement"]:
        return None
    read = [batch for batch in before.trained if batch.position < resume.saved]
    after = next(
        (
            each
            for each in iterations
            if each.begun["rows"] == before.begun["rows"]
            and each.position > before.position
            and any(resume.loaded < batch.position < resume.until for batch in each.trained)
        ),
        None,
    )
    order = _order(record, before)
    whole = before.exhausted or len(before.batches) == before.begun["length"]
    finished = len(read) == len(order) if order else whole and read[-1] is before.batches[-1]
    if after is None or finished or _begins_another(before, after, resume):
        return None
    again = _read_again(read, after, resume)
    return again if again is not None else _left_out(read, order, before, after, resume)


def _begins_another(before: Iteration, after: Iteration, resume: _ResumePoint) -> bool:
    """Whether the run had read the epoch to its end before the load, and goes on with rows in another order: it takes
    up the best weights of an epoch, and begins the next one."""
    ended = before.exhausted and before.batches[-1].position < resume.loaded
    return ended and any(one.rows != two.rows for one, two in zip(before.batches, after.batches, strict=False))


def _order(record: RankRecord, iteration: Iteration) -> list[tuple[Hashable, ...]]:
    for event in record.events_of("order"):
        if (event["loader"], event["iteration"]) == (iteration.loader, iteration.number):
            return [tuple(batch) for batch in event["batches"]]
    return []


def _trained_after(after: Iteration, resume: _ResumePoint) -> list[ReadBatch]:
    return [batch for batch in after.trained if resume.loaded < batch.position < resume.until]


def _read_again(read: Sequence[ReadBatch], after: Iteration, resume: _ResumePoint) -> Finding | None:
    old = {row for batch in read for row in batch.rows}
    batches = _trained_after(after, resume)
    if after.exhausted and len(batches) > 1 and batches[-1] is after.batches[-1]:
        batches = batches[:-1]  # a sampler may have filled the last one with the first rows of the epoch
    new = [row for batch in batches[: len(read)] for row in batch.rows]
    again = [row for row in new if row in old]
    if not again:
        return None
    first, last = read[0].step, read[-1].step
    return _finding(
        f"After the resume from step {resume.step}, {len(again)} of the first {len(new)} "
        f"rows{listed_rows(again, _SHOWN)} are read again: the run had trained on them in steps {first} to "
        f"{last}, in the same epoch.",
        batches[0].step,
        after,
    )


def _left_out(
    read: Sequence[ReadBatch],
    order: Sequence[tuple[Hashable, ...]],
    before: Iteration,
    after: Iteration,
    resume: _ResumePoint,
) -> Finding | None:
    """Rows of the epoch that follow the last one trained on, where the run goes on with later ones."""
    following = before.batches.index(read[-1]) + 1
    first = _trained_after(after, resume)[0]
    place = next((at for at, rows in enumerate(order) if rows == first.rows), None)
    if place is None or place <= following:
        return None
    left = [row for rows in order[following:place] for row in rows]
    if set(left) <= {row for batch in _trained_after(after, resume) for row in batch.rows}:
        return None
    return _finding(
        f"After the resume from step {resume.step}, {len(left)} rows{listed_rows(left, _SHOWN)} are left out: the "
        f"run goes on with batch {place + 1} of the epoch, and had trained on {following}.",
        first.step,
        after,
    )


def _finding(sentence: str, step: int, after: Iteration) -> Finding:
    remedy = (
        "Save the position in the epoch with the weights, and skip exactly the batches that the run has trained on "
        "(a stateful loader, or a skip of the first batches)."
    )
    return Finding("resumed_rows", "warning", sentence, remedy, step=step, site=after.site)


def lost_in_second_run(ranks: Sequence[RankRecord]) -> list[Finding]:
    """Returns what is lost between the two runs of a script, for the first rank that loses it; nothing where it was run
    once."""
    if not ranks or not all(record.runs for record in ranks):
        return []
    if not any(map(_goes_on, ranks)):
        return [_not_resumed(ranks[0])]
    return [finding for record in ranks for finding in _lost_state(record)][:1]


def _goes_on(record: RankRecord) -> bool:
    """Whether the second run begins with weights that a step of the first one has left."""
    first, second = record.runs
    left = {step["weights_after"] for step in first.steps}
    return any(begun["weights_before"] in left for begun in _first_steps(second))


def _first_steps(record: RankRecord) -> Iterator[Event]:
    return (step for step in record.steps if step["number"] == 1)


def _not_resumed(record: RankRecord) -> Finding:
    first, second = record.runs
    loads = second.events_of("load", "load_state", "restore")
    how = "loads nothing and " if not loads else ""
    return Finding(
        "not_resumed",
        "warning",
        f"The second run {how}begins with weights that none of the {len(first.steps)} steps of the first one has left.",
        "Load the weights that the first run has saved before the first step, and give with --then the arguments with "
        "which the script does so.",
        step=len(first.steps) + 1,
        site=loads[-1]["site"] if loads else "",
    )


def _lost_state(record: RankRecord) -> Iterator[Finding]:
    first, second = record.runs
    last = {step["optimizer"]: step for step in first.steps}
    for begun in _first_steps(second):
        before = last.get(begun["optimizer"])
        states = {} if before is None else {key: None for state in before["state"].values() for key in state}
        if states and not begun["stateful"] and begun["type"] == last[begun["optimizer"]]["type"]:
            yield Finding(
                "resumed_state",
                "warning",
                f"The second run goes on with the weights of the first one, and its {begun['type']} has lost its state "
                f"({', '.join(states)}) on rank {record.rank}: its next steps are not those of a run that goes on.",
                "Save optimizer.state_dict() with the weights, and load it before the first step.",
                ranks=(record.rank,),
                step=len(first.steps) + 1,
                site=begun["site"],
            )
