"""The report of a run: one HTML file that needs nothing else, drawn from what the run wrote down.

``history`` reads the run directory, ``curves`` thins and smooths, ``pictures`` draws (with matplotlib, the only file
that imports it), ``tables`` says the same in numbers, ``page`` puts them together, ``style`` is how it looks.
"""

from __future__ import annotations

import os
from pathlib import Path

from apportion.errors import CheckpointError
from apportion.report import REPORT
from apportion.report_html.history import read_history
from apportion.report_html.page import page


def write_html(run_dir: str | Path) -> Path:
    """Write ``report.html`` into the directory of a run, finished or not; its path.

    Without matplotlib the page holds the tables alone and says how to get the pictures. Raises CheckpointError where
    there are no events to be read, or the file cannot be written.
    """
    path = Path(run_dir) / REPORT
    text = page(read_history(run_dir))
    unfinished = path.with_name(f".{REPORT}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
        unfinished.replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}; make room there") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path
