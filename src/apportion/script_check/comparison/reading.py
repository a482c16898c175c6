"""What a rank read: its iterations over loaders, which of their batches it trained on, which it evaluated, and whether
a row has the same values each time that it is read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from apportion.script_check.record import Event, RankRecord
from apportion.script_check.rows import Rows, Structure, arrays_of

_SHARED = 0.1
"""The share of all values that two ranks have to have in common for their rows to come from one data set."""


@dataclass
class ReadBatch:
    """One batch. ``rows``: what identifies its rows, indices where there are any and digests of their values elsewhere.
    ``values``: the batch as a tree, None where it was not recorded. ``contents``: the digests of the values of its
    rows, empty where the batch does not have one value for each index. ``step``: the optimizer step for which it was
    read, from 1. ``position``: of its event in the record. ``trained``: whether a forward with gradients followed
    before the next batch was read."""

    rows: tuple[Hashable, ...]
    indexed: bool
    random: bool
    step: int
    position: int
    contents: tuple[str, ...] = ()
    values: Any = None
    trained: bool = False


@dataclass
class Iteration:
    """One iteration over a loader. ``begun``: its event ``iteration``; ``position``: of that event in the record.
    ``exhausted``: whether it was read to its end. ``with_gradients`` and ``without``: the forwards between its
    batches. ``local``: whether each rank numbers rows of its own (see ``identified``)."""

    loader: str
    number: int
    position: int
    begun: Event
    batches: list[ReadBatch] = field(default_factory=list)
    exhausted: bool = False
    with_gradients: int = 0
    without: int = 0
    local: bool = False

    @property
    def evaluation(self) -> bool:
        """Whether networks were called without gradients between its batches, and not trained: one forward with
        gradients may belong to the batch of a training loader that was read before."""
        trained = self.with_gradients
        return self.without > 0 and (trained == 0 or (trained == 1 and len(self.batches) > 1))

    @property
    def trained(self) -> list[ReadBatch]:
        """The batches that the rank trained on."""
        return [] if self.evaluation else [batch for batch in self.batches if batch.trained]

    @property
    def rows(self) -> list[Hashable]:
        """What identifies the rows of all its batches, in order."""
        return [row for batch in self.batches for row in batch.rows]

    @property
    def trained_rows(self) -> list[Hashable]:
        """What identifies the rows of the batches that the rank trained on, in order."""
        return [row for batch in self.trained for row in batch.rows]

    @property
    def site(self) -> str:
        """The line of the script that made the loader."""
        return self.loader.partition(" ")[0]

    @property
    def whole(self) -> bool:
        """Whether the loader was neither shortened nor left before its end."""
        return self.exhausted and self.begun["length"] == self.begun["full"]


@dataclass
class _BatchRun:
    """Batches read one after the other, and the forwards that followed."""

    iteration: Iteration
    batches: list[ReadBatch] = field(default_factory=list)
    with_gradients: int = 0
    without: int = 0


def reading(record: RankRecord) -> list[Iteration]:
    """Returns the iterations of a rank over its loaders, in order."""
    return _EventReader(record).iterations


def identified(readings: Sequence[Sequence[Iteration]]) -> Sequence[Sequence[Iteration]]:
    """Returns the iterations of all ranks with rows that are the same on two ranks where they are the same row.

    Where each rank makes a data set of its own rows, one number stands for different rows on different ranks: their
    values differ, and are the same each time that one rank reads them (those of augmented data are not). The rows then
    are known by their values where ranks that split one data set differently share them, and are pairs of the rank and
    its number elsewhere.
    """
    for loader in {each.loader for iterations in readings for each in iterations}:
        of_loader = [[each for each in iterations if each.loader == loader] for iterations in readings]
        if _are_local(of_loader):
            by_values = all(map(_no_two_alike, of_loader)) and _overlap(of_loader)
            for rank, iterations in enumerate(of_loader):
                for iteration in iterations:
                    iteration.local = True
                    for batch in iteration.batches:
                        batch.rows = batch.contents if by_values else tuple((rank, row) for row in batch.rows)
    return readings


def _no_two_alike(iterations: Sequence[Iteration]) -> bool:
    """Whether different rows of one rank have different values."""
    batches = [batch for iteration in iterations for batch in iteration.batches]
    rows = {row for batch in batches for row in batch.rows}
    return len(rows) == len({content for batch in batches for content in batch.contents})


def _overlap(of_loader: Sequence[Sequence[Iteration]]) -> bool:
    """Whether ranks have more values in common than equal rows, or those that fill up a rank's part, account for."""
    readers = Counter(
        content
        for iterations in of_loader
        for content in {
            content for iteration in iterations for batch in iteration.batches for content in batch.contents
        }
    )
    shared = sum(count > 1 for count in readers.values())
    return shared > max(len(of_loader), _SHARED * len(readers))


def unlike_selections(iterations: Iterable[Iteration]) -> bool:
    """Whether a sampler divides row numbers over the ranks that stand for different rows on each, as those of a random
    split that each rank draws by itself."""
    found = [each for each in iterations if each.begun["replicas"]]
    return any(each.local for each in found) or len({each.begun.get("selection") for each in found}) > 1


def _are_local(of_loader: Sequence[Sequence[Iteration]]) -> bool:
    contents = list[dict[Hashable, str]]()
    for iterations in of_loader:
        found = dict[Hashable, str]()
        for batch in (batch for iteration in iterations for batch in iteration.batches):
            if not batch.indexed or not batch.contents:
                return False
            for row, content in zip(batch.rows, batch.contents, strict=True):
                if found.setdefault(row, content) != content:
                    return False  # values that change from one reading to the next do not identify a row
        contents.append(found)
    first = next((found for found in contents if found), {})
    pairs = [(first[row], found[row]) for found in contents if found is not first for row in found if row in first]
    return 2 * sum(one != two for one, two in pairs) > len(pairs)


class _EventReader:
    """Builds the iterations of a rank in one pass over its events."""

    def __init__(self, record: RankRecord) -> None:
        self.iterations = list[Iteration]()
        self._places = dict[tuple[str, int], Iteration]()
        self._runs = dict[str, _BatchRun]()
        self._closed = dict[int, list[_BatchRun]]()
        self._last = ""
        self._ahead = {(e["loader"], e["iteration"]) for e in record.events_of("taken")}
        self._fetched = dict[tuple[str, int, int], ReadBatch]()
        for position, event in enumerate(record.events):
            self._process_event(position, event)
        for run in list(self._runs.values()):
            self._close(run)
        for iteration in self.iterations:
            _attribute(self._closed.get(id(iteration), []))

    def _process_event(self, position: int, event: Event) -> None:
        kind = event["kind"]
        if kind == "iteration":
            iteration = Iteration(event["loader"], event["number"], position, event)
            self.iterations.append(iteration)
            self._places[event["loader"], event["number"]] = iteration
        elif kind == "batch":
            self._add_batch(position, event)
        elif kind == "taken":
            batch = self._fetched.get((event["loader"], event["iteration"], event["number"]))
            if batch is not None:
                batch.step, batch.position = event["step"] + 1, position
                self._add_to_run(self._places[event["loader"], event["iteration"]], batch)
        elif kind == "exhausted" and (event["loader"], event["iteration"]) in self._places:
            self._places[event["loader"], event["iteration"]].exhausted = True
            run = self._runs.get(event["loader"])
            if run is not None and (run.with_gradients or run.without):
                self._close(run)
        elif kind == "forward":
            self._count_forward(bool(event["gradients"]))

    def _add_batch(self, position: int, event: Event) -> None:
        place = (event["loader"], event["iteration"])
        iteration = self._places.get(place)
        if iteration is None:
            return
        indexed = event["indices"] is not None
        contents = tuple(row_digests(event["rows"]))
        rows = tuple(map(_key, event["indices"])) if indexed else contents
        contents = contents if len(contents) == len(rows) else ()
        batch = ReadBatch(
            rows, indexed, bool(event.get("random")), event["step"] + 1, position, contents, event["rows"]
        )
        iteration.batches.append(batch)
        if place in self._ahead:
            self._fetched[(*place, event["number"])] = batch
        else:
            self._add_to_run(iteration, batch)

    def _add_to_run(self, iteration: Iteration, batch: ReadBatch) -> None:
        for loader, other in list(self._runs.items()):
            if (other.with_gradients or other.without) and loader != iteration.loader:
                self._close(other)
        run: _BatchRun | None = self._runs.get(iteration.loader)
        if run is not None and (run.with_gradients or run.without or run.iteration is not iteration):
            self._close(run)
            run = None
        if run is None:
            run = self._runs[iteration.loader] = _BatchRun(iteration)
        run.batches.append(batch)
        self._last = iteration.loader

    def _close(self, run: _BatchRun) -> None:
        self._closed.setdefault(id(run.iteration), []).append(run)
        del self._runs[run.iteration.loader]

    def _count_forward(self, gradients: bool) -> None:
        for loader, run in self._runs.items():
            if gradients:
                run.with_gradients += 1
                run.iteration.with_gradients += 1
            elif loader == self._last:
                run.without += 1
                run.iteration.without += 1


def _attribute(runs: list[_BatchRun]) -> None:
    """Marks the batches that were trained on: where several were read before a forward, the last ones, one for each
    forward, or for as many forwards as follow a single batch elsewhere."""
    single = [run.with_gradients for run in runs if len(run.batches) == 1 and run.with_gradients]
    each = min(single, default=1)
    for run in runs:
        trained = min(len(run.batches), -(-run.with_gradients // each))
        for batch in run.batches[len(run.batches) - trained :] if trained else ():
            batch.trained = True


def listed_rows(rows: Sequence[Hashable], most: int) -> str:
    """Returns the numbers of at most ``most`` rows in brackets, as a sentence has them; empty for rows without any."""
    numbers = [str(row) for row in rows if isinstance(row, int)][:most]
    return f" ({', '.join(numbers)}{', ...' if len(rows) > most else ''})" if numbers else ""


def row_digests(tree: Any) -> Iterator[str]:
    """Yields for each row of a batch a digest of its values."""
    arrays = [array for array in arrays_of(tree) if array.ndim]
    if not arrays:
        return
    for row in range(len(arrays[0])):
        found = hashlib.blake2b(digest_size=8)
        for array in arrays:
            if row < len(array):
                found.update(np.ascontiguousarray(array[row]).tobytes())
        yield found.hexdigest()


def _key(index: Any) -> Hashable:
    return index if isinstance(index, int | str | bytes | tuple) else repr(index)


Array = np.ndarray[Any, Any]
Column = Sequence[Any] | Array
"""One value for each row of a batch: an array, or the list of arrays of an entry of a list."""


def random_values(iterations: Sequence[Iteration]) -> bool:
    """Returns whether a row has other values when it is read again, in parts of batches that have one for each row."""
    batches = [batch for iteration in iterations for batch in iteration.batches if batch.indexed]
    found = [columns(batch.values, len(batch.rows)) for batch in batches]
    always = [place for place in (found[0] if found else ()) if all(place in each for each in found)]
    seen = dict[tuple[str, object], object]()
    return any(
        not same_values(seen.setdefault((place, row), value), value)
        for batch, parts in zip(batches, found, strict=True)
        for place in always
        for row, value in zip(batch.rows, parts[place], strict=True)
    )


def columns(tree: Any, rows: int) -> dict[str, Column]:
    """Returns, by their place in a batch of ``rows`` rows, its parts that have one value for each row: tensors of which
    the first dimension is that of the rows, and lists with an entry for each row. Parts that are made of the rows in
    another way, such as the nodes of all graphs in one tensor, are left out."""
    return dict(_columns(tree, rows, ""))


def same_values(one: Any, other: Any) -> bool:
    """Whether two values of a column are the same. Where one is longer, which padding to the longest row of a batch
    does, the shorter one has to be its beginning or its end."""
    if isinstance(one, list) or isinstance(other, list):
        if not (isinstance(one, list) and isinstance(other, list) and len(one) == len(other)):
            return False
        return all(map(same_values, one, other))
    a, b = np.asarray(one), np.asarray(other)
    if a.ndim != b.ndim:
        return False
    return any(
        np.array_equal(_cut(a, b, at_end), _cut(b, a, at_end), equal_nan=a.dtype.kind == "f")
        for at_end in (False, True)
    )


def _cut(array: Array, other: Array, at_end: bool) -> Array:
    """The beginning, or the end, of an array, no longer in any dimension than the other one."""
    sizes = [(size, min(size, limit)) for size, limit in zip(array.shape, other.shape, strict=True)]
    return array[tuple(slice(size - most, size) if at_end else slice(most) for size, most in sizes)]


def _columns(tree: Any, rows: int, place: str) -> Iterator[tuple[str, Column]]:
    if isinstance(tree, Rows):
        if tree.values.ndim and len(tree.values) == rows:
            yield place, tree.values
    elif isinstance(tree, Structure):
        yield from _columns(tree.parts, rows, place)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _columns(value, rows, f"{place}.{key}")
    elif isinstance(tree, list | tuple):
        if len(tree) != rows or all(isinstance(each, Rows) and each.values.shape[:1] == (rows,) for each in tree):
            for number, value in enumerate(tree):
                yield from _columns(value, rows, f"{place}.{number}")
        else:
            entries = [list(arrays_of(each)) for each in tree]
            if not all(array.shape[:1] == (rows,) for entry in entries for array in entry):  # else it can be either
                yield place, entries
