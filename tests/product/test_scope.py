"""A proof states what it is of: the first steps, in float64 unless something that is trained computes in less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion

SCOPE = "in its first steps"


def sequences() -> TensorDataset:
    tokens = torch.randint(0, 11, (48, 9), generator=torch.Generator().manual_seed(3))
    return TensorDataset(tokens, tokens.roll(-1, 1))


class Attends(nn.Module):
    """One layer of attention whose scores are given a constant."""

    def __init__(self, constant: Any) -> None:
        super().__init__()
        self.embed, self.head, self.constant = nn.Embedding(11, 12), nn.Linear(12, 11), constant
        self.qkv = nn.Linear(12, 36)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 12**0.5
        scores = scores + self.constant(tokens.shape[1]).to(scores.dtype)
        return self.head(scores.softmax(-1) @ v).transpose(1, 2)  # type: ignore[no-any-return]


def causal(length: int) -> Tensor:
    return torch.full((length, length), float("-inf")).triu(1)


def linear_bias(length: int) -> Tensor:
    """Scores that fall with the distance, as in ALiBi."""
    place = torch.arange(length).float()
    return -0.3 * (place[:, None] - place[None, :]).abs().sqrt()


KEPT = linear_bias(9)


def attention(constant: Any) -> apportion.Workload:
    return apportion.Workload(
        model=lambda: Attends(constant),
        data=sequences,
        loss=nn.functional.cross_entropy,
        count=lambda tokens: float(tokens.numel()),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-9),
        batch_size=12,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("constant", [causal, linear_bias, lambda length: KEPT[:length, :length]])
def test_a_constant_in_float32_leaves_the_proof_in_float64(constant: Any) -> None:
    proof = apportion.check(attention(constant), "data_parallel", workers=2, steps=2)
    assert proof.rounds[0].precision == "float64"
    assert proof.verdict == "equal", proof.sentence
    assert not any("in places" in line for line in proof.by_design)


class Narrow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.weight.float()).to(x.dtype) + self.bias


def tabular(model: Any) -> apportion.Workload:
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    return apportion.Workload(
        model=model,
        data=lambda: TensorDataset(inputs, inputs[:, :3].argmax(1)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=20,
    )


@pytest.mark.thorough
def test_weights_that_are_computed_with_in_float32_are_still_named() -> None:
    proof = apportion.check(
        tabular(lambda: nn.Sequential(Narrow(6, 8), nn.Tanh(), nn.Linear(8, 3))), "data_parallel", workers=2, steps=2
    )
    assert "computes in float32 in places" in proof.by_design[0]


def test_the_verdict_the_run_directory_and_the_report_say_that_it_is_of_the_first_steps(
    tmp_path: Path, no_cached_proofs: Path
) -> None:
    run_dir = tmp_path / "run"
    apportion.train(tabular(lambda: nn.Linear(6, 3)), "data_parallel", launcher=apportion.local(2), run_dir=run_dir)
    proof = json.loads((run_dir / "run.json").read_text())["proof"]
    assert proof["verdict"] == "equal"
    assert SCOPE in proof["sentence"]
    assert SCOPE in (run_dir / "report.html").read_text()
