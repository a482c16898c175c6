"""A schedule that is meant for epochs and stepped once an update is told before it has ended the training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import by_value
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import TensorDataset

import apportion
from apportion.reporting.journal import read_events
from apportion.runtime.worker.schedule_lookahead import rates_ahead, warning_of

EPOCH, TOTAL = 500, 5_000


def optimizer(kind: Any = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind([nn.Parameter(torch.zeros(3))], lr=0.1, **options)
    return made


def warm_up(made: torch.optim.Optimizer, total: int) -> Any:
    rising = schedules.LinearLR(made, start_factor=1e-8, total_iters=100)
    return schedules.SequentialLR(made, [rising, schedules.CosineAnnealingLR(made, total - 100)], [100])


@pytest.mark.parametrize(
    ("schedule", "by"),
    [
        (lambda o, total: schedules.ExponentialLR(o, 0.9), 132),
        (lambda o, total: schedules.StepLR(o, 10, 0.1), 60),
        (lambda o, total: schedules.MultiStepLR(o, [30, 60, 80], 1e-3), 60),
        (lambda o, total: schedules.CosineAnnealingWarmRestarts(o, 100), None),
        (lambda o, total: schedules.CosineAnnealingLR(o, total), None),
        (lambda o, total: schedules.OneCycleLR(o, 0.1, total_steps=total), None),
        (lambda o, total: schedules.LambdaLR(o, lambda step: 1 - step / total), None),
        (lambda o, total: schedules.ExponentialLR(o, 0.9 ** (1 / EPOCH)), None),
        (lambda o, total: schedules.LambdaLR(o, lambda step: 0.0), None),
        (warm_up, None),
    ],
)
def test_what_ends_the_training_in_its_first_epoch_is_told(schedule: Any, by: int | None) -> None:
    told = warning_of(schedule, optimizer(momentum=0.9), total=TOTAL, steps_per_epoch=EPOCH)
    if by is None:
        assert told is None
        return
    assert told is not None
    found = int(told.partition("by update ")[2].split()[0])
    assert abs(found - by) <= 1
    assert "once an update, not once an epoch" in told
    assert f"gamma ** (1 / {EPOCH})" in told


def test_a_training_of_one_epoch_may_end_at_zero() -> None:
    def linear(made: torch.optim.Optimizer, total: int) -> Any:
        return schedules.LinearLR(made, 1.0, 0.0, total_iters=total)

    assert warning_of(linear, optimizer(), total=50, steps_per_epoch=50) is None


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_training_goes_on_as_if_nobody_had_looked(kind: Any) -> None:
    looked, other = optimizer(kind), optimizer(kind)
    makes = lambda o, total: schedules.LinearLR(o, 0.5, total_iters=10)  # noqa: E731
    running, beside = makes(looked, 20), makes(other, 20)
    rates = rates_ahead(makes, looked, 20, 12)
    assert rates[0] == pytest.approx(0.05)
    assert rates[-1] == pytest.approx(0.1)
    assert looked.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    for _ in range(5):
        for made, stepped in ((looked, running), (other, beside)):
            parameter = made.param_groups[0]["params"][0]
            parameter.grad = torch.ones(3)
            made.step()
            stepped.step()
    assert torch.equal(looked.param_groups[0]["params"][0], other.param_groups[0]["params"][0])
    assert running.get_last_lr() == beside.get_last_lr()


@pytest.mark.processes
def test_a_run_tells_it_once_and_goes_on(tmp_path: Path) -> None:
    work = apportion.Workload(
        model=lambda: nn.Linear(4, 3),
        data=lambda: TensorDataset(torch.ones(200, 4), torch.arange(200) % 3),
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        schedule=lambda made, total: schedules.ExponentialLR(made, 0.5),
        batch_size=2,
        epochs=1,
    )
    with by_value(sys.modules[__name__]):
        launcher = apportion.local(workers=2, threads=1, device="cpu")
        end = apportion.train(work, "data_parallel", launcher=launcher, run_dir=tmp_path / "run")
    assert end.data["reason"] == "finished"
    (fault,) = [event for event in read_events(tmp_path / "run") if event.kind == "fault"]
    assert fault.step == 0
    assert fault.data["action"] == "goes on"
    assert "by update 20 of 100" in fault.data["cause"]
