"""A picture of the norm of all gradients at each step, of each rank and of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 170, 48, 24
_COLOURS = 8


def norm_chart(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture as SVG; empty where there are fewer than two steps. ``steps``: see
    ``comparison/step_table.py``."""
    ranks = len(steps[0]["norms"]) if steps else 0
    lines = [[step["norms"][rank] for step in steps] for rank in range(ranks)]
    reference = [step["norm"] for step in steps]
    known = [value for line in (*lines, reference) for value in line if value is not None]
    if len(steps) < 2 or not known:
        return ""
    top = max(known) * 1.06 or 1.0
    parts = [
        f'<path d="M{_LEFT} 6V{_HEIGHT - _BOTTOM}H{_WIDTH}" class="axis"/>',
        f'<text x="{_LEFT - 6}" y="16" text-anchor="end" class="tick">{top / 1.06:.3g}</text>',
        f'<text x="{_LEFT - 6}" y="{_HEIGHT - _BOTTOM}" text-anchor="end" class="tick">0</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}" class="tick">step 1</text>',
        f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end" class="tick">{len(steps)}</text>',
        _line(reference, top, "one"),
    ]
    parts += [_line(line, top, f"line{rank % _COLOURS + 1}") for rank, line in enumerate(lines)]
    return (
        f'<svg class="norms" viewBox="0 0 {_WIDTH + 4} {_HEIGHT}" role="img" '
        f'aria-label="norm of the gradients by step">{"".join(parts)}</svg>'
    )


def norm_keys(ranks: int) -> str:
    """Return the key to the lines."""
    items = [f'<span><i class="rank{rank % _COLOURS + 1}"></i>rank {rank}</span>' for rank in range(ranks)]
    return f'<p class="keys"><span><i class="one"></i>one process</span>{"".join(items)}</p>'


def _line(values: Sequence[float | None], top: float, name: str) -> str:
    width, height = _WIDTH - _LEFT - 10, _HEIGHT - _BOTTOM - 8
    points = " ".join(
        f"{_LEFT + 5 + width * at / (len(values) - 1):.1f},{8 + height * (1 - value / top):.1f}"
        for at, value in enumerate(values)
        if value is not None
    )
    return f'<polyline points="{points}" class="{name}"/>'
