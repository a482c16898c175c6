"""A picture of which tensors differ at which steps, with a part of each cell for each rank."""

from __future__ import annotations

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
    """Return the picture as SVG. ``kind``: gradients or weights; ``table``: see ``comparison/step_table.py``."""
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
