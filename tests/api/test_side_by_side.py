"""Several runs from different seeds, side by side."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from commands import SECONDS, start

import apportion
from apportion.api.side_by_side import EnsembleGroup, divided

pytestmark = pytest.mark.processes

WORK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion

generator = torch.Generator().manual_seed(0)
x = torch.randn(256, 8, generator=generator)
data = TensorDataset(x, (x.sum(1) > 0).long())
workload = apportion.Workload(
    model=lambda: nn.Linear(8, 2),
    data=lambda: data,
    loss=nn.functional.cross_entropy,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    batch_size=32,
    steps=STEPS,
    seed=5,
    evaluation=apportion.Evaluation(data=lambda: data),
)
"""
TRAIN = (sys.executable, "-m", "apportion", "train", "work.py:workload", "--strategy", "single_device")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").touch()  # what lies here is the caller's own
    (tmp_path / "work.py").write_text(WORK.replace("STEPS", "20"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_devices_are_divided_among_as_many_as_there_is_room_for() -> None:
    assert divided([0, 1, 2, 3, 4], [], 2) == [EnsembleGroup((0, 1), ()), EnsembleGroup((2, 3), ())]
    assert divided([3, 7], [], 4) == [EnsembleGroup((3,), ()), EnsembleGroup((7,), ())]
    assert divided([], [], 3) == [EnsembleGroup((), ())]
    assert divided([0, 1, 2, 3], ["0", "1", "2"], 3) == [EnsembleGroup((n,), (str(n),)) for n in range(3)]
    assert divided([0, 1, 2, 3], ["5"], 3) == [EnsembleGroup((0, 1, 2, 3), ("5",))]


@pytest.mark.slow
def test_each_member_is_a_run_of_its_own_from_a_seed_of_its_own(folder: Path) -> None:
    process = start([*TRAIN, "--members", "3", "--run-dir", "nets"])
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 0, text
    runs = [json.loads((folder / "nets" / f"m{n}" / "run.json").read_text()) for n in (1, 2, 3)]
    assert [run["fingerprint"]["seed"] for run in runs] == [5, 6, 7]
    assert re.search(r"^m2  .*accuracy", text, re.MULTILINE)
    assert text.splitlines()[-1] == "apportion serve nets/m1 nets/m2 nets/m3"
    weights = [apportion.load(folder / "nets" / f"m{n}").weight for n in (1, 2, 3)]
    assert not torch.equal(weights[0], weights[1])  # type: ignore[arg-type]
    alone = start([*TRAIN, "--seed", "6", "--run-dir", "alone"])
    alone.communicate(timeout=SECONDS)
    assert torch.equal(apportion.load(folder / "alone").weight, weights[1])  # type: ignore[arg-type]


def test_whoever_fails_is_named_and_the_others_are_kept(folder: Path) -> None:
    (folder / "nets").mkdir()
    (folder / "nets" / "m2").write_text("in the way")
    process = start([*TRAIN, "--members", "2", "--run-dir", "nets"])
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 3, text
    assert "1 of 2 members were not trained: m2 (exit status" in text
    assert "apportion serve nets/m1\n" in text


def test_wrong_uses_say_the_cure(folder: Path) -> None:
    process = start([*TRAIN, "--members", "2", "--seed", "3"])
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 2, text
    assert "leave --seed out" in text


def test_a_signal_ends_all_of_them(folder: Path) -> None:
    (folder / "work.py").write_text(WORK.replace("STEPS", "10_000_000"))
    process = start([*TRAIN, "--members", "2", "--run-dir", "nets"])
    assert process.stdout is not None
    seen: set[str] = set()
    for line in process.stdout:
        seen.add(line[:2])
        if {"m1", "m2"} <= seen:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode != 0
