"""Programs of other packages that a circuit is simulated, proved and placed with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from apportion.errors import ApportionError, ProgramMissing

SECONDS = 500.0
"""The longest time that a program may take."""


def found(*names: str) -> str | None:
    """Return the first of these programs that is installed."""
    return next((name for name in names if shutil.which(name) is not None), None)


def needed(what: str, cure: str, *names: str) -> str:
    """Return the first of these programs that is installed. Raises ProgramMissing, with the cure, where none is."""
    program = found(*names)
    if program is None:
        raise ProgramMissing(f"{what} needs the program {' or '.join(names)}, which is not installed: {cure}")
    return program


def version(program: str, question: str = "--version") -> str:
    """Return the first line of what a program says of its version."""
    answer = subprocess.run([program, question], capture_output=True, text=True, timeout=60, check=False)
    return next((line.strip() for line in (answer.stdout + answer.stderr).splitlines() if line.strip()), program)


def run(folder: Path, *command: str, seconds: float = SECONDS) -> tuple[int, str]:
    """Run a program in a folder and return its exit status and all that it printed. Raises ApportionError where it
    takes too long, or is ended by a signal. Then, and where this process is interrupted, what the program has started
    ends with it. Its temporary files lie in the folder."""
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env={**os.environ, "TMPDIR": str(folder)}, process_group=0,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=seconds)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with yosys go its abc, with verilator make and the compiler
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise ApportionError(f"{command[0]} has not ended within {seconds:g} s: make the network smaller") from None
        raise
    if process.returncode < 0:
        raise ApportionError(
            f"{command[0]} was ended by {signal.Signals(-process.returncode).name} from outside, perhaps for want of "
            "memory: export again"
        )
    return process.returncode, said


def must_run(folder: Path, *command: str, seconds: float = SECONDS) -> str:
    """Run a program as ``run`` does and return what it printed. Raises ApportionError where it fails."""
    status, said = run(folder, *command, seconds=seconds)
    if status:
        lines = [line for line in said.splitlines() if "error" in line.lower()] or said.strip().splitlines()[-3:]
        raise ApportionError(f"{command[0]} ended with status {status}: {' / '.join(lines[:3])}")
    return said
