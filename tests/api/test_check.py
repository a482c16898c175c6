"""check can say no: mistakes are planted, and each is caught and named. And it says no more than it has shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import planted
import pytest
import torch
from click.testing import CliRunner
from planted import Averaging, Faulty
from ranks import by_value
from torch import nn
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.cli.app import app
from apportion.runtime.proof.comparison import CAP, FLOOR, verdict_of
from apportion.runtime.proof.proof import Proof

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True, scope="module")
def _whole() -> Iterator[None]:
    """Workers need not import these modules."""
    with by_value(networks), by_value(planted), by_value(sys.modules[__name__]):
        yield


def prove(workload: Workload, strategy: Any = "data_parallel", workers: int = 2, steps: int = 4) -> Proof:
    return apportion.check(workload, strategy, workers=workers, steps=steps)


def net(model: Any = networks.perceptron, **options: Any) -> Workload:
    """In float32, as users have it."""
    n = networks.rows(61)
    data = lambda: TensorDataset(networks.numbers(n, 10).float(), networks.classes(n, 3))  # noqa: E731
    return networks.workload(model, data, 61, **{"precision": "float32", **options})


# Mistakes of a strategy


@pytest.mark.thorough
def test_without_a_mistake_the_same_strategy_is_proven() -> None:
    proof = prove(net(), Faulty(), workers=3)
    assert proof.holds
    assert proof.exact
    assert [r.precision for r in proof.rounds] == ["float64", "float32"]
    assert proof.rounds[0].bound == FLOOR
    assert proof.by_design == ()


@pytest.mark.parametrize("fault", ["mean_of_means", "a_little_too_much", "dropped_shard"])
def test_a_wrong_weight_is_caught_and_the_worst_parameter_named(fault: str) -> None:
    proof = prove(net(precision="float64"), Faulty(fault))
    (found,) = proof.rounds
    assert not proof.holds
    assert found.verdict == "different"
    assert found.bound == FLOOR
    assert found.worst.absolute > 10 * FLOOR
    assert found.worst.name.startswith(("model/", "optimizer/"))
    assert found.worst.name.endswith(("weight", "bias", "momentum_buffer"))


def test_a_worker_with_another_seed_is_caught() -> None:
    """Where the weights are shared it cannot have others, but it takes other rows."""
    proof = prove(net(), Faulty("seed"), workers=3)
    assert not proof.holds
    assert proof.rounds[0].verdict == "different"


def test_a_stale_parameter_on_one_rank_is_caught_and_named() -> None:
    proof = prove(net(), Faulty("stale_parameter"), workers=3)
    assert not proof.holds
    told = proof.rounds[0].disagreement
    assert told is not None
    assert told.startswith("rank 1 is not at rank 0's state after step 1: model/2.bias differs by ")


# Mistakes of a model or a workload


def test_a_batch_norm_that_looks_at_one_shard_is_caught_and_named() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 8), planted.OwnBatchNorm(8), nn.Tanh(), nn.Linear(8, 3))

    proof = prove(networks.workload(model, networks.tabular(61, 10, last=4), 61))
    assert not proof.holds
    told = proof.rounds[0].disagreement
    assert told is not None
    assert "rank 1" in told
    assert "model/1.running_" in told


def test_a_model_that_reads_its_rank_is_caught() -> None:
    proof = prove(net(planted.ReadsRank))
    assert not proof.holds
    assert proof.rounds[0].worst.relative > 1e-4
    assert prove(net(planted.ReadsRank), workers=1).holds


def test_a_count_that_disagrees_with_the_loss_is_caught() -> None:
    def workload(count: Any) -> Workload:
        return networks.workload(
            networks.Tokens, lambda: networks.padded(networks.rows(61)), 61, loss=networks.token_loss, count=count
        )

    assert prove(workload(networks.real_tokens)).holds
    proof = prove(workload(apportion.core.loss_terms.examples))
    assert not proof.holds
    assert proof.rounds[0].worst.relative > 1e-5


# An approximate strategy


def plain(**options: Any) -> Workload:
    return net(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options)


def test_an_approximate_strategy_is_proven_against_its_own_reference() -> None:
    proof = prove(plain(), Averaging())
    assert proof.holds
    assert not proof.exact


def test_an_approximate_strategy_with_a_mistake_is_caught() -> None:
    proof = prove(plain(), Averaging(forget="0.bias"))
    assert not proof.holds
    assert "model/0.bias" in str(proof.rounds[0].disagreement)


# What differs by design


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("module", "dropout(p=0.3)"),
        ("function", "dropout(p=0.4)"),
        ("multihead", "dropout(p=0.2)"),
        ("lstm", "lstm(dropout=0.25)"),
        ("attention", "attention(dropout_p=0.15)"),
    ],
)
def test_dropout_is_turned_off_and_named(how: str, told: str) -> None:
    proof = prove(net(lambda: planted.Drops(how)))
    assert proof.holds
    (line,) = proof.by_design
    assert "by design" in line
    assert told in line


def test_draws_for_each_row_are_the_same_for_the_same_row_and_named() -> None:
    proof = prove(net(lambda: planted.Drops("noise")))
    assert proof.holds
    (line,) = proof.by_design
    assert "randn in Drops" in line
    assert "for each row" in line


@pytest.mark.parametrize("quietly", [False, True])
def test_a_model_that_fixes_float32_is_reported_and_checked_in_float32(quietly: bool) -> None:
    proof = prove(net(lambda: planted.Narrow(quietly=quietly)))
    assert [r.precision for r in proof.rounds] == ["float32"]
    assert proof.holds
    assert "checked in float32 alone" in proof.by_design[0]
    assert ("computes in float32 in places" if quietly else "does not compute in float64") in proof.by_design[0]


@pytest.mark.parametrize("quietly", [False, True])
def test_a_mistake_is_caught_in_float32_too(quietly: bool) -> None:
    assert not prove(net(lambda: planted.Narrow(quietly=quietly)), Faulty("mean_of_means")).holds


def test_the_users_own_error_is_the_users_own() -> None:
    def model() -> nn.Module:
        raise KeyError("no such thing")

    with pytest.raises(apportion.WorkerFailed, match="no such thing"):
        prove(net(model))


# Tolerances


@pytest.mark.parametrize(
    ("difference", "noise", "verdict"),
    [
        (0.9e-10, 0.0, "equal"),
        (1.1e-10, 0.0, "different"),
        (1.1e-10, 2e-12, "equal"),
        (0.9e-3, 1e-2, "equal"),
        (1.1e-3, 1e-2, "undecided"),
        (1.1, 1e-2, "different"),
        (0.0, float("inf"), "undecided"),
        (float("inf"), 1e-16, "different"),
    ],
)
def test_no_amount_of_noise_makes_a_large_difference_equal(difference: float, noise: float, verdict: str) -> None:
    assert verdict_of(difference, noise, max(FLOOR, min(CAP, 100 * noise))) == verdict


def chaos(iterations: int) -> Workload:
    return net(
        planted.Chaos, loss=planted.chaotic_loss(iterations), optimizer=lambda p: torch.optim.SGD(p, lr=1.0)
    )  # fmt: skip


def test_a_chaotic_network_is_not_called_equal() -> None:
    proof = prove(chaos(7), steps=8)
    assert proof.rounds[0].verdict == "undecided"
    assert not proof.holds
    assert "rounding alone" in proof.by_design[0]


def test_a_network_that_is_chaotic_in_its_own_precision_alone_is_proven_in_float64() -> None:
    proof = prove(chaos(3), steps=8)
    assert [r.verdict for r in proof.rounds] == ["equal", "undecided"]
    assert proof.holds
    assert proof.by_design[0].startswith("float32: ")


def test_weights_that_are_no_numbers_show_nothing() -> None:
    proof = prove(net(loss=lambda outputs, targets: outputs.mean() * float("nan")))
    assert not proof.holds
    assert "not finite" in proof.by_design[0]


# The command line

FILE = """
import os, torch
from torch import nn
from torch.utils.data import TensorDataset
from apportion import Workload

class ReadsRank(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + int(os.environ["RANK"]))

def data():
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(61, 4, generator=g), torch.randint(0, 3, (61,), generator=g))

def made(model):
    return Workload(model=model, data=data, batch_size=20, loss=nn.functional.cross_entropy, epochs=2,
                    optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

good = made(lambda: nn.Linear(4, 3))
bad = made(lambda: ReadsRank(4, 3))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def command(*arguments: str) -> Any:
    shown = warnings.showwarning
    try:
        return CliRunner().invoke(app, ["check", *arguments])
    finally:
        warnings.showwarning = shown


def test_the_command_says_yes(file: Path) -> None:
    result = command(f"{file}:good", "--strategy", "data_parallel", "--workers", "3")
    assert result.exit_code == 0, result.output
    assert "float64: equal over 8 steps and 2 tensors" in result.output
    assert "the same network" in result.output
    assert "NOT" not in result.output


def test_the_command_says_no_with_exit_status_1(file: Path) -> None:
    result = command(f"{file}:bad", "--strategy", "data_parallel", "--workers", "2", "--steps", "2")
    assert result.exit_code == 1
    assert "float64: DIFFERENT over 2 steps" in result.output
    assert "worst is model/" in result.output
    assert "NOT the same network" in result.output


@pytest.mark.parametrize(("name", "status"), [("good", 0), ("bad", 1)])
def test_the_answer_as_json(file: Path, name: str, status: int) -> None:
    result = command(f"{file}:{name}", "--strategy", "data_parallel", "--workers", "2", "--json")
    assert result.exit_code == status
    told = json.loads(result.stdout)
    assert told["holds"] is (status == 0)
    assert [r["verdict"] for r in told["rounds"]] == ["equal" if told["holds"] else "different"] * 2
    assert told["rounds"][0]["worst"]["name"].startswith("model/")


@pytest.mark.thorough
def test_the_exit_status_of_the_program(file: Path) -> None:
    program = [sys.executable, Path(sys.executable).with_name("apportion")]
    command = [*program, "check", f"{file}:bad", "--strategy", "data_parallel"]
    done = subprocess.run([*command, "--workers", "2", "--steps", "1"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "NOT the same network" in done.stdout


def test_what_is_wrong_to_ask_exits_with_2(file: Path) -> None:
    assert command(f"{file}:good", "--strategy", "data_paralel").exit_code == 2
    assert command(f"{file}:missing", "--strategy", "data_parallel", "--workers", "1").exit_code == 2
    assert command(f"{file}:good", "--strategy", "single_device", "--workers", "2").exit_code == 2


@pytest.mark.parametrize("workers", [2, 3])
def test_replicas_whose_batches_cannot_be_dealt_evenly_are_compared_all_the_same(workers: int) -> None:
    """Three batches: one of two workers has one of them, and waits for the other's second."""
    data = lambda: TensorDataset(networks.numbers(13, 10), networks.classes(13, 3))  # noqa: E731
    workload = networks.workload(networks.perceptron, data, 6, epochs=1, steps=None)
    assert apportion.check(workload, "local_sgd", workers=workers, steps=2).holds


class Turning(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(10, 8, dtype=torch.complex64) * 0.3)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x.to(self.turn.dtype) @ self.turn).abs())  # type: ignore[no-any-return]


class ConjugatedOnRankOne(Turning):
    """Only the imaginary part of a gradient is wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and os.environ.get("RANK") == "1":
            w = self.turn.conj_physical() + (self.turn - self.turn.conj_physical()).detach()
            return self.out((x.to(w.dtype) @ w).abs())  # type: ignore[no-any-return]
        return super().forward(x)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("strategy", ["data_parallel", "map_reduce", "layer_placement"])
def test_complex_weights_are_compared_whole(strategy: str, kind: Any) -> None:
    data = lambda: TensorDataset(networks.numbers(13, 10).float(), networks.classes(13, 3))  # noqa: E731
    options: dict[str, Any] = {"optimizer": lambda named: kind(named, lr=0.01), "precision": "float32", "epochs": 1}
    workload = networks.workload(Turning, data, 6, **options)
    proof = apportion.check(workload, strategy, workers=2, steps=2)
    assert proof.holds, proof.sentence
    if strategy == "data_parallel":
        wrong = apportion.check(replace(workload, model=ConjugatedOnRankOne), strategy, workers=2, steps=2)
        assert wrong.verdict == "different"
        assert "turn" in wrong.rounds[0].worst.name
