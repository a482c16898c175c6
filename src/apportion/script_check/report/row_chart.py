"""A picture of which rows each rank reads: batches from left to right, the data set from top to bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Batches = Sequence[Sequence[int] | int]
_WIDTH, _HEIGHT, _LEFT = 320, 170, 44
_COLOURS = 8
"""The series that the style sheet has."""


def row_chart(iteration: Sequence[Batches], rows: int | None) -> str:
    """Return the picture of one iteration as SVG; empty where the data has no indices. ``iteration``: the batches of
    each rank; ``rows``: the number of rows of the data set. Rows that several ranks read are drawn in red."""
    batches = max(map(len, iteration), default=0)
    read = [(rank, at, index) for rank, own in enumerate(iteration) for at, index in _indices(own)]
    if not read or any(isinstance(batch, int) for own in iteration for batch in own):
        return ""
    top = max(rows or 0, 1 + max(index for _, _, index in read))
    shared = shared_rows(iteration)
    column, height = (_WIDTH - _LEFT) / batches, _HEIGHT - 30
    width, thick = max((column - 3) / len(iteration), 1.0), max(height / top, 1.6)
    marks = list[str]()
    for rank, at, index in read:
        x, y = _LEFT + column * at + width * rank, 8 + height * index / top
        name = "shared" if index in shared else f"rank{rank % _COLOURS + 1}"
        size = f'width="{width * 0.86:.3g}" height="{thick:.3g}"'
        marks.append(f'<rect x="{x:.4g}" y="{y:.4g}" {size} class="{name}"/>')
    axis = [
        f'<text x="{_LEFT - 6}" y="16" text-anchor="end" class="tick">0</text>',
        f'<text x="{_LEFT - 6}" y="{8 + height}" text-anchor="end" class="tick">{top - 1:,}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}" class="tick">batch 1</text>',
        f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end" class="tick">{batches}</text>',
        f'<path d="M{_LEFT - 2} 6V{8 + height}H{_WIDTH}" class="axis"/>',
    ]
    return (
        f'<svg class="rows" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="rows read by batch and rank">'
        f"{''.join(axis + marks)}</svg>"
    )


def shared_rows(iteration: Sequence[Batches]) -> set[int]:
    """Return the rows that more than one rank reads in an iteration."""
    counts = Counter(index for own in iteration for index in {index for _, index in _indices(own)})
    return {index for index, ranks in counts.items() if ranks > 1}


def rows_in_words(iteration: Sequence[Batches]) -> str:
    """Return how many rows each rank reads, and how many of them others read, too."""
    counts = [sum(batch if isinstance(batch, int) else len(batch) for batch in own) for own in iteration]
    each = ", ".join(f"rank {rank} {rows:,}" for rank, rows in enumerate(counts))
    many = len(shared_rows(iteration))
    shared = "no row is read by two ranks"
    if many:
        shared = f"{many:,} {'row is' if many == 1 else 'rows are'} read by more than one rank"
    indexed = any(not isinstance(batch, int) for own in iteration for batch in own)
    return f"rows: {each}" + (f"; {shared}" if indexed else "")


def keys(ranks: int) -> str:
    """Return the key to the colours of the ranks."""
    items = [f'<span><i class="rank{rank % _COLOURS + 1}"></i>rank {rank}</span>' for rank in range(ranks)]
    return f'<p class="keys">{"".join(items)}<span><i class="shared"></i>read by several ranks</span></p>'


def batch_lines(iteration: Sequence[Batches]) -> list[tuple[str, ...]]:
    """Return a line of a table for each batch, with a cell for each rank."""
    return [
        (str(at + 1), *(_cell(own[at]) if at < len(own) else "" for own in iteration))
        for at in range(max(map(len, iteration), default=0))
    ]


def _cell(batch: Sequence[int] | int) -> str:
    if isinstance(batch, int):
        return f"{batch} rows"
    return " ".join(map(str, batch[:24])) + (f" and {len(batch) - 24} more" if len(batch) > 24 else "")


def _indices(batches: Batches) -> list[tuple[int, int]]:
    """Returns each index with the number of its batch."""
    return [(at, index) for at, batch in enumerate(batches) if not isinstance(batch, int) for index in batch]


def loader_facts(loader: Mapping[str, Any]) -> str:
    """Return what is known of a loader, in words."""
    rows = f", {loader['rows']:,} rows" if loader["rows"] is not None else ""
    return f"{loader['name']}: {loader['sampler']}{rows}"
