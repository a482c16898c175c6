"""Runs whose workers are killed as they train: what is told of it, and what is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networks
import pytest
from ranks import by_value
from safetensors.torch import load_file
from torch import Tensor

import apportion
from apportion import Workload
from apportion.core.strategy import Strategy
from apportion.runtime.launch.local import Local
from apportion.runtime.supervisor import run as supervisor
from apportion.runtime.supervisor.worker_pool import WorkerPool


def faults_of(
    workload: Workload | str,
    strategy: Strategy | str,
    workers: int,
    run_dir: Path,
    doomed: Sequence[int] = (),
    **options: Any,
) -> list[apportion.Event]:
    """``doomed``: ranks to be killed, each once the one before has been replaced; what was told of them."""
    pools: list[WorkerPool] = []
    faults: list[apportion.Event] = []
    waiting = list(doomed)
    with pytest.MonkeyPatch.context() as patch, by_value(networks):
        patch.setattr(supervisor, "WorkerPool", lambda *made: pools.append(WorkerPool(*made)) or pools[-1])
        launcher = Local(workers=workers, threads=1)
        for event in apportion.run(workload, strategy, launcher=launcher, run_dir=run_dir, **options):
            faults += [event] if event.kind == "fault" else []
            if event.kind == "step" and event.step > 3 and waiting and len(faults) == len(doomed) - len(waiting):
                os.kill(pools[-1].pids()[waiting.pop(0)], signal.SIGKILL)
    assert not waiting
    return faults


def saved(run_dir: Path) -> dict[str, Tensor]:
    """Weights and slots of the last checkpoint."""
    folder = run_dir / "checkpoints" / "latest"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")
