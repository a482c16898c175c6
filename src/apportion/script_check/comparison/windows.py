"""The accumulation windows of one process: which batches it read for each step, in how many micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from apportion.script_check.comparison.reading import reading
from apportion.script_check.record import RankRecord
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
