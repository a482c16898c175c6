"""The preparation of a member: prepare.py is run in a separate process, and what it tried is logged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from apportion.errors import ApportionError
from apportion.process import usable_cores
from apportion.runtime.checkpoint.code_ownership import projects
from apportion.serving.config import Serving
from apportion.serving.log import log
from apportion.serving.runtimes.source import Source

SECONDS = 300.0
"""The seconds in which one member has to be loaded, exported and timed."""
PROGRESS_SECONDS = 5.0
"""The seconds between two lines about a member that is not loaded and timed yet."""


def prepared(name: str, place: str, folder: Path, serving: Serving, members: int) -> Source:
    """Load, export and time a member. ``members``: how many there will be, which share the cores. Raises ValueError
    where the place holds no model, and ApportionError where it could not be loaded."""
    cores = usable_cores()
    threads = [serving.threads] if serving.threads else sorted({1, max(1, cores // members)})
    order: dict[str, Any] = {"name": name, "place": place, "folder": str(folder), "threads": threads}
    order |= {"batch": serving.batch, "trust": serving.trust, "projects": [str(project) for project in projects()]}
    command = [sys.executable, "-m", "apportion.serving.prepare", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            answer = _answer_of(process, json.dumps(order), f"member {name} ({place})")
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0 or not answer:
        raise ApportionError(
            f"member {name} ({place}) could not be loaded: its process ended with {process.returncode}"
        )
    reply: dict[str, Any] = json.loads(answer)
    if "refused" in reply:
        raise (ValueError if reply["user"] else ApportionError)(reply["refused"])
    for line in reply["said"]:
        log(line, member=name)
    return Source.from_json(reply["source"])


def _answer_of(process: subprocess.Popen[str], order: str | None, member: str) -> str:
    """Return what the process has written when it ends, and log a line now and then while it takes long."""
    began = time.monotonic()
    while True:
        try:
            return process.communicate(order, timeout=PROGRESS_SECONDS)[0]
        except subprocess.TimeoutExpired as error:
            took, order = time.monotonic() - began, None  # it may be given once
            if took >= SECONDS:
                raise ApportionError(f"{member} was not loaded and timed within {SECONDS:g} s") from error
            log("still starting", pid=process.pid, why=f"{member} is loaded and timed, for {took:.0f} s so far")
