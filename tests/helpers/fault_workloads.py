"""One small training, with something wrong with it: each name is a workload.

Environment variables say where the trouble begins: FAULT_RANK (1; 0 where there is one worker), FAULT_STEP (4: in the
fourth step), FAULT_AFTER (a file that has to be there first: the saving goes on beside the steps), FAULT_MARK (a file
that is made just before), FAULT_PACE (seconds that every step takes).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from apportion import Evaluation, Workload

WORKERS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


def begins(step: int) -> bool:
    """Is it here and now?"""
    if min(int(os.environ.get("FAULT_RANK", "1")), WORKERS - 1) != RANK:
        return False
    if step != int(os.environ.get("FAULT_STEP", "4")):
        return False
    after = os.environ.get("FAULT_AFTER")
    deadline = time.monotonic() + 30
    while after is not None and not Path(after).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    mark = os.environ.get("FAULT_MARK")
    if mark is not None:
        Path(mark).write_text(str(time.time()))
    return True


class Network(nn.Module):
    """``trouble()`` is called in the forward pass of that step."""

    def __init__(self, trouble: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 16, bias=False), nn.Linear(16, 2)
        self.norm = nn.BatchNorm1d(16)  # which takes a bias away: Adam would make its rounding noise large
        self.trouble, self.steps = trouble, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            time.sleep(float(os.environ.get("FAULT_PACE", "0")))
            if begins(self.steps):
                self.trouble()
        return self.out(torch.tanh(self.norm(self.hidden(x))))


def data(n: int = 61) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


good = Workload(
    model=Network,
    data=data,
    loss=nn.functional.cross_entropy,
    optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
    batch_size=16,
    steps=60,
    precision="float64",
)


def fails_in(trouble: Callable[[], Any]) -> Workload:
    return replace(good, model=lambda: Network(trouble))


def boom() -> None:
    raise RuntimeError("boom in the model")


def leave_a_child_and_raise() -> None:
    subprocess.Popen(["sleep", "600"])
    raise RuntimeError("boom with a child")


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fill_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    torch.ones(1 << 28)


def fill_a_container() -> None:
    """Go where there is little memory, and take more."""
    folder = Path(os.environ["FAULT_CONTAINER"])
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    np.ones(1 << 27)


def fill_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))


raises = fails_in(boom)
raises_with_child = fails_in(leave_a_child_and_raise)
leaves_python = fails_in(lambda: sys.exit(4))
exits = fails_in(lambda: os._exit(7))
exits_well = fails_in(lambda: os._exit(0))
killed = fails_in(lambda: os.kill(os.getpid(), signal.SIGKILL))
terminated = fails_in(lambda: os.kill(os.getpid(), signal.SIGTERM))
crashes = fails_in(lambda: ctypes.string_at(0))
stopped = fails_in(stop_here)
hangs = fails_in(lambda: time.sleep(600))
memory = fails_in(fill_memory)
container = fails_in(fill_a_container)
numpy_memory = fails_in(lambda: np.ones(1 << 50))
disk = fails_in(fill_the_disk)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if begins(int(os.environ.get("FAULT_STEP", "4"))):
            raise RuntimeError("boom in backward")
        return gradients[0]


class BackwardNetwork(Network):
    """In the backward pass of the first step alone: FAULT_STEP does not count."""

    def forward(self, x: Tensor) -> Tensor:
        return Backward.apply(super().forward(x))


class BrokenData(Dataset[Any]):
    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> Any:
        if begins(4):
            raise KeyError("no such example")
        return torch.zeros(4), 1


def broken_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if begins(4):
        raise ArithmeticError("boom in the loss")
    return nn.functional.cross_entropy(outputs, targets)


def broken_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, learning_rate=0.1)  # type: ignore[call-arg]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(4), 1


raises_in_backward = replace(good, model=BackwardNetwork)
raises_in_data = replace(good, data=BrokenData)
raises_in_loss = replace(good, loss=broken_loss)
raises_in_optimizer = replace(good, optimizer=broken_optimizer)
iterable = replace(good, data=Endless)
empty = replace(good, data=lambda: data(0))
small_batch = replace(good, batch_size=2)
changed = replace(good, batch_size=8)
not_a_workload = "text"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out, self.steps = nn.GRU(4, 8), nn.Linear(8, 2), 0

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.steps += 1
        if begins(self.steps):
            time.sleep(600)
        outputs, state = self.cell(x.unsqueeze(0), state)
        return self.out(outputs[0]), state


recurrent = replace(good, model=Recurrent, carry=lambda n: torch.zeros(1, n, 8), order="sequential", batch_size=8)


def hang_in_an_update(optimizer: torch.optim.Optimizer, total: int) -> Any:
    """FAULT_STEP=-4: in the fourth update, so that it is not in the fourth forward pass."""

    def rate(updates: int) -> float:
        if updates and begins(-updates):
            time.sleep(600)
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


hangs_in_an_update = replace(good, schedule=hang_in_an_update)


def slow_metric(outputs: Tensor, targets: Tensor) -> float:
    time.sleep(0.4 if RANK else 0.1)
    return 0.0


slow_evaluation = replace(
    good, steps=8, evaluation=Evaluation(data=lambda: data(48), metrics={"slow": slow_metric}, every=1)
)
