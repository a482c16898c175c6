"""The notice to end: the signals that give it, Ctrl-C among them, and the job that Slurm requeues after it
(``Policy(requeue=True)``)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

from apportion.core.policy import Policy
from apportion.errors import ToldToEnd
from apportion.process import in_slurm_job

SAME_SECONDS = 0.5
"""The seconds within which a second notice is the same one: Slurm signals a process, and srun passes it on besides."""
_DEFAULTS = {signal.SIGINT: signal.default_int_handler}
"""The handlers that Python begins with, where they are not those of the system."""


def notice_signals(environment: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """Returns the signals that are the notice to end: SIGTERM, SIGHUP of a terminal or an ssh that goes away, and
    SIGUSR1 in a job of Slurm's, which sends it some seconds before the end of the job (``sbatch
    --signal=B:USR1@60``)."""
    always = (signal.SIGTERM, signal.SIGHUP)
    return (*always, signal.SIGUSR1) if in_slurm_job(environment) else always


def raised_by(number: int) -> KeyboardInterrupt | ToldToEnd:
    """Returns what a signal is raised as in the main thread of a run."""
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return ToldToEnd(number, f"told to end by {signal.Signals(number).name}")


def explain(interrupt: BaseException, text: str) -> None:
    """Tells with an interrupt what became of the run. Python shows nothing of a ``ToldToEnd``, so that its text is
    written to standard error."""
    interrupt.add_note(text)
    if isinstance(interrupt, ToldToEnd):
        with suppress(OSError, ValueError, AttributeError, RuntimeError):  # the terminal may be what has ended the run
            _write_in_handler(f"{text}\n")


def _write_in_handler(text: str) -> None:
    """Writes to standard error while whatever was interrupted may hold the locks of its stream, or those of a progress
    bar that stands in for it: past them where there is a file."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # a notebook's, or a test's
        sys.stderr.write(text)
        sys.stderr.flush()
    else:
        os.write(descriptor, text.encode(errors="replace"))


@final
class RunHandlers:
    """Handlers of signals, for as long as a run goes on. None is installed where the program has one of its own, where
    a signal is ignored (SIGHUP under nohup), or in another thread than the main one."""

    def __init__(self, handler: Callable[[int, Any], None], *, ctrl_c: bool = True, notices: bool = True) -> None:
        """Takes the handler of all signals. ``ctrl_c``, ``notices``: whether Ctrl-C, and the notice to end, are among
        them."""
        asked: Sequence[signal.Signals] = (signal.SIGINT,) if ctrl_c else ()
        self._asked = (*asked, *(notice_signals(os.environ) if notices else ()))
        self._handler = handler
        self._installed: list[signal.Signals] = []

    def install(self) -> None:
        """Installs the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._asked:
            # A handler of the program, or an ignored signal, is the wish of the user, and stays.
            if signal.getsignal(number) is _DEFAULTS.get(number, signal.SIG_DFL):
                self._installed.append(number)
                signal.signal(number, self._handler)

    def restore(self) -> None:
        """Puts the handlers back that ``install`` has replaced."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._installed:
            number = self._installed.pop()
            signal.signal(number, _DEFAULTS.get(number, signal.SIG_DFL))


_SECONDS = 10.0
"""The seconds that Slurm may take to answer."""


def refuse_requeue(policy: Policy, environment: Mapping[str, str]) -> None:
    """Raises ValueError where a policy asks for what only a job of Slurm's can have."""
    if not policy.requeue:
        return
    if not in_slurm_job(environment):
        raise ValueError(
            "policy(requeue=True) has Slurm requeue the job that the run is in, and SLURM_JOB_ID is not set here: "
            "start the run by sbatch, or leave requeue out"
        )
    if shutil.which("scontrol") is None:
        raise ValueError(
            "policy(requeue=True) needs scontrol, which is not on PATH: load Slurm's module, or install slurm-client, "
            "or leave requeue out"
        )


def requeue_job(policy: Policy) -> None:
    """Has Slurm requeue the job of this process, where the policy says so. Slurm ends what is left of the job for it,
    this process with it: nothing comes after this. What goes wrong is said on standard error."""
    job = os.environ.get("SLURM_JOB_ID")
    if not policy.requeue or not job:
        return
    sys.stderr.write(f"job {job} is requeued\n")
    sys.stderr.flush()
    try:
        # The line above is written first: Slurm may kill this process before scontrol returns.
        command = ["scontrol", "requeue", job]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        why = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    if why:
        sys.stderr.write(f"job {job} was not requeued: {why}; submit it again\n")
