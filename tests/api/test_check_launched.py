"""check in ranks that are running already: each is told the same, of the strategy as these ranks run it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from commands import SECONDS, places, start
from launched_checks import Told, checked

pytestmark = pytest.mark.processes

EXACT = 1e-10
ByCheck = Callable[[str, str], list[Told]]
"""What each rank was told of a (strategy, network)."""
REFUSED = {
    "hogwild": "ValueError: hogwild keeps its weights in memory that all of its workers share, and these 3 ranks",
    "parameter_server": "ValueError: parameter_server keeps its weights in memory",
    "single_device": "ValueError: single_device runs in one process, and 3 ranks are running",
    "conv_parallel": "ValueError: Sequential has no convolution",
    "data_parallel(compress='int8')": "ValueError: data_parallel(compress=int8) changes what hosts send each other",
}


def on_two_hosts(checks: Sequence[tuple[str, str]], folder: Path) -> ByCheck:
    """Has two ranks of one host and one of another make these checks, one after the other."""
    found = checked((2, 1), checks, folder)
    return lambda strategy, network: found[checks.index((strategy, network))]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ByCheck:
    """The checks that are made always, in ranks that were started once."""
    checks = [("data_parallel", "mlp"), ("planted:a_little_too_much", "mlp"), ("data_parallel", "raises")]
    return on_two_hosts([*checks, *((strategy, "mlp") for strategy in REFUSED)], tmp_path_factory.mktemp("launched"))


@pytest.mark.thorough
def test_every_rank_is_told_the_same_proof_of_what_the_hosts_do_together(told: ByCheck) -> None:
    ranks = told("data_parallel", "mlp")
    assert len(ranks) == 3
    assert all(one.proof == ranks[0].proof for one in ranks)
    assert ranks[0].sentence.startswith("data_parallel on 3 workers of 2 hosts trains the same network as one device")
    assert ranks[0].holds
    assert ranks[0].worst <= EXACT


@pytest.mark.thorough
def test_a_gradient_that_is_a_ten_millionth_too_large_on_one_rank_is_found(told: ByCheck) -> None:
    ranks = told("planted:a_little_too_much", "mlp")
    assert not any(one.holds for one in ranks)
    assert all(one.proof == ranks[0].proof for one in ranks)
    assert "does not train the same network as one device" in ranks[0].sentence
    assert "the first that is not one device's" in ranks[0].sentence, "with what each rank's layers computed"


@pytest.mark.parametrize("strategy", REFUSED)
def test_what_cannot_run_there_is_refused_by_name_on_all_ranks_alike(strategy: str, told: ByCheck) -> None:
    ranks = told(strategy, "mlp")
    assert ranks[0].raised.startswith(REFUSED[strategy])
    assert len({one.raised for one in ranks}) == 1


def test_a_rank_that_raises_keeps_nobody_waiting_and_all_are_told_why(told: ByCheck) -> None:
    ranks = told("data_parallel", "raises")
    assert [one.raised for one in ranks] == ["WorkerFailed: rank 1: RuntimeError: a bad row"] * 3
    assert max(one.seconds for one in ranks) < 30.0


@pytest.mark.slow
def test_a_rank_that_has_other_rows_or_no_network_at_all_is_named(tmp_path: Path) -> None:
    told = on_two_hosts([("planted:seed", "mlp"), ("data_parallel", "is not built")], tmp_path)
    proof = told("planted:seed", "mlp")[2].proof
    assert proof is not None
    assert proof["rounds"][0]["disagreement"].startswith("rank 1 is not at rank 0's state after step 1: model/")
    ranks = told("data_parallel", "is not built")
    assert ranks[1].raised == "RuntimeError: not here"
    for rank in (0, 2):
        assert ranks[rank].raised.startswith("WorkerFailed: rank 1 on host ")
        assert ranks[rank].raised.endswith("RuntimeError: not here")


def test_a_rank_that_is_killed_keeps_nobody_waiting(tmp_path: Path) -> None:
    ((first, last),) = checked((2, 1), [("data_parallel", "killed")], tmp_path, lost=True)
    for one in (first, last):
        assert one.raised.startswith("WorkerFailed: rank 1 on ")
        assert one.raised.endswith("is gone: its connection has ended")


# The command


WORK = """
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion


class ReadsRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 2)

    def forward(self, x):
        return self.net(x) * (1.0 + 0.1 * int(os.environ["RANK"]))


def examples():
    x = torch.randn(61, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


right = apportion.Workload(
    model=lambda: nn.Linear(8, 2),
    data=examples,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=16,
    steps=30,
)
wrong = apportion.Workload(
    model=ReadsRank,
    data=examples,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=16,
    steps=30,
)
"""


def test_the_command_speaks_on_rank_0_alone_and_has_the_same_exit_status_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work.py").write_text(textwrap.dedent(WORK))
    monkeypatch.chdir(tmp_path)
    words = ["--strategy", "data_parallel", "--steps", "2", "--launcher", "env"]
    for name, status, said in (("right", 0, "the same network"), ("wrong", 1, "does not train the same network")):
        command = [sys.executable, "-m", "apportion", "check", f"work.py:{name}", *words]
        ranks = [start(command, **place) for place in places(1, 1)]
        texts = [process.communicate(timeout=SECONDS)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [status, status], texts
        assert said in " ".join(texts[0].split())
        assert texts[1] == ""
