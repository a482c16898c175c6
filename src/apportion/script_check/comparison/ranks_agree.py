"""Ranks against each other, without a reference: the optimizer steps that each has made, and after which batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from apportion.script_check.comparison.reading import reading
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord

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
