"""``apportion check`` is as thorough as the proof before a run: a loss that couples rows only later, or whose mistake
rare rows alone show, is "different" there too, from Python and by the exit status of the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import apportion

FILE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import apportion

def rows():
    inputs = torch.randn(400, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, (inputs[:, 0] > 0).double() * 2 - 1)

def below_a_loss_of_two(outputs, signs):
    each = nn.functional.softplus(-outputs[:, 0] * signs)
    kept = each < 2.0  # an outlier is left out; at first no row is one
    return (each * kept).sum() / kept.sum().clamp(min=1)

def made(**changes):
    given = dict(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), data=rows, batch_size=40, steps=20,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05), precision="float64",
        loss=below_a_loss_of_two)
    return apportion.Workload(**{**given, **changes})

coupled = made()
mended = made(count=None)
"""


def inputs(many: int) -> Tensor:
    return torch.randn(many, 10, generator=torch.Generator().manual_seed(1))


def signed() -> TensorDataset:
    x = inputs(480)
    return TensorDataset(x, (x[:, 0] > x[:, 1]).double() * 2 - 1)


def within_the_margin(outputs: Tensor, signs: Tensor) -> Tensor:
    """The mean of squared hinge losses over the rows within a margin, as all of them are at first."""
    missing = (2 - outputs[:, 0] * signs).clamp(min=0)
    return (missing**2).sum() / (missing > 0).sum().clamp(min=1)


def rare_masks() -> TensorDataset:
    """Labels of -1 in two rows, which no batch of the first steps has."""
    x = inputs(3000)
    labels = x[:, :3].argmax(1)
    labels[[1877, 2611]] = -1
    return TensorDataset(x, labels)


def kept_alone(outputs: Tensor, labels: Tensor) -> Tensor:
    kept = labels >= 0
    each = functional.cross_entropy(outputs, labels.clamp(min=0), reduction="none")
    return (each * kept).sum() / kept.sum().clamp(min=1)


class Titles(nn.Module):
    """Sums the words of each title, and scales them so that those which are not empty have a mean of one word a row:
    the rows of a batch are coupled where one of them is empty, and the loss by itself is not."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.out = nn.Linear(8, 3)

    def forward(self, titles: Tensor) -> Tensor:
        summed = self.words(titles).sum(1) / titles.shape[1]
        return self.out(torch.tanh(summed / (titles > 0).any(1).double().mean()))  # type: ignore[no-any-return]


def titles() -> TensorDataset:
    """Titles of five words, and one that has none."""
    words = torch.randint(1, 20, (3000, 5), generator=torch.Generator().manual_seed(2))
    words[2204] = 0
    return TensorDataset(words, words[:, 0] % 3)


def workload(loss: Any, data: Any, outputs: int, **changes: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, outputs)),
        "data": data,
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        "batch_size": 48,
        "steps": 12,
        "precision": "float64",
    }
    return apportion.Workload(**{**given, **changes})


def proof_of(made: apportion.Workload, strategy: str = "data_parallel") -> Any:
    return apportion.check(made, strategy, workers=2, steps=2)


@pytest.mark.thorough
def test_a_loss_that_couples_rows_later_is_different_with_the_loss_as_the_cause() -> None:
    proof = proof_of(workload(within_the_margin, signed, 1))
    assert proof.verdict == "different"
    assert "the loss couples the rows of a batch" in proof.evidence
    assert any("count=None" in cause for cause in proof.causes)
    assert "count=None" in proof.sentence
    assert proof_of(workload(within_the_margin, signed, 1, count=None)).holds


@pytest.mark.thorough
def test_a_count_that_two_rows_of_3000_show_to_be_wrong_is_different() -> None:
    proof = proof_of(workload(kept_alone, rare_masks, 3))
    assert proof.verdict == "different"
    assert "count" in proof.sentence
    right = workload(kept_alone, rare_masks, 3, count=lambda targets: float((targets >= 0).sum()))
    mended = proof_of(right)
    assert mended.holds
    assert "rare rows were looked for among the targets of all 3,000" in mended.sentence
    assert "had the rarest rows among theirs" in mended.sentence


@pytest.mark.thorough
def test_rows_that_a_network_couples_where_a_rare_one_is_among_them_are_different() -> None:
    proof = proof_of(workload(functional.cross_entropy, titles, 3, model=Titles))
    assert [found.verdict for found in proof.rounds] == ["equal"]
    assert proof.verdict == "different"
    assert "with rare rows of the data in a batch" in proof.evidence
    assert proof.rare.verdict == "different"


@pytest.mark.thorough
def test_a_strategy_that_divides_no_batch_does_not_try_the_loss() -> None:
    assert proof_of(workload(within_the_margin, signed, 1), "tensor_parallel").holds


@pytest.mark.thorough
def test_the_command_says_no_with_exit_status_1_and_the_line_to_write(apportion_command: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    options = ("--strategy", "data_parallel", "--workers", "2", "--steps", "2")
    said = apportion_command("check", "mine.py:coupled", *options)
    assert said.returncode == 1, said.stderr
    assert "the loss couples the rows of a batch" in said.stdout
    assert "NOT the same network" in said.stdout
    told = json.loads(apportion_command("check", "mine.py:coupled", *options, "--json").stdout)
    assert told["holds"] is False
    assert "count=None" in told["survey"]["problem"]
    assert apportion_command("check", "mine.py:mended", *options).returncode == 0
