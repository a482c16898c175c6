"""A training that others start, in a file of the user's own, and what it must come to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import apportion
from apportion.core.address import load_workload

MINE = """
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def examples():
    x = torch.randn(61, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def slow(outputs, targets):
    time.sleep(0.02)
    return nn.functional.cross_entropy(outputs, targets)


def made(**fields):
    given = {"model": network, "data": examples, "loss": nn.functional.cross_entropy, "batch_size": 16, "steps": 20}
    return apportion.Workload(
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01), precision="float64", **{**given, **fields}
    )


workload = made()
endless = made(loss=slow, steps=100_000)
"""
"""mine.py."""
STEPS = 20


def losses(run: Path) -> list[float]:
    """The loss of every step that a run directory has written down."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [loss for event in events if event["kind"] == "step" for loss in event["data"]["values"]["loss"]]


def assert_losses_of_one_device(run: Path, mine: Path, steps: int = STEPS) -> None:
    """Holds the losses of a run against those of one process, which trains the same file's workload here, for so many
    steps."""
    alone: list[float] = []
    one = apportion.local(workers=1)
    workload = replace(load_workload(f"{mine}:workload"), steps=steps)
    for event in apportion.run(workload, "single_device", launcher=one, run_dir="alone"):
        if event.kind == "step":
            alone += event.data["values"]["loss"]
    found = losses(run)
    assert len(found) == len(alone) == steps
    assert max(abs(a - b) for a, b in zip(found, alone, strict=True)) <= 1e-10


def on_host(namespace: str, name: str, table: Path, command: Sequence[str]) -> list[str]:
    """The same in a network namespace, on a host of this name, with its own table of hosts."""
    own = f'hostname {name} && mount --bind {table} /etc/hosts && exec "$@"'
    return ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", own, "sh", *command]
