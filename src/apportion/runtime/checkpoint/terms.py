"""Which start of a run counts, and who may write its run directory.

Each start takes a higher term than all before it, and who has seen a higher one obeys, and writes, nothing of a lower
one. So a run may be gone on with elsewhere while its old driver is only cut off: any process of the old start that is
reached later finds the higher term, and ends without writing. Within a term the generations of the membership count:
rank 0 of an older one may still run, on a host that was given up. ``run.json`` names the last writer that has claimed
the directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from apportion.errors import Superseded
from apportion.runtime.checkpoint.validation import read_json


class RunTerm(NamedTuple):
    """The term of one start of a run."""

    number: int
    """The number of the term, 1 for the first start of a run."""
    start: str
    """A name that is unique to this start: two starts that took the same number, as neither knew of the other, have
    different ones."""


class RunWriter(NamedTuple):
    """The right to write a run directory: that of rank 0 in a generation of a term."""

    term: RunTerm
    generation: int


def next_term(known: Iterable[RunTerm | None], start: str) -> RunTerm:
    """Returns the term of a new start, given the terms that the run directory and the hosts know of."""
    return RunTerm(max((term.number for term in known if term is not None), default=0) + 1, start)


def is_refused(asked: RunTerm, known: RunTerm | None) -> bool:
    """Returns whether who knows of a term refuses what a start of another one asks for: a lower one is over, and of two
    with the same number the first one counts."""
    # An equal number from another start is refused too: the two starts cannot see which of them is newer, so the first
    # keeps the run.
    return known is not None and asked != known and asked.number <= known.number


def may_write(asked: RunWriter, known: RunWriter | None) -> bool:
    """Returns whether a writer may still write what another one was the last to write."""
    if known is None or is_refused(asked.term, known.term):
        return known is None
    # Across terms only the term decides: a new start begins again with generation 0.
    return asked.term != known.term or asked.generation >= known.generation


def refusal(asked: RunWriter, known: RunWriter) -> str:
    """Returns why someone may write no more, in words."""
    if asked.term == known.term:
        return (
            f"the others go on without this rank (they are in generation {known.generation}, and it is in "
            f"{asked.generation}): it ends, and writes nothing more"
        )
    return (
        f"the run was started again elsewhere (that start has term {known.term.number}, and this one "
        f"{asked.term.number}): this one ends, and writes nothing more; go on with the other, or "
        "end that and say resume=True"
    )


FIELD = "term"


def writer_of(run: Mapping[str, Any]) -> RunWriter | None:
    """Returns who was the last to begin to write, by what ``run.json`` holds; None where it does not say so."""
    stored = run.get(FIELD)
    return None if stored is None else RunWriter(RunTerm(stored["number"], stored["start"]), stored["generation"])


def term_entry(writer: RunWriter) -> dict[str, Any]:
    """Returns the entry of ``run.json`` for a writer."""
    return {FIELD: {**writer.term._asdict(), "generation": writer.generation}}


def claimed(known: RunWriter | None, start: str, generation: int) -> RunWriter:
    """Returns the right of rank 0 in a generation of a start to write from now on. The first generation of a start
    takes a higher term than all before it; raises Superseded where a later one finds that another start has done so."""
    if known is None or (known.term.start != start and generation == 0):
        return RunWriter(next_term([None if known is None else known.term], start), generation)
    asked = RunWriter(known.term._replace(start=start), generation)
    if not may_write(asked, known):
        raise Superseded(refusal(asked, known))
    return asked


def refuse_superseded(run_dir: Path, writer: RunWriter) -> None:
    """Raises Superseded where another one has begun to write meanwhile."""
    try:
        known = writer_of(read_json(run_dir / "run.json"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: resuming says so
        return
    if not may_write(writer, known):
        assert known is not None
        raise Superseded(refusal(writer, known))


def publish(run_dir: Path, run: Mapping[str, Any], write: Any) -> None:
    """Puts a new ``run.json`` in the place of the old one. ``write``: writes and syncs a file of JSON."""
    draft = run_dir / ".run.json"
    try:
        write(draft, run)
        # A reader sees the old file or the new one, whole: rename within one folder is atomic.
        os.replace(draft, run_dir / "run.json")
    except OSError:  # a full disk: what is written in part is not left there
        draft.unlink(missing_ok=True)
        raise
