"""Where ranks wait, from the Python stacks that ``faulthandler`` has printed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from apportion.core.installed import in_packages
from apportion.process import PACKAGE

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x")
_SHOWN = 6
_OWN_MAIN = f"{PACKAGE}/testing/rank.py"


def where_ranks_wait(logs: Mapping[str, tuple[str, str]]) -> str:
    """Returns the stacks of ranks as text, the innermost frame first. ``logs``: for each rank by its name where it is,
    in words, and what it has printed."""
    return "\n".join(f"  {name}, {where}:\n{_indented(log)}".rstrip(":\n") for name, (where, log) in logs.items())


def before_stacks(log: str) -> str:
    """Returns what a rank had printed before its stacks."""
    lines = log.splitlines()
    first = next((n for n, line in enumerate(lines) if _THREAD.match(line)), len(lines))
    return "\n".join(lines[:first])


def _indented(log: str) -> str:
    frames = main_stack(log)
    return "\n".join(f"    {frame}" for frame in frames)


def main_stack(log: str) -> list[str]:
    """Returns the frames of the last stack of the main thread in a log, from the innermost to the outermost of the
    user's own, as ``file.py:12 in step``."""
    stacks = list[list[tuple[str, str, str]]]()
    for line in log.splitlines():
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and (found := _FRAME.match(line)):
            stacks[-1].append((found["file"], found["line"], found["name"]))
    mains = [stack for stack in stacks if any(file == _OWN_MAIN for file, _, _ in stack)]
    if not mains:
        return []
    outside = [frame for frame in mains[-1] if not frame[0].startswith((f"{PACKAGE}/", "<frozen"))]
    users = [place for place, frame in enumerate(outside) if not _installed(frame[0])]
    inner = outside[: users[0]][:_SHOWN] if users else outside[:_SHOWN]
    own = [outside[place] for place in users]
    return [f"{file}:{line} in {name}" for file, line, name in [*inner, *own]]


def _installed(file: str) -> bool:
    return in_packages(file) or "/lib/python3" in file
