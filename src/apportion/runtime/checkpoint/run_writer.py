"""The right to write the run directory of a run on several hosts: ``run.json`` names the last one who has taken it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apportion.errors import Superseded
from apportion.runtime.checkpoint.terms import RunTerm, RunWriter, may_write, next_term, refusal
from apportion.runtime.checkpoint.validation import read_json

FIELD = "term"


def writer_of(run: Mapping[str, Any]) -> RunWriter | None:
    """Returns who was the last to begin to write, by what ``run.json`` holds; None where it does not say so."""
    told = run.get(FIELD)
    return None if told is None else RunWriter(RunTerm(told["number"], told["start"]), told["generation"])


def told(writer: RunWriter) -> dict[str, Any]:
    """Returns what ``run.json`` says of a writer."""
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: whoever resumes is told so
        return
    if not may_write(writer, known):
        assert known is not None
        raise Superseded(refusal(writer, known))


def publish(run_dir: Path, run: Mapping[str, Any], write: Any) -> None:
    """Puts a new ``run.json`` in the place of the old one. ``write``: writes and syncs a file of JSON."""
    draft = run_dir / ".run.json"
    try:
        write(draft, run)
        os.replace(draft, run_dir / "run.json")
    except OSError:  # a full disk: what is written in part is not left there
        draft.unlink(missing_ok=True)
        raise
