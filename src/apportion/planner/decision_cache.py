"""Plans of earlier runs: for the same workload on the same machine nothing is measured again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from apportion.core import json_data
from apportion.core.json_data import cache_folder
from apportion.process import usable_cores

PLAN = "told"
"""The field of what is kept that holds the data of a ``plan`` event."""
FIELDS = {PLAN, "expected", "a_step", "measured_for"}
"""The fields of what is kept: the data of a ``plan`` event, the time that its steps should take, the seconds of a step
of one process, and the seconds that the measuring was allowed."""


def folder() -> Path:
    """Return the folder that decisions are kept in."""
    return cache_folder("plans")


def host() -> dict[str, Any]:
    """Describe what a plan depends on of this machine."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": usable_cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        "name": platform.node(),
        "torch": torch.__version__,
        "apportion": metadata.version("apportion"),
    }


def key(mark: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return the key of a plan for this workload, asked for in this way, on this machine."""
    text = json.dumps({"workload": mark, "asked": asked, "host": host()}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def recall(name: str) -> dict[str, Any] | None:
    """Return what was kept under this key; None where nothing was, or it is incomplete."""
    try:
        found = json.loads((folder() / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() >= FIELDS else None


def keep(name: str, plan: Mapping[str, Any]) -> None:
    """Keep a plan for the next run; where nothing can be written, the next run measures again."""
    json_data.keep(folder() / f"{name}.json", plan)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
