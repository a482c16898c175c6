"""A training that one command starts on several hosts: what it trains, whether it makes steps, how it has ended."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from commands import SECONDS
from launched_runs import MINE

Eventually = Callable[..., None]
"""What the fixture of that name gives; tests of the product have a conftest.py of their own."""

TALKING = MINE.replace("    return nn.Sequential", '    print("made", flush=True)\n    return nn.Sequential')
"""mine.py, whose ranks say that they make the network."""


def ended(process: subprocess.Popen[str], status: int = 0, *, seconds: float = SECONDS) -> tuple[str, str]:
    """The output and the error output of a command that has ended with this status."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, out + err
    return out, err


def await_steps(run: Path, process: subprocess.Popen[str], eventually: Eventually) -> None:
    """Waits until a run has made some steps, so that every rank is known to have begun."""
    events = run / "events.jsonl"

    def steps() -> bool:
        assert process.poll() is None, process.communicate()
        return events.exists() and bool(re.search(r'"kind":"step","step":([5-9]|\d\d)', events.read_text()))

    eventually(steps, within=SECONDS, what="it trains")


def own_lines(err: str) -> list[str]:
    """The lines of an error output that ranks have not printed."""
    return [line for line in err.splitlines() if "made" not in line]


def forked_ranks(pids: list[int]) -> list[int]:
    """Those of some processes that are ranks: forked from the process that has torch imported."""
    found = []
    for pid in pids:
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if b"runtime.spawn.template" in Path(f"/proc/{parent}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found
