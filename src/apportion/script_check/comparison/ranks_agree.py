"""Ranks against each other, without a reference: the optimizer steps that each has made, and after which batches.

The steps of ranks that torch's ``Join`` lets have different numbers of batches are first numbered as those of all
ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from apportion.script_check.comparison.reading import reading
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord

_REMEDY = "Decide on all ranks alike whether a step is made, by a sum over the ranks of what is decided on."


def findings(ranks: Sequence[RankRecord]) -> list[Finding]:
    """Returns that a rank leaves out a step that another makes. Under torch's ``Join``, the steps that a rank leaves
    out at its end are meant, and it gets the weights of the last rank."""
    counts = [len(record.steps) for record in ranks]
    fewest, most = counts.index(min(counts)), counts.index(max(counts))
    if min(counts) == max(counts):
        return _after_other_batches(ranks)
    step = _first_unlike_step(_batches_before_steps(ranks[fewest]), _batches_before_steps(ranks[most]))
    if step is None and all(record.events_of("join") for record in ranks):
        return []
    step = step or min(counts) + 1
    sentence = (
        f"Rank {fewest} made {min(counts)} optimizer steps where rank {most} made {max(counts)}; the first one that it "
        f"left out is step {step}."
    )
    return [_finding(sentence, fewest, step, ranks[most])]


def _after_other_batches(ranks: Sequence[RankRecord]) -> list[Finding]:
    """Ranks that make as many steps, but after other numbers of batches: one has left out a step."""
    first = _batches_before_steps(ranks[0])
    for rank, record in enumerate(ranks[1:], 1):
        own = _batches_before_steps(record)
        same = sum(b - a == d - c for (a, b), (c, d) in zip(pairwise(first), pairwise(own), strict=True))
        step = _first_unlike_step(first, own)
        if step is not None and same * 2 > len(first):
            late, other = (rank, 0) if own[step - 1] > first[step - 1] else (0, rank)
            read = sorted((own[step - 1], first[step - 1]))
            sentence = (
                f"Rank {late} makes step {step} after {read[1]} batches or forwards and rank {other} after {read[0]}: "
                f"rank {late} has left out a step that the other made."
            )
            return [_finding(sentence, late, step, ranks[0])]
    return []


def _batches_before_steps(record: RankRecord) -> list[int]:
    """The batches to train on that the rank had read at each step, as one rank alone may read others, to evaluate; the
    forwards with gradients where it reads no loader."""
    places = {(each.loader, each.number) for each in reading(record) if each.trained}
    read, found = 0, list[int]()
    for event in record.events_of("batch", "step"):
        if event["kind"] == "step":
            found.append(read)
        elif (event["loader"], event["iteration"]) in places:
            read += 1
    return found if read else [step["forwards"] for step in record.steps]


def _first_unlike_step(some: Sequence[int], others: Sequence[int]) -> int | None:
    """The first step, from 1, that the two have made after different numbers of batches."""
    return next((at for at, (a, b) in enumerate(zip(some, others, strict=False), 1) if a != b), None)


def _finding(sentence: str, rank: int, step: int, record: RankRecord) -> Finding:
    site = str(record.steps[min(step, len(record.steps)) - 1]["site"])
    return Finding("skipped_steps", "difference", sentence, _REMEDY, ranks=(rank,), step=step, site=site)


def aligned(ranks: Sequence[RankRecord]) -> Sequence[RankRecord]:
    """Returns the records with the numbers that their steps have on a rank that makes all of them.

    The ranks begin each use of ``Join`` together. A rank that has no more batches leaves out the last steps in it, and
    the first one after it has the number of the others' first one. Records without ``Join``, or with
    different numbers of uses of it, are returned as they are.
    """
    counts = [_steps_by_use(record) for record in ranks]
    uses = {len(record.events_of("join")) for record in ranks}
    if len(uses) != 1 or 0 in uses or all(each == counts[0] for each in counts):
        return ranks
    return [_numbered(record, own, counts) for record, own in zip(ranks, counts, strict=True)]


def _steps_by_use(record: RankRecord) -> list[Counter[int]]:
    """The number of steps of each optimizer before the first use of ``Join``, and from each use to the next."""
    found = [Counter[int]()]
    for event in record.events_of("join", "step"):
        if event["kind"] == "join":
            found.append(Counter())
        else:
            found[-1][event["optimizer"]] += 1
    return found


def _numbered(record: RankRecord, own: Sequence[Counter[int]], counts: Sequence[Sequence[Counter[int]]]) -> RankRecord:
    left_out, use = defaultdict[int, int](int), 0
    events = list[Event]()
    for event in record.events:
        if event["kind"] == "join":
            for optimizer in {name for each in counts for name in each[use]}:
                left_out[optimizer] += max(each[use][optimizer] for each in counts) - own[use][optimizer]
            use += 1
        changed = {**event, "step": event["step"] + sum(left_out.values())}
        if event["kind"] in ("step", "contributions"):
            changed["number"] = event["number"] + left_out[event["optimizer"]]
        events.append(changed)
    return replace(record, events=tuple(events))
