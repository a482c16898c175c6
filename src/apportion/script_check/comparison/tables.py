"""Tables for people and programs to read: how each tensor of each rank differs from that of one process at every step,
and which rows each rank has read from each loader."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from apportion.script_check.comparison.first_difference import ZeroGradients, compared_pairs
from apportion.script_check.comparison.tensors import (
    IN_FLOAT64,
    Array,
    StepBounds,
    TensorDifference,
    initial,
    placed,
    places,
    scale_of,
    shown,
    step_of,
)
from apportion.script_check.record import RankRecord
from apportion.script_check.rows import count

MOST_TENSORS = 32
MOST_STEPS = 24
KINDS = ("gradients", "weights")


def step_table(
    ranks: Sequence[RankRecord], union: RankRecord, differs: bool, bounds: StepBounds = None
) -> dict[str, Any]:
    """Returns the table of the steps of both.

    ``steps``: each with the numbers of its ``optimizer`` and, from 1, of its ``step``, and the norm of all gradients
    together, of each rank (``norms``) and of one process (``norm``), None where it is not finite or not made.
    ``tensors``: each with its ``name`` and, for gradients and weights, by rank and step, the norm of the difference
    over that of the reference: 0 where rounding explains it, None where there is nothing to compare, -1 where the
    shapes differ or the reference is zero; those that differ first come first. ``ratios``: of the gradients that
    differ at their first step, by rank, the factor of the reference that fits best. ``left_out``: the number of tensors
    beyond MOST_TENSORS. Without ``differs`` nothing is computed again of tensors that are known to agree.
    """
    steps = [place for place in places(union) if bounds is None or place in bounds][:MOST_STEPS]
    names = placed(ranks, union)
    initial_weights, zeros = [initial(record) for record in ranks], ZeroGradients(ranks, union)
    rows = [_norms(ranks, union, place) for place in steps]
    tensors = dict[str, dict[str, Any]]()
    for at, (optimizer, number) in enumerate(steps):
        reference = step_of(union, optimizer, number)
        made = [step_of(record, optimizer, number) for record in ranks]
        for kind in KINDS if reference is not None else ():
            assert reference is not None
            scale = scale_of(reference[kind])
            bound = IN_FLOAT64 if bounds is None else bounds[optimizer, number]
            for rank, step in enumerate(made):
                arrays: dict[str, Array | None] = {} if step is None else step[kind]
                for pair in compared_pairs(arrays, reference[kind], names[rank], initial_weights[rank]):
                    name = pair.place.name
                    row = tensors.setdefault(name, _empty(name, len(ranks), len(steps)))
                    row[kind][rank][at] = 0.0
                    if differs:
                        found = pair.difference(rank, scale, bound, zeros if kind == "weights" else None)
                        _set(row, kind, (rank, at), found)
    ordered = sorted(tensors.values(), key=_first)
    for row in ordered:
        row["name"] = shown(row["name"], list(tensors))
    return {"steps": rows, "tensors": ordered[:MOST_TENSORS], "left_out": max(0, len(ordered) - MOST_TENSORS)}


def _empty(name: str, ranks: int, steps: int) -> dict[str, Any]:
    return {"name": name, **{kind: [[None] * steps for _ in range(ranks)] for kind in KINDS}, "ratios": [None] * ranks}


def _set(row: dict[str, Any], kind: str, place: tuple[int, int], found: TensorDifference | None) -> None:
    """Sets one cell of a tensor's row to how much it differs. ``place``: rank and step."""
    rank, at = place
    if found is None:
        return
    row[kind][rank][at] = _short(found.relative) if isfinite(found.relative) else -1.0
    if kind == "gradients" and row["ratios"][rank] is None and isfinite(found.ratio):
        row["ratios"][rank] = _short(found.ratio)


def _first(row: dict[str, Any]) -> int:
    """Returns the first step at which a tensor differs, for the order of the table."""
    found = [at for kind in KINDS for rank in row[kind] for at, value in enumerate(rank) if value]
    return min(found, default=MOST_STEPS)


def _norms(ranks: Sequence[RankRecord], union: RankRecord, place: tuple[int, int]) -> dict[str, Any]:
    made = [step_of(record, *place) for record in (*ranks, union)]
    norms = [None if step is None else _finite(scale_of(step["gradients"])) for step in made]
    return {"optimizer": place[0], "step": place[1], "norms": norms[:-1], "norm": norms[-1]}


def _finite(value: float) -> float | None:
    return _short(value) if isfinite(value) else None  # JSON has no other numbers


def _short(value: float) -> float:
    return float(f"{value:.6g}")


MOST_ITERATIONS = 4
MOST_BATCHES = 24
MOST_ROWS = 256


def row_table(ranks: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """Returns for each loader its ``name``, the file and line that made it, the ``rows`` of its data set, where that
    has a length, its ``sampler`` and its ``iterations``; each of these has, by rank, its batches, and each batch the
    indices of its rows, or their number alone where the data has no indices. ``left_out``: the iterations beyond
    MOST_ITERATIONS."""
    loaders = dict[str, dict[str, Any]]()
    iterations = dict[str, dict[int, list[list[list[int] | int]]]]()
    for rank, record in enumerate(ranks):
        for event in record.events_of("iteration"):
            about = {"name": event["loader"], "rows": event["rows"], "sampler": event["sampler"]}
            loaders.setdefault(event["loader"], about)
            found = iterations.setdefault(event["loader"], {})
            found.setdefault(event["number"], [[] for _ in ranks])
        for event in record.events_of("batch"):
            batches = iterations.get(event["loader"], {}).get(event["iteration"], [[] for _ in ranks])[rank]
            if len(batches) < MOST_BATCHES:
                batches.append(_batch(event["indices"], event["rows"]))
    return [
        {
            **about,
            "iterations": [iterations[name][number] for number in sorted(iterations[name])[:MOST_ITERATIONS]],
            "left_out": max(0, len(iterations[name]) - MOST_ITERATIONS),
        }
        for name, about in loaders.items()
    ]


def _batch(indices: Sequence[Any] | None, rows: Any) -> list[int] | int:
    if indices is not None and len(indices) <= MOST_ROWS and all(isinstance(index, int) for index in indices):
        return list(indices)
    return len(indices) if indices is not None else count(rows) or 0
