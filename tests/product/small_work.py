"""The small workloads of the tests here: for ``import``, and as a file that the command line is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion

ROWS, BATCH, STEPS = 60, 12, 6
SECONDS = 90.0
"""The seconds that a command may take on a busy machine."""
FILE = """
import os, pathlib, time, torch, apportion
from torch import nn

def rows():
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))

class Paced(nn.Module):
    \"\"\"Notes the process of each rank, and takes a while for each step, where the environment says so.\"\"\"
    def forward(self, x):
        if self.training and "PACE" in os.environ:
            note = pathlib.Path(os.environ["PIDS"], os.environ.get("RANK", "0"))
            note.with_suffix(".new").write_text(str(os.getpid()))
            note.with_suffix(".new").replace(note)
            time.sleep(float(os.environ["PACE"]))
        return x

def dense():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), Paced(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

class ByRank(nn.Module):
    \"\"\"Reads the rank of its process.\"\"\"
    def forward(self, x):
        return x * (1 + 0.01 * int(os.environ.get("RANK", "0")))

def work(**changes):
    given = dict(
        model=dense, data=rows, loss=nn.functional.cross_entropy, batch_size=12, steps=6, precision="float64", seed=3,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    return apportion.Workload(**{**given, **changes})

def raises(outputs, targets):
    raise KeyError("the cause")

def not_a_number(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets) * float("nan")

workload = work()
tested = work(evaluation=apportion.Evaluation(data=rows))
by_rank = work(model=lambda: nn.Sequential(nn.Linear(6, 8), ByRank(), nn.Linear(8, 3)))
raising = work(loss=raises)
diverging = work(loss=not_a_number)
long = work(steps=60)
endless = work(steps=100000)
"""


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0][:, -1])  # type: ignore[no-any-return]


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 3)
    )


SHAPES: dict[Callable[[], nn.Module], tuple[int, ...]] = {dense: (6,), convolutional: (1, 8, 8), Recurrent: (5, 6)}


def rows(shape: tuple[int, ...] = (6,)) -> TensorDataset:
    inputs = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs.flatten(1)[:, :3].argmax(1))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def work(model: Callable[[], nn.Module] = dense, **changes: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": model,
        "data": lambda: rows(SHAPES[model]),
        "loss": nn.functional.cross_entropy,
        "optimizer": momentum,
        "batch_size": BATCH,
        "steps": STEPS,
        "precision": "float64",
        "seed": 3,
    }
    return apportion.Workload(**{**given, **changes})


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has recorded of itself, as far as it has come."""
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses_of(run_dir: Path) -> list[float]:
    """The loss of each step."""
    return [loss for event in events_of(run_dir) if event["kind"] == "step" for loss in event["data"]["values"]["loss"]]


def checkpoints_of(run_dir: Path) -> list[int]:
    """The steps of the checkpoints that a run directory has."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


@contextmanager
def training(folder: Path, name: str, *words: str, pace: float = 0.05) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The process of a run of two workers of the file in this folder, which takes these seconds a step, and the folder
    in which each rank notes its process. The run is killed where the test leaves it running."""
    pids = folder / "pids"
    pids.mkdir(exist_ok=True)
    given = ["train", f"work.py:{name}", "data_parallel", "--workers", "2", "--run-dir", "run", "--no-check", *words]
    process = subprocess.Popen(
        [sys.executable, "-m", "apportion", *given],
        cwd=folder,
        env={**os.environ, "PACE": str(pace), "PIDS": str(pids)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process, pids
    finally:
        process.kill()
        process.communicate()
