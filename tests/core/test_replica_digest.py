"""What all ranks hold alike is compared at each checkpoint: a difference names the rank, and ends the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import torch
from ranks import by_value
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Event, Policy, Workload
from apportion.core.replica_digest import difference, tensor_digest
from apportion.errors import RanksDiffer
from apportion.runtime.checkpoint.run_directory import RunDirectory

pytestmark = pytest.mark.filterwarnings("ignore:.*workers x .* cores")

STEP = 6
"""After so many updates one rank goes wrong."""
WORKERS = 2


# Digests


def test_every_bit_of_a_tensor_is_part_of_its_digest() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 7, 8, 2048, 2049, 70_001):
        data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        before = tensor_digest(data)
        for at in {0, count // 2, count - 1}:
            changed = data.clone()
            changed[at] ^= 1
            assert tensor_digest(changed) != before
        assert tensor_digest(data.clone()) == before


def test_the_order_the_shape_and_the_dtype_are_part_of_it() -> None:
    a, b = torch.randn(2, 4096), torch.randn(4096)
    found = [a, a.flip(0), a.flip(1), a.flatten(), a.view(torch.int32), -a, a.to(torch.bfloat16), b, b.roll(1)]
    found += [b.to(torch.complex64), torch.tensor(1.0), torch.tensor(2.0), torch.tensor(True), torch.zeros(0)]
    assert len({tensor_digest(t) for t in found}) == len(found)
    assert tensor_digest(a.t().contiguous().t()) == tensor_digest(a)
    assert tensor_digest(torch.tensor(1.0)[None][:, None].expand(3, 3)) == tensor_digest(torch.ones(3, 3))


def test_a_digest_is_a_number_that_json_and_int64_hold() -> None:
    digests = [tensor_digest(torch.randn(n)) for n in range(64)]
    assert all(0 <= digest < 1 << 63 for digest in digests)
    assert np.array(digests, dtype=np.int64).tolist() == digests


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([{"a": 1}, {"a": 1}], None),
        ([{"a": 1}, {"a": 2}], ("a", 1, 0, 1)),
        ([{"a": 1}, {"a": 2}, {"a": 2}], ("a", 0, 1, 1)),
        ([{"a": 1, "b": 3}, {"a": 1, "b": 4}, {"a": 1, "b": 3}], ("b", 1, 0, 1)),
        ([{"a": 1}, {"b": 2}, {"a": 1, "b": 2}], None),
        ([{"a": 1}, {"b": 2}, {"a": 1, "b": 3}], ("b", 2, 1, 1)),
        ([{"a": 1, "b": 1}, {"a": 2, "b": 2}], ("a", 1, 0, 2)),
    ],
)
def test_the_rank_that_is_unlike_most_is_the_one_that_differs(
    told: list[Mapping[str, int]], found: tuple[str, int, int, int] | None
) -> None:
    assert difference(list(enumerate(told))) == found


# Runs in which one rank goes wrong


def rank() -> int:
    return int(os.environ["RANK"])


class Drifts(torch.optim.SGD):
    """It changes one element by itself, of a weight or of a slot."""

    def __init__(self, named: Any, who: int, what: str) -> None:
        named = list(named)
        super().__init__(named, lr=0.01, momentum=0.9)
        self.who, self.what, self.weight, self.made = who, what, named[0][1], 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.made += 1
        if self.made == STEP and rank() == self.who:
            changed = self.weight.data if self.what == "weight" else self.state[self.weight]["momentum_buffer"]
            changed.view(-1)[1] += 1e-6
        return loss


class Counts(nn.Module):
    """It counts in a buffer what it sees, which is the same on every rank; on one rank, at times, twice."""

    def __init__(self, who: int | None) -> None:
        super().__init__()
        self.inner, self.norm, self.who = perceptron(), nn.LayerNorm(6), who
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.who is not None:
            self.seen += 1 + (int(self.seen) == STEP and rank() == self.who)
        return self.inner(self.norm(x))  # type: ignore[no-any-return]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def training(model: Callable[[], nn.Module], optimizer: Callable[[Any], Any], **options: Any) -> Workload:
    data = TensorDataset(torch.randn(50, 6, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 3)
    settings: dict[str, Any] = {"loss": F.cross_entropy, "batch_size": 12, "steps": 12, **options}
    return Workload(model=model, data=lambda: data, optimizer=optimizer, **settings)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.01, momentum=0.9)


def run(workload: Workload, strategy: str, folder: Path, *, workers: int = WORKERS) -> Event:
    with by_value(sys.modules[__name__]), by_value(networks):
        return apportion.train(
            workload,
            strategy,
            launcher=apportion.local(workers=workers, threads=1, device="cpu"),
            run_dir=folder,
            policy=Policy(checkpoint_every="1 steps"),
        )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "what", "who", "workers", "named"),
    [
        ("data_parallel", "weight", 1, 2, "model/0.weight"),
        ("data_parallel", "slot", 1, 2, "optimizer/0.weight/momentum_buffer"),
        ("data_parallel", "weight", 0, 3, "model/0.weight"),
        ("map_reduce", "weight", 1, 2, "model/0.weight"),
    ],
)
def test_a_rank_that_changes_one_element_by_itself_ends_the_run_and_is_named(
    strategy: str, what: str, who: int, workers: int, named: str, tmp_path: Path
) -> None:
    workload = training(perceptron, lambda named: Drifts(named, who, what))
    with pytest.raises(RanksDiffer) as raised:
        run(workload, strategy, tmp_path / "run", workers=workers)
    told = str(raised.value)
    assert f"after step {STEP} {named}" in told
    assert f"on rank {who} is not what it is on rank" in told or workers == 2
    assert max(RunDirectory(tmp_path / "run").steps(), default=0) < STEP, "a state that ranks disagree on is not kept"


def normalised() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def drifting(optimizer: torch.optim.Optimizer, total: int, *, who: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Returns a schedule of torch's, which strategies that cut the network take, that changes a weight on one rank."""

    def rate(step: int) -> float:
        if step == STEP and rank() == who:
            optimizer.param_groups[0]["params"][0].data[1] += 1e-6
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "who", "workers"),
    [("tensor_parallel(min_width=1)", 1, 2), ("data_parallel(of=pipeline_parallel(), replicas=2)", 2, 4)],
)
def test_a_layer_that_ranks_of_a_divided_network_hold_alike_is_compared(
    strategy: str, who: int, workers: int, tmp_path: Path
) -> None:
    workload = training(normalised, sgd, schedule=partial(drifting, who=who))
    with pytest.raises(RanksDiffer, match=rf"after step {STEP} model/0.weight on rank [02{who}]"):
        run(workload, strategy, tmp_path / "run", workers=workers)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["data_parallel", "map_reduce"])
def test_a_buffer_that_one_rank_changes_otherwise_ends_the_run(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(RanksDiffer, match="model/seen on rank 1 is not what it is on rank 0"):
        run(training(lambda: Counts(1), sgd), strategy, tmp_path / "run")


NET = """
import os, torch
from torch import nn
from apportion import Workload

class Drifts(torch.optim.SGD):
    made = 0
    def step(self, closure=None):
        super().step(closure)
        self.made += 1
        if self.made == 3 and os.environ["RANK"] == "1":
            self.param_groups[0]["params"][0].data.view(-1)[0] += 1

workload = Workload(
    model=lambda: nn.Linear(4, 2), data=lambda: [(torch.ones(4) * i, i % 2) for i in range(16)],
    loss=nn.functional.cross_entropy, optimizer=lambda p: Drifts(p, lr=0.1), batch_size=4, steps=8,
)
"""


@pytest.mark.processes
def test_the_command_ends_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from click.testing import CliRunner

    from apportion.cli.app import app

    (tmp_path / "net.py").write_text(NET)
    arguments = [f"{tmp_path}/net.py:workload", "--strategy", "data_parallel", "--workers", "2"]
    policy = ["--policy", "policy(checkpoint_every='1 steps')", "--run-dir", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["train", *arguments, *policy, "--no-check"])
    assert done.exit_code == 1, done.output
    assert "model/weight on rank" in done.output


# Runs in which ranks may differ


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("data_parallel", 3),
        ('data_parallel(shares="measured")', 2),
        ("map_reduce", 3),
        ("local_sgd(every=5)", 2),
        ("hogwild", 2),
        ('parameter_server(mode="ordered")', 2),
        ("tensor_parallel(min_width=1)", 2),
        ("pipeline_parallel", 2),
    ],
)
def test_a_run_in_which_nothing_is_wrong_goes_to_its_end(strategy: str, workers: int, tmp_path: Path) -> None:
    found = run(training(lambda: Counts(None), sgd), strategy, tmp_path / "run", workers=workers)
    assert found.data["reason"] == "finished"
    assert RunDirectory(tmp_path / "run").steps()
