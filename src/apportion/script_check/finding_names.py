"""The names of findings, which ``--accept`` takes, each with what is wrong in one clause."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

FINDING_NAMES: Mapping[str, str] = {
    "differs": "gradients or weights differ from those of one process, for a reason that is not known",
    "scale": "every gradient that differs is the same multiple of that of one process",
    "skipped_steps": "some ranks make optimizer steps that others leave out",
}
"""What each finding is about, by its name."""


def check_finding_names(given: Iterable[str]) -> None:
    """Raise ValueError for a name that no finding has, with those that are most like it."""
    for name in given:
        if name not in FINDING_NAMES:
            close = difflib.get_close_matches(name.lower().replace("-", "_"), FINDING_NAMES, 3, 0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else f"the names are {', '.join(FINDING_NAMES)}"
            raise ValueError(f"{name!r} is not the name of a finding, and cannot be accepted: {hint}")
