"""The page of a check: one HTML file that needs nothing else, with what differs, by tensor, step and rank."""

from __future__ import annotations

from pathlib import Path

from apportion.reporting.html import write_page
from apportion.script_check.findings import ScriptAnswer
from apportion.script_check.report.page import check_page
from apportion.script_check.script import Script


def write_report(answer: ScriptAnswer, script: Script, path: str | Path) -> Path:
    """Write the answer about a script as a page, and return its path. Raises OSError where it cannot be written."""
    title = " ".join(["-m " + script.target if script.module else script.path.name, *script.arguments])
    write_page(Path(path), check_page(answer.as_json(), title, script.folder))
    return Path(path)
