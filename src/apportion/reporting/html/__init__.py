"""The report of a run, or of a plan: one HTML file that needs nothing else, drawn from what the run wrote down.

``history`` reads the run directory, and thins and smooths its curves; ``charts`` draws (the only file that imports
matplotlib); ``tables`` gives the numbers; ``run_page`` puts them together, and ``plan_page`` does the same for a plan.
``document`` is what both are built in, with the style sheet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apportion.errors import CheckpointError
from apportion.reporting.html.history import read_history
from apportion.reporting.html.plan_page import plan_page
from apportion.reporting.html.run_page import page
from apportion.reporting.journal import REPORT


def write_html(run_dir: str | Path) -> Path:
    """Write ``report.html`` into the directory of a run, finished or not, and return its path.

    Without matplotlib the page holds the tables alone and says how to get the pictures. Raises CheckpointError where
    there are no events to be read, or the file cannot be written.
    """
    path = Path(run_dir) / REPORT
    try:
        write_page(path, page(read_history(run_dir)))
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}; make room there") from error
    return path


def write_plan_html(plan: Mapping[str, Any], path: str | Path) -> Path:
    """Write what ``Plan.to_json`` gives as a page, and return its path. Raises ValueError where there is no such
    folder."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} for {path.name} does not exist: make it first")
    write_page(path, plan_page(plan))
    return path


def write_page(path: Path, text: str) -> None:
    """Write a file whole, or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
