"""A member that is ready to be served: prepare.py is asked, in a process of its own, and what it tried is logged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from apportion.cores import usable_cores
from apportion.errors import ApportionError
from apportion.ownership import projects
from apportion.serving.log import log
from apportion.serving.serving import Serving
from apportion.serving.source import Source

SECONDS = 300.0
"""For one member to be loaded, exported and timed."""


def prepared(name: str, place: str, folder: Path, serving: Serving, members: int) -> Source:
    """``members``: how many there will be: they share the cores. ValueError where the place holds no net."""
    cores = usable_cores()
    threads = [serving.threads] if serving.threads else sorted({1, max(1, cores // members)})
    order: dict[str, Any] = {"name": name, "place": place, "folder": str(folder), "threads": threads}
    order |= {"trust": serving.trust, "projects": [str(project) for project in projects()]}
    command = [sys.executable, "-m", "apportion.serving.prepare", str(os.getpid())]
    try:
        ran = subprocess.run(command, input=json.dumps(order), stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ApportionError(f"member {name} ({place}) was not loaded within {SECONDS:g} s") from error
    if ran.returncode != 0 or not ran.stdout:
        raise ApportionError(f"member {name} ({place}) could not be loaded: its process ended with {ran.returncode}")
    told: dict[str, Any] = json.loads(ran.stdout)
    if "refused" in told:
        raise (ValueError if told["user"] else ApportionError)(told["refused"])
    for line in told["said"]:
        log(line, member=name)
    return Source(**told["source"])
