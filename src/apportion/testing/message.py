"""The text of a failure: the verdict, a table of what differs, the cause and the remedy."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from apportion.script_check.comparison.tensors import TensorDifference
from apportion.testing.verdict import Disagreement

ROWS = 12
"""The most rows of a table; what differs beyond them is counted."""
WIDTH = 100


def message(found: Disagreement, ranks: int) -> str:
    """Returns what is printed of a disagreement of ``ranks`` ranks."""
    verdict = _paragraph(f"{found.verdict} on {ranks} ranks", f"{found.sentence}.")
    shown = [table(found.differences, ranks)] if found.differences else []
    reasons = [_paragraph("Cause", found.cause.sentence), _paragraph("Remedy", found.cause.remedy)]
    reasons += [_paragraph("Note", note) for note in found.notes]
    return "\n\n".join([verdict, *shown, "\n".join(reasons)])


def table(differences: Sequence[TensorDifference], ranks: int) -> str:
    """Returns the table of differences, one row for each tensor and rank, or each tensor where all ranks are alike."""
    lines = [("tensor", "rank", "ratio", "cosine", "relative difference")]
    names = list(dict.fromkeys(each.name for each in differences))
    for name in names:
        own = [each for each in differences if each.name == name]
        figures = [(f"{each.ratio:.7g}", f"{each.cosine:.6f}", f"{each.relative:.2e}") for each in own]
        if len(own) == ranks and len(set(figures)) == 1:
            lines.append((name, "all", *figures[0]))
        else:
            lines += [(name, str(each.rank), *figure) for each, figure in zip(own, figures, strict=True)]
    widths = [max(len(line[column]) for line in lines[: ROWS + 1]) for column in range(5)]
    shown = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    left = len(shown) - ROWS - 1
    rest = [f"  and {left} more row{'s' if left > 1 else ''}"] if left > 0 else []
    return "\n".join(line.rstrip() for line in [*shown[: ROWS + 1], *rest])


def _paragraph(title: str, text: str) -> str:
    lines = textwrap.wrap(text, WIDTH, break_on_hyphens=False, initial_indent=f"{title}: ", subsequent_indent="  ")
    return "\n".join(lines)
