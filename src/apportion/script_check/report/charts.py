"""Pictures of the page of a check, as SVG: which tensors differ at which steps, the norm of the gradients, and which
rows each rank reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from math import log10
from typing import Any

_CELL, _NARROW, _ROW, _CHARACTER = 26, 17, 20, 7.3
_MOST_BROAD = 12
"""The steps up to which cells are broad."""
_LONGEST = 27
"""The characters of a name that are shown beside the picture."""
_MOST_RANKS = 4
"""The ranks that have a part of their own in a cell; of more, the cell shows the largest difference."""
_LEAST, _LARGEST = -9.0, 0.0
"""The powers of ten between which the colour grows."""


def heat_map(kind: str, table: Mapping[str, Any]) -> str:
    """Return the picture as SVG. ``kind``: gradients or weights; ``table``: see ``comparison/tables.py``."""
    tensors, steps = table["tensors"], table["steps"]
    cell = _CELL if len(steps) <= _MOST_BROAD else _NARROW
    left = round(_CHARACTER * min(_LONGEST, max(len(tensor["name"]) for tensor in tensors))) + 10
    width, height = left + cell * len(steps) + 4, _ROW * len(tensors) + 26
    parts = list[str]()
    for at, step in enumerate(steps):
        if len(steps) <= _MOST_BROAD or step["step"] == 1 or not step["step"] % 5:
            middle = left + cell * (at + 0.5)
            parts.append(f'<text x="{middle:g}" y="12" text-anchor="middle" class="tick">{_step(step, steps)}</text>')
    for index, tensor in enumerate(tensors):
        top = 20 + _ROW * index
        parts.append(_label(tensor["name"], left - 8, top + 14))
        by_rank = tensor[kind] if len(tensor[kind]) <= _MOST_RANKS else [_largest(tensor[kind])]
        for at in range(len(steps)):
            parts += _cell(
                [values[at] for values in by_rank], (left + cell * at, top, cell), f"step {steps[at]['step']}"
            )
    return (
        f'<div class="scroll"><svg class="map" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{kind} by tensor and step">{"".join(parts)}</svg></div>'
    )


def legend(ranks: int) -> str:
    """Return what the colours mean."""
    split = f"each cell has a part for each of the {ranks} ranks" if ranks <= _MOST_RANKS else "the worst rank is shown"
    keys = [("agree", "agrees up to rounding")]
    keys += [(f"differ{level}", text) for level, text in ((2, "differs by 1e-7"), (5, "by 1e-4"), (9, "by 1 or more"))]
    items = "".join(f'<span><i class="{name}"></i>{text}</span>' for name, text in keys)
    return f'<p class="keys">{items}<span>of the norm; {split}</span></p>'


def _step(step: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    several = len({each["optimizer"] for each in steps}) > 1
    return f"{step['optimizer']}:{step['step']}" if several else str(step["step"])


def _label(name: str, x: int, y: int) -> str:
    short = name if len(name) <= _LONGEST else f"…{name[-_LONGEST + 1 :]}"
    return f'<text x="{x}" y="{y}" text-anchor="end" class="name">{escape(short)}<title>{escape(name)}</title></text>'


def _largest(by_rank: Sequence[Sequence[float | None]]) -> list[float | None]:
    return [
        max(
            (value for value in values if value is not None),
            key=lambda value: value if value >= 0 else 1e300,
            default=None,
        )
        for values in zip(*by_rank, strict=True)
    ]


def _cell(values: Sequence[float | None], place: tuple[int, int, int], step: str) -> list[str]:
    """Returns the parts of a cell, one a rank. ``place``: x, y and the width."""
    left, top, whole = place
    width = (whole - 4) / len(values)
    found = list[str]()
    for rank, value in enumerate(values):
        if value is None:
            continue
        about = f"rank {rank}, {step}: " if len(values) > 1 else f"{step}: "
        about += (
            "agrees" if not value else "has another shape, or is not zero" if value < 0 else f"differs by {value:.3g}"
        )
        found.append(
            f'<rect x="{left + 2 + width * rank:.4g}" y="{top + 2}" width="{max(width - 1, 2):.3g}" '
            f'height="{_ROW - 4}" class="{colour(value)}"><title>{about}</title></rect>'
        )
    return found


def colour(value: float) -> str:
    """Return the class of a difference: ``agree``, or ``differ1`` to ``differ9``, a decade each."""
    if not value:
        return "agree"
    power = _LARGEST if value < 0 else log10(value)
    return f"differ{round(1 + 8 * (min(max(power, _LEAST), _LARGEST) - _LEAST) / (_LARGEST - _LEAST))}"


_NORM_WIDTH, _NORM_HEIGHT, _NORM_LEFT, _NORM_BOTTOM = 460, 170, 48, 24
_COLOURS = 8
"""The series that the style sheet has."""


def norm_chart(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture as SVG; empty where there are fewer than two steps. ``steps``: see
    ``comparison/tables.py``."""
    ranks = len(steps[0]["norms"]) if steps else 0
    lines = [[step["norms"][rank] for step in steps] for rank in range(ranks)]
    reference = [step["norm"] for step in steps]
    known = [value for line in (*lines, reference) for value in line if value is not None]
    if len(steps) < 2 or not known:
        return ""
    top = max(known) * 1.06 or 1.0
    parts = [
        f'<path d="M{_NORM_LEFT} 6V{_NORM_HEIGHT - _NORM_BOTTOM}H{_NORM_WIDTH}" class="axis"/>',
        f'<text x="{_NORM_LEFT - 6}" y="16" text-anchor="end" class="tick">{top / 1.06:.3g}</text>',
        f'<text x="{_NORM_LEFT - 6}" y="{_NORM_HEIGHT - _NORM_BOTTOM}" text-anchor="end" class="tick">0</text>',
        f'<text x="{_NORM_LEFT}" y="{_NORM_HEIGHT - 6}" class="tick">step 1</text>',
        f'<text x="{_NORM_WIDTH}" y="{_NORM_HEIGHT - 6}" text-anchor="end" class="tick">{len(steps)}</text>',
        _line(reference, top, "one"),
    ]
    parts += [_line(line, top, f"line{rank % _COLOURS + 1}") for rank, line in enumerate(lines)]
    return (
        f'<svg class="norms" viewBox="0 0 {_NORM_WIDTH + 4} {_NORM_HEIGHT}" role="img" '
        f'aria-label="norm of the gradients by step">{"".join(parts)}</svg>'
    )


def norm_keys(ranks: int) -> str:
    """Return the key to the lines."""
    items = [f'<span><i class="rank{rank % _COLOURS + 1}"></i>rank {rank}</span>' for rank in range(ranks)]
    return f'<p class="keys"><span><i class="one"></i>one process</span>{"".join(items)}</p>'


def _line(values: Sequence[float | None], top: float, name: str) -> str:
    width, height = _NORM_WIDTH - _NORM_LEFT - 10, _NORM_HEIGHT - _NORM_BOTTOM - 8
    points = " ".join(
        f"{_NORM_LEFT + 5 + width * at / (len(values) - 1):.1f},{8 + height * (1 - value / top):.1f}"
        for at, value in enumerate(values)
        if value is not None
    )
    return f'<polyline points="{points}" class="{name}"/>'


Batches = Sequence[Sequence[int] | int]
_ROWS_WIDTH, _ROWS_HEIGHT, _ROWS_LEFT = 320, 170, 44


def row_chart(iteration: Sequence[Batches], rows: int | None) -> str:
    """Return the picture of one iteration as SVG; empty where the data has no indices. ``iteration``: the batches of
    each rank; ``rows``: the number of rows of the data set. Rows that several ranks read are drawn in red."""
    batches = max(map(len, iteration), default=0)
    read = [(rank, at, index) for rank, own in enumerate(iteration) for at, index in _indices(own)]
    if not read or any(isinstance(batch, int) for own in iteration for batch in own):
        return ""
    top = max(rows or 0, 1 + max(index for _, _, index in read))
    shared = shared_rows(iteration)
    column, height = (_ROWS_WIDTH - _ROWS_LEFT) / batches, _ROWS_HEIGHT - 30
    width, thick = max((column - 3) / len(iteration), 1.0), max(height / top, 1.6)
    marks = list[str]()
    for rank, at, index in read:
        x, y = _ROWS_LEFT + column * at + width * rank, 8 + height * index / top
        name = "shared" if index in shared else f"rank{rank % _COLOURS + 1}"
        size = f'width="{width * 0.86:.3g}" height="{thick:.3g}"'
        marks.append(f'<rect x="{x:.4g}" y="{y:.4g}" {size} class="{name}"/>')
    axis = [
        f'<text x="{_ROWS_LEFT - 6}" y="16" text-anchor="end" class="tick">0</text>',
        f'<text x="{_ROWS_LEFT - 6}" y="{8 + height}" text-anchor="end" class="tick">{top - 1:,}</text>',
        f'<text x="{_ROWS_LEFT}" y="{_ROWS_HEIGHT - 6}" class="tick">batch 1</text>',
        f'<text x="{_ROWS_WIDTH}" y="{_ROWS_HEIGHT - 6}" text-anchor="end" class="tick">{batches}</text>',
        f'<path d="M{_ROWS_LEFT - 2} 6V{8 + height}H{_ROWS_WIDTH}" class="axis"/>',
    ]
    return (
        f'<svg class="rows" viewBox="0 0 {_ROWS_WIDTH} {_ROWS_HEIGHT}" role="img" '
        f'aria-label="rows read by batch and rank">'
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


def row_keys(ranks: int) -> str:
    """Return the key to the colours of the ranks."""
    items = [f'<span><i class="rank{rank % _COLOURS + 1}"></i>rank {rank}</span>' for rank in range(ranks)]
    return f'<p class="keys">{"".join(items)}<span><i class="shared"></i>read by several ranks</span></p>'


def batch_lines(iteration: Sequence[Batches]) -> list[tuple[str, ...]]:
    """Return a line of a table for each batch, with a cell for each rank."""
    return [
        (str(at + 1), *(_batch_cell(own[at]) if at < len(own) else "" for own in iteration))
        for at in range(max(map(len, iteration), default=0))
    ]


def _batch_cell(batch: Sequence[int] | int) -> str:
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
