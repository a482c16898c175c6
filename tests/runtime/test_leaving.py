"""Leaving the loop over a run's events when the run is over: it is left at once, and stays as it ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Within
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Workload
from apportion.api.train import run
from apportion.core.event import Event
from apportion.errors import WorkerFailed
from apportion.reporting.journal import read_events
from apportion.runtime.launch.local import Local
from apportion.runtime.spawn.template import template

SECONDS = 1.0
pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]


class _Own(Exception):
    """Of the body of the loop."""


class _Breaks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")


@pytest.fixture(autouse=True)
def warm() -> None:
    template().wait_ready()


def events(folder: Path, workers: int = 2, layer: Any = nn.Linear) -> Iterator[Event]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(70, 6, generator=generator)
    workload = Workload(
        model=lambda: layer(6, 3),
        data=lambda: TensorDataset(x, x[:, :3].argmax(1)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=16,
        steps=12,
    )
    name = "single_device" if workers == 1 else "data_parallel"
    return run(workload, name, launcher=Local(workers=workers, threads=1), run_dir=folder)


def ended(folder: Path) -> list[Any]:
    return [event.data["reason"] for event in read_events(folder) if event.kind == "end"]


@pytest.mark.serial
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("way", ["break", "exception", "close"])
@pytest.mark.usefixtures("reports")
def test_leaving_at_the_end_returns_at_once_and_the_run_is_finished(
    way: str, workers: int, tmp_path: Path, within: Within
) -> None:
    going = events(tmp_path / "run", workers)
    with pytest.raises(_Own) if way == "exception" else within(60.0, "the run"):
        for event in going:
            if event.kind == "end":
                assert (tmp_path / "run" / "report.html").exists(), "who leaves here waits for no drawing"
                left = time.monotonic()
                if way == "exception":
                    raise _Own
                if way == "break":
                    break
                going.close()  # type: ignore[attr-defined]
    del going
    assert time.monotonic() - left < SECONDS
    assert ended(tmp_path / "run") == ["finished"]
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("caught", [True, False])
def test_ctrl_c_at_the_end_leaves_the_run_finished(caught: bool, tmp_path: Path) -> None:
    seen = []

    def loop() -> None:
        for event in events(tmp_path / "run"):
            seen.append(event)
            if event.kind == "end":
                try:
                    signal.raise_signal(signal.SIGINT)
                except KeyboardInterrupt:
                    if not caught:
                        raise

    if caught:
        loop()
    else:
        with pytest.raises(KeyboardInterrupt) as interrupt:
            loop()
        assert interrupt.value.__notes__ == ["interrupted; the run had finished by then: step 12 is its last"]
    assert [event.kind for event in seen].count("end") == 1
    assert ended(tmp_path / "run") == ["finished"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.serial
def test_leaving_at_the_fault_that_stops_a_run_returns_at_once(tmp_path: Path) -> None:
    for event in events(tmp_path / "run", layer=_Breaks):
        if event.kind == "fault":
            left = time.monotonic()
            break
    assert time.monotonic() - left < SECONDS
    assert event.data["action"] == "stops"


def test_ctrl_c_at_the_fault_that_stops_a_run_does_not_hide_the_failure(tmp_path: Path) -> None:
    told = []

    def loop() -> None:
        for event in events(tmp_path / "run", layer=_Breaks):
            if event.kind == "fault":
                with pytest.raises(KeyboardInterrupt) as interrupt:
                    signal.raise_signal(signal.SIGINT)
                told.extend(interrupt.value.__notes__)

    with pytest.raises(WorkerFailed, match="boom"):
        loop()
    assert "the run had stopped: rank" in told[0]


def test_leaving_earlier_is_an_interruption(tmp_path: Path) -> None:
    for event in events(tmp_path / "run"):
        if event.kind == "start":
            break
    assert ended(tmp_path / "run") in (["stopped"], ["finished"])  # twelve steps may be over before it is heard
