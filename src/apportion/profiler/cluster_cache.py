"""A cache of clusters as they were measured, kept by what distinguishes one machine from another."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from apportion.core.json_data import cache_folder, keep
from apportion.cost_model.cluster import Cluster
from apportion.process import usable_cores
from apportion.profiler.discover import cpu_model, memory_bytes, numa_nodes

FORMAT = 1
"""The version of the format, which is raised where what is measured, or how, has changed."""


def fingerprint() -> dict[str, Any]:
    """Describe what the numbers depend on: the processor, how many of its cores, how they lie, torch, the GPUs."""
    gpus = range(torch.cuda.device_count())
    return {
        "format": FORMAT,
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "cores": usable_cores(),
        "nodes": [len(node) for node in numa_nodes()],
        "memory_gib": round(memory_bytes() / 2**30),
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
    }


def read(seconds: float, where: Path | None = None) -> Cluster | None:
    """Read this machine as it was measured before, for ``seconds`` or longer; None where it was not, or what was
    kept cannot be read."""
    made_of = fingerprint()
    try:
        data = json.loads(_path(made_of, where).read_text())
        if data["fingerprint"] != made_of or data["seconds"] < seconds:
            return None
        return Cluster.from_json(data["cluster"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(cluster: Cluster, seconds: float, where: Path | None = None) -> None:
    """Keep the cluster; where it cannot be written, the machine is measured again the next time."""
    made_of = fingerprint()
    data = {"fingerprint": made_of, "seconds": seconds, "cluster": cluster.to_json()}
    keep(_path(made_of, where), data)


def _path(made_of: dict[str, Any], where: Path | None) -> Path:
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    return (where or cache_folder("clusters")) / f"{digest[:16]}.json"
