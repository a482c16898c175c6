"""What the check of a script is doing, as a line on the terminal, and what it has found, as lines of text."""

from __future__ import annotations

import linecache
import logging
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from apportion.script_check.findings import Finding, ScriptAnswer

WIDTH = 80
"""The columns of a line, where no name or path in it is longer."""
MOST_TENSORS = 4
HANG = "the ranks wait for each other"
"""The verdict that no accepted finding changes."""
_VERDICTS = {
    "another network": "Another network: {script} on {ranks} ranks does not train what one process does.",
    "the same network, but": "The same network, but: each step of {script} on {ranks} ranks is that of one "
    "process, and something beside it is wrong.",
    "the same network": "The same network: on {ranks} ranks {script} computes what one process does.",
    HANG: "The ranks wait for each other: {script} does not go on with {ranks} ranks.",
    "undecided": "Undecided: {reason}",
    "could not run": "Could not run: {reason}",
}
_COLOURS = {
    "the same network": "green",
    "the same network, but": "yellow",
    "undecided": "yellow",
}
_LABELS = {"warning": "Wrong: ", "note": "Note: "}


def answer_lines(answer: ScriptAnswer, target: str) -> Iterator[str]:
    """Yields the verdict, the findings, what each rank was doing where they wait, what was compared, and how the script
    was run."""
    ranks = answer.compared.get("ranks", "several")
    verdict = _VERDICTS[answer.verdict].format(ranks=ranks, script=Path(target).name, reason=_sentence(answer.reason))
    colour = _COLOURS.get(answer.verdict, "red")
    for line in _wrapped(verdict):
        yield click.style(line, fg=colour, bold=True)
    for finding in answer.findings:
        yield ""
        yield from finding_lines(finding, Path(target).parent, answer.verdict != HANG)
    if answer.ranks:
        yield ""
        for line in answer.ranks:
            yield from [line] if line.startswith(" ") else _wrapped(line)
    about = [*_compared(answer.compared), *answer.about]
    if about:
        yield ""
    for sentence in about:
        for line in _wrapped(sentence):
            yield click.style(line, dim=True)


def finding_lines(finding: Finding, folder: Path, acceptable: bool) -> Iterator[str]:
    """Yields a finding: its sentence, the tensors, the line of the script, the remedy, and how it is accepted.
    ``folder``: where the files of ``finding.site`` are; ``acceptable``: whether accepting it changes the verdict."""
    label = "Accepted: " if finding.accepted else _LABELS.get(finding.severity, "")
    yield from _indented("", label + finding.sentence)
    if finding.tensors and finding.tensors[0] not in finding.sentence:
        yield from _indented("tensors: ", _listed(finding.tensors))
    if finding.site:
        yield from _place(finding.site, _source(finding.site, folder))
    if finding.remedy:
        yield from _indented("fix: ", finding.remedy)
    if acceptable and not finding.accepted and finding.severity != "note":
        yield click.style(f"  accept with: --accept {finding.name}", dim=True)


def _compared(compared: Mapping[str, Any]) -> list[str]:
    if "steps" not in compared:
        return []
    parts = [_many(compared["ranks"], "rank"), _many(compared["steps"], "step"), _many(compared["tensors"], "tensor")]
    return [f"Compared: {', '.join(parts)}; with {compared['reference']}."]


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_TENSORS])
    return shown if len(names) <= MOST_TENSORS else f"{shown} and {len(names) - MOST_TENSORS} more"


def _place(site: str, source: str) -> list[str]:
    """Returns the place and the text of its line, which has a line of its own where both are too long for one."""
    line = f"  at {site}: {source}" if source else f"  at {site}"
    return [line] if len(line) <= WIDTH or not source else [f"  at {site}:", _shortened(f"     {source}")]


def _source(site: str, folder: Path) -> str:
    """Returns the text of the line that a site names; empty where it cannot be read."""
    file, _, line = site.partition(" ")[0].rpartition(":")
    return linecache.getline(str(folder / file), int(line)).strip() if file and line.isdigit() else ""


def _shortened(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 4].rstrip()} ..."


def _sentence(text: str) -> str:
    return text if not text or text.endswith((".", "!", "?", ":")) else f"{text}."


def _wrapped(text: str) -> list[str]:
    lines = list[str]()
    for part in text.splitlines() or [""]:
        lines += textwrap.wrap(part, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
    return lines


def _indented(label: str, text: str) -> list[str]:
    blank = " " * len(label)
    lines = textwrap.wrap(text, WIDTH - 2 - len(label), break_long_words=False, break_on_hyphens=False)
    return [f"  {label if not at else blank}{line}" for at, line in enumerate(lines)]


_CLEAR = "\r\x1b[K"
_SECONDS = 0.5


class ScriptProgress(logging.Handler):
    """A line on standard error, where that is a terminal, that is gone afterwards."""

    def __init__(self, target: str) -> None:
        super().__init__(logging.INFO)
        self._target = target
        self._stage = "starting"
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._logger = logging.getLogger("apportion.script_check")

    def __enter__(self) -> ScriptProgress:
        if sys.stderr is not None and sys.stderr.isatty():
            self._logger.addHandler(self)
            self._logger.setLevel(logging.INFO)
            self._thread = threading.Thread(target=self._draw, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take the stage that the check has reached."""
        self._stage = record.getMessage()

    def _draw(self) -> None:
        while not self._over.wait(_SECONDS):
            seconds = time.monotonic() - self._begun
            sys.stderr.write(f"{_CLEAR}checking {self._target}: {self._stage}, {seconds:.0f} s")
            sys.stderr.flush()
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
