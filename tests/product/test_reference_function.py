"""``apportion check train.py --reference FILE.py:NAME`` compares the ranks with the gradient of a user's function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import apportion

SCRIPT = """
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

micro_batches = 2


def mean_loss(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(48, 6)
    data = TensorDataset(inputs, inputs[:, :1].tanh())
    loader = DataLoader(data, batch_size=12 // world, sampler=DistributedSampler(data, seed=2))
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    net = {wrap}(net)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for number, (rows, targets) in enumerate(loader):
        loss = {loss}
        loss.backward()
        if number % micro_batches == micro_batches - 1:
            nn.utils.clip_grad_norm_(net.parameters(), {limit})
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
"""
RIGHT = "F.mse_loss(net(rows), targets) / micro_batches"
WRONG = "(net(rows) - targets).square().mean() / micro_batches**2"
REFERENCE = """
import torch.nn.functional as F

from helper import halves


def mean_loss(model, batch):
    inputs, targets = batch
    assert len(inputs) == 24, "the rows of both ranks and of both micro-batches"
    first, second = halves(model(inputs) - targets)
    return (first.square().mean() + second.square().mean()) / 2


def without_a_batch(model):
    return model


def of_a_dict(model, batch):
    return F.mse_loss(model(batch["inputs"]), batch["targets"])


def not_a_loss(model, batch):
    return model(batch[0])
"""


def script(folder: Path, loss: str, *, wrap: str = "DistributedDataParallel", limit: float = 1e9) -> Path:
    (folder / "train.py").write_text(SCRIPT.format(loss=loss, wrap=wrap, limit=limit))
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "helper.py").write_text("def halves(rows):\n    return rows[: len(rows) // 2], rows[len(rows) // 2 :]\n")
    return folder / "train.py"


def command(folder: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "apportion", "check", "train.py", *words],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=110.0,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_a_loss_that_is_wrong_in_one_process_as_well_is_found_by_the_function(tmp_path: Path) -> None:
    script(tmp_path, WRONG)
    status, text = command(tmp_path, "--reference", "reference.py:mean_loss", "--json")
    answer: dict[str, Any] = json.loads(text)
    assert status == 1
    assert [finding["name"] for finding in answer["findings"]] == ["reference_differs"], answer
    finding = answer["findings"][0]
    assert (finding["step"], finding["factor"]) == (1, pytest.approx(0.5))
    assert finding["site"].startswith("train.py:")
    assert any("reference.py:mean_loss" in sentence for sentence in answer["about"])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("words", [(), ("--reference", "reference.py:mean_loss", "--accept", "reference_differs")])
def test_it_is_not_found_without_the_function_and_can_be_accepted(tmp_path: Path, words: tuple[str, ...]) -> None:
    script(tmp_path, WRONG)
    assert command(tmp_path, *words)[0] == 0


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "fully_shard"])
@pytest.mark.parametrize("limit", [1e9, 0.05], ids=["not_clipped", "clipped"])
def test_the_script_with_the_right_loss_agrees_with_the_function(tmp_path: Path, wrap: str, limit: float) -> None:
    path = script(tmp_path, RIGHT, wrap=wrap, limit=limit)
    answer = apportion.check_script(path, reference=str(tmp_path / "reference.py:mean_loss"))
    assert (answer.status, answer.findings) == (0, ()), answer
    assert any(
        "Compared also with reference.py:mean_loss: the gradient of its loss over all rows of a step, at 2 steps"
        in each
        for each in answer.about
    ), answer.about


@pytest.mark.slow
@pytest.mark.processes
def test_a_scale_is_found_although_gradients_are_clipped_and_the_function_may_be_the_scripts_own(
    tmp_path: Path,
) -> None:
    path = script(tmp_path, f"3 * {RIGHT}", limit=0.05)
    answer = apportion.check_script(path, reference=f"{path}:mean_loss")
    assert answer.status == 1, answer
    assert "every gradient is 3 times that of train.py:mean_loss" in answer.findings[0].sentence
    assert answer.findings[0].factor == pytest.approx(3.0)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("without_a_batch", "def without_a_batch(model):", "TypeError: without_a_batch() takes 1 positional argument"),
        ("of_a_dict", 'return F.mse_loss(model(batch["inputs"]), batch["targets"])', "TypeError: "),
        ("not_a_loss", "def not_a_loss(model, batch):", "it returns a tensor of shape [24, 1]"),
    ],
)
def test_a_function_that_fails_could_not_run(tmp_path: Path, name: str, line: str, message: str) -> None:
    path = script(tmp_path, RIGHT)
    answer = apportion.check_script(path, reference=str(tmp_path / f"reference.py:{name}"))
    assert (answer.status, answer.verdict) == (3, "could not run"), answer
    at = next(number for number, each in enumerate(REFERENCE.splitlines(), 1) if each.strip() == line)
    assert f"reference.py:{at}" in answer.reason, answer.reason
    assert message in answer.reason


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("reference.py", "names no function"),
        ("missing.py:mean_loss", "there is no file missing.py"),
        ("reference.py:mean_los", "did you mean reference.py:mean_loss?"),
        ("broken.py:mean_loss", "broken.py is not valid Python"),
    ],
)
def test_a_reference_that_is_not_there_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str
) -> None:
    path = script(tmp_path, RIGHT)
    (tmp_path / "broken.py").write_text("def mean_loss(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="reference") as error:
        apportion.check_script(path, reference=given)
    assert message in str(error.value)


def test_the_command_ends_with_status_2_for_a_reference_that_is_not_there(tmp_path: Path) -> None:
    script(tmp_path, RIGHT)
    status, text = command(tmp_path, "--reference", "reference.py:mean_los")
    assert status == 2
    assert "did you mean reference.py:mean_loss?" in text
