"""``apportion check train.py -- ARGS``: the check of a script, as a command whose last words are the script's own."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from apportion.cli.script_display import ScriptProgress, answer_lines

_OWN = "apportion.script_arguments"
_HINT = "the arguments of a script follow --, as in: apportion check train.py --workers 2 -- --lr 0.1"
_ALIASES = {"--nproc_per_node": "--workers", "--nproc-per-node": "--workers"}
"""The names that torchrun has for an option."""


class WithScriptArguments(click.Command):
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
        click.echo(_NUMBERS.sub(_on_one_line, json.dumps(answer.as_json(), indent=1, default=str)))
    else:
        click.echo("\n".join(answer_lines(answer, target)))
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
