"""The plugin of pytest: a project's tests use a fixture and a marker, and other sessions are as without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

PROJECT = """
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS = (torch.randn(32, 5), torch.randint(0, 3, (32,)))


def train(model, optimizer, rows, reduction="mean"):
    inputs, targets = rows
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets, reduction=reduction)
    loss.backward()
    return loss


def step(model, optimizer, rows):
    loss = train(model, optimizer, rows)
    optimizer.step()
    return loss


def network():
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3))


@pytest.mark.ranks(2)
def test_correct_ddp(assert_same_network):
    assert_same_network(step, model=network(), wrap=DistributedDataParallel, rows=ROWS)


@pytest.mark.ranks(2)
def test_correct_sum(assert_same_network):
    def summed(model, optimizer, rows):
        loss = train(model, optimizer, rows, "sum")
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss

    assert_same_network(summed, model=network(), rows=ROWS, optimizer=torch.optim.Adam)


def test_correct_closure(assert_same_network):
    scale = torch.tensor(0.5)
    assert_same_network(
        lambda model, optimizer, rows: step(model, optimizer, (rows[0] * scale, rows[1])),
        model=network, wrap=DistributedDataParallel, rows=ROWS, steps=2,
    )


@pytest.mark.ranks(2)
def test_wrong_sum(assert_same_network):
    def summed(model, optimizer, rows):
        loss = train(model, optimizer, rows, "sum")
        optimizer.step()
        return loss

    assert_same_network(summed, model=network(), wrap=DistributedDataParallel, rows=ROWS)


@pytest.mark.ranks(2)
def test_wrong_module(assert_same_network):
    def past(model, optimizer, rows):
        return step(model.module, optimizer, rows)

    assert_same_network(past, model=network(), wrap=DistributedDataParallel, rows=ROWS)


def test_wrong_head(assert_same_network):
    def wrap(model):
        for parameter in model[0].parameters():
            dist.broadcast(parameter.data, 0)
        return model

    def own(model, optimizer, rows):
        loss = train(model, optimizer, rows)
        for parameter in model[0].parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        return loss

    assert_same_network(own, model=network(), wrap=wrap, rows=ROWS)
"""
CAUSES = {
    "test_wrong_sum": "Cause: Every gradient is 0.5 times that of one process, on all ranks. This is 1/2",
    "test_wrong_module": "Cause: Every gradient differs between the ranks, and their mean is that of one process",
    "test_wrong_head": "Cause: The gradient of each of 2 of 4 tensors (3.weight, 3.bias) differs between the ranks",
}
Session = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables for a session that finds the plugin by its entry point, also where the installed metadata is older."""
    paths = [path for path in sys.path if path]
    if not any(each.value == "apportion.testing.plugin" for each in metadata.entry_points(group="pytest11")):
        folder = tmp_path / "metadata" / "sample_plugin-0.0.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sample-plugin\nVersion: 0.0.0\n")
        (folder / "entry_points.txt").write_text("[pytest11]\napportion = apportion.testing.plugin\n")
        paths.insert(0, str(folder.parent))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def session(tmp_path: Path, environment: dict[str, str]) -> Session:
    """``session("-n2", test_a="...")`` runs pytest in a folder with these files."""

    def run(*arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            stdin=subprocess.DEVNULL,
        )

    return run


def failures(output: str) -> dict[str, str]:
    """The text of each failed test, in one line."""
    parts = re.split(r"^_{3,} (\w+) _{3,}$", output.partition("short test summary")[0], flags=re.MULTILINE)
    texts = [re.sub(r"\s+", " ", re.sub(r"^E ", "", text, flags=re.MULTILINE)) for text in parts[2::2]]
    return dict(zip(parts[1::2], texts, strict=True))


def test_three_correct_and_three_wrong_steps_side_by_side(session: Session) -> None:
    done = session("-n2", test_project=PROJECT)
    assert "3 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    found = failures(done.stdout)
    assert found.keys() == CAUSES.keys()
    for name, cause in CAUSES.items():
        assert cause in found[name], found[name]
        assert "tensor rank ratio cosine relative difference" in found[name]
        assert "Remedy: " in found[name]
        assert "apportion/testing" not in found[name], "the frames of the package are not shown"


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["importlib", "append"])
def test_every_way_of_pytest_to_import_tests_will_do(session: Session, mode: str) -> None:
    done = session(f"--import-mode={mode}", "-k", "correct", test_project=PROJECT)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.thorough
def test_several_numbers_of_ranks_are_several_tests(session: Session) -> None:
    project = PROJECT.replace(
        "@pytest.mark.ranks(2)\ndef test_correct_ddp", "@pytest.mark.ranks(2, 4)\ndef test_correct_ddp"
    )
    done = session("-k", "correct_ddp", "-v", test_project=project)
    assert "test_correct_ddp[2 ranks] PASSED" in done.stdout, done.stdout
    assert "test_correct_ddp[4 ranks] PASSED" in done.stdout


OTHER = """
import sys

import pytest


@pytest.fixture
def network():
    return 1


@pytest.mark.ranks("spades", "hearts")
def test_other(network):
    assert "torch" not in sys.modules
    assert "numpy" not in sys.modules
    assert "apportion.testing.processes" not in sys.modules
    assert "apportion.testing.plugin" in sys.modules
"""


def test_a_session_without_the_fixture_is_as_it_was(session: Session) -> None:
    """Also one that has a marker of the same name."""
    done = session(test_other=OTHER)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert not done.stderr


LONG = """
import time
import pathlib

from torch import nn


def test_long(assert_same_network):
    def step(model, optimizer, rows):
        import os
        pathlib.Path(f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
        time.sleep(100)

    import torch
    assert_same_network(step, model=nn.Linear(2, 2), rows=torch.ones(16, 2))
"""


@pytest.mark.thorough
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "test_long.py").write_text(LONG)
    temporary = tmp_path / "t"
    temporary.mkdir()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_long.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env={**environment, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            files = [tmp_path / f"{rank}.pid" for rank in range(2)]
            wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60)
            pids = [int(file.read_text()) for file in files]
            running.send_signal(signal.SIGINT)
            output, _ = running.communicate(timeout=30)
        finally:
            running.kill()
    assert "KeyboardInterrupt" in output
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 10)
    assert list(temporary.glob("apportion-testing-*")) == []


def wait_until(condition: Callable[[], Any], seconds: float) -> None:
    for _ in attempts(seconds):
        if condition():
            return
    pytest.fail(f"not within {seconds} s")


def attempts(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.05)
