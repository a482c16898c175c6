"""``apportion check train.py -- ARGS``: the check of a script, as a command whose last words are the script's own."""

from __future__ import annotations

import json
import linecache
import logging
import os
import re
import shlex
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import typer
from typer.core import TyperCommand

from apportion.script_check.findings import Finding, ScriptAnswer

_OWN = "apportion.script_arguments"
_HINT = "the arguments of a script follow --, as in: apportion check train.py --workers 2 -- --lr 0.1"
_ALIASES = {"--nproc_per_node": "--workers", "--nproc-per-node": "--workers"}
"""The names that torchrun has for an option."""


class WithScriptArguments(TyperCommand):
    """A command for which all words after the first ``--`` are the arguments of a script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before ``--``; those after it are what ``script_arguments`` returns."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_OWN] = tuple(args[at + 1 :])
        parts = [word.partition("=") for word in args[:at]]
        given = [_ALIASES.get(name, name) + equals + value for name, equals, value in parts]
        try:
            return super().parse_args(ctx, given)
        except Exception as error:
            message = getattr(error, "message", None)
            if isinstance(message, str) and (hasattr(error, "option_name") or "unexpected extra argument" in message):
                error.message = f"{message.rstrip('.')}: {_HINT}"  # type: ignore[attr-defined]
            raise


def script_arguments(context: Any) -> tuple[str, ...]:
    """Returns the words that follow ``--`` on the command line."""
    found: tuple[str, ...] = context.meta[_OWN]
    return found


_NUMBERS = re.compile(r"\[[\s\d.,e+nul-]+\]")
"""A list of numbers in JSON, with null for those that are not there."""


@dataclass(frozen=True)
class ScriptRequest:
    """The words of a command line that checks a script. ``target``: a file, or None with ``module``; ``own``: the
    script's arguments; the others are the flags of their names."""

    target: str | None
    module: str | None
    own: tuple[str, ...]
    workers: int | None
    steps: int | None
    accept: Sequence[str]
    then: str | None
    reference: str | None
    out: str | None
    as_json: bool


def workload_of(target: str | None, own: Sequence[str], of_scripts: Mapping[str, Any], strategy: str | None) -> str:
    """Returns the FILE:NAME of a command line that proves a strategy. ``own``: the words after ``--``; ``of_scripts``:
    flags that go with scripts. Raises ValueError where something is missing, or of no use."""
    if target is None:
        raise ValueError(
            "Missing argument: give the script to check, as in apportion check train.py --workers 2, or a workload, as "
            "FILE:NAME with --strategy"
        )
    for flag, value in of_scripts.items():
        if value:
            file = target.partition(":")[0]
            raise ValueError(f"{flag} goes with a script, and {target} is a workload: leave it out, or give {file}")
    if own:
        raise ValueError(
            f"{' '.join(own)!r} after -- are arguments of a script, and {target} is a workload, which takes none: "
            "leave them out"
        )
    if strategy is None:
        raise ValueError(
            f"Missing option '--strategy': a workload is proved with a strategy, as in apportion check {target} "
            "--strategy data_parallel --workers 2"
        )
    return target


def check_script_command(request: ScriptRequest, of_workloads: Mapping[str, str | None]) -> int:
    """Check a script, print the answer, and return the exit status. ``of_workloads``: the values of flags that go with
    FILE:NAME alone. Raises ValueError for wrong usage."""
    target = _target(request, of_workloads)
    then = _words(request.then)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    from apportion.api.check_script import RANKS, check_script, script_of
    from apportion.script_check.driver import STEPS
    from apportion.script_check.report import write_report

    with ScriptProgress(target):
        answer = check_script(
            target,
            request.own,
            module=request.module is not None,
            workers=RANKS if request.workers is None else request.workers,
            steps=STEPS if request.steps is None else request.steps,
            accept=request.accept,
            then=then,
            reference=request.reference,
        )
    if request.as_json:
        typer.echo(_NUMBERS.sub(_on_one_line, json.dumps(answer.as_json(), indent=1, default=str)))
    else:
        typer.echo("\n".join(answer_lines(answer, target)))
    if request.out is not None:  # after the answer, which is not to be lost where the disk is full
        try:
            write_report(answer, script_of(target, request.own, module=request.module is not None), request.out)
        except OSError as error:
            raise OSError(f"--out {request.out} was not written: {error.strerror or error}") from error
    return answer.status


def _target(request: ScriptRequest, of_workloads: Mapping[str, str | None]) -> str:
    """Returns the file or module. Raises ValueError where flags do not go together."""
    if request.module is not None and request.target is not None:
        raise ValueError(
            f"-m {request.module} and {request.target} are two scripts: leave either out; arguments of a script follow "
            f"--, as in apportion check -m {request.module} -- {request.target}"
        )
    target = request.module or request.target or ""
    for flag, value in of_workloads.items():
        if value is not None:
            hint = (
                f"write {target}:NAME (FILE:NAME) for the workload in it"
                if target.endswith(".py")
                else "give FILE:NAME"
            )
            raise ValueError(
                f"{flag} {value} goes with a workload, and {target} is a script, which has its own way to run on "
                f"several ranks: leave {flag} out, or {hint}"
            )
    if request.out is not None and (what := _unusable(request.out, target)):
        raise ValueError(f"--out {request.out or repr('')} {what}: give the file to write the page to, as check.html")
    return target


def _words(then: str | None) -> list[str] | None:
    """Returns the arguments of a second run, which are given as one word. Raises ValueError where a quote is open."""
    try:
        return None if then is None else shlex.split(then)
    except ValueError as error:
        raise ValueError(f"--then {then!r} cannot be divided into arguments ({error}): close its quotes") from error


def _unusable(out: str, target: str) -> str:
    """Returns why a page cannot be written to a path, which is found before the check takes its time; empty where
    nothing is against it."""
    path = Path(out)
    if not out:
        return "names no file"
    if path.is_dir():
        return "is a folder"
    if not path.parent.is_dir():
        return f"lies in {path.parent}, which does not exist"
    if not os.access(path.parent, os.W_OK):
        return f"lies in {path.parent}, where you may not write"
    if path.exists() and Path(target).exists() and path.samefile(target):
        return "is the script itself"
    return ""


def _end(number: int, _: object) -> None:
    """End by a signal as by an exception, so that the script's processes end and its folder is removed."""
    raise SystemExit(128 + number)


def _on_one_line(found: re.Match[str]) -> str:
    return " ".join(found[0].split())


# What the check of a script is doing, as a line on the terminal, and what it has found, as lines of text.


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
    "the same network": typer.colors.GREEN,
    "the same network, but": typer.colors.YELLOW,
    "undecided": typer.colors.YELLOW,
}
_LABELS = {"warning": "Wrong: ", "note": "Note: "}


def answer_lines(answer: ScriptAnswer, target: str) -> Iterator[str]:
    """Yields the verdict, the findings, what each rank was doing where they wait, what was compared, and how the script
    was run."""
    ranks = answer.compared.get("ranks", "several")
    verdict = _VERDICTS[answer.verdict].format(ranks=ranks, script=Path(target).name, reason=_sentence(answer.reason))
    colour = _COLOURS.get(answer.verdict, typer.colors.RED)
    for line in _wrapped(verdict):
        yield typer.style(line, fg=colour, bold=True)
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
            yield typer.style(line, dim=True)


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
        yield typer.style(f"  accept with: --accept {finding.name}", dim=True)


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
