"""local_sgd with a deadline, among real processes that are killed, frozen, started again and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from commands import SECONDS, places, start
from conftest import Eventually
from safetensors.torch import load_file

import apportion
from apportion.core.address import load_workload
from apportion.parallel.averaging.reference import check_log
from apportion.parallel.averaging.round_log import RoundLog
from apportion.strategies.local_sgd import LocalSgd

pytestmark = [pytest.mark.processes, pytest.mark.serial]

EXACT = 1e-10
DEADLINE = 0.5
WORK = """
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion

def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def examples():
    x = torch.randn(56, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def slow(outputs, targets):
    time.sleep(0.02)
    return nn.functional.cross_entropy(outputs, targets)


def made(**fields):
    given = {"loss": slow, "steps": 300, "lr": 0.01, **fields}
    rate = given.pop("lr")
    return apportion.Workload(
        model=network,
        data=examples,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate, eps=1e-5),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps),
        batch_size=15,
        precision="float64",
        evaluation=apportion.Evaluation(data=examples, every=10),
        **given,
    )


workload, fast = made(), made(loss=nn.functional.cross_entropy)
strategy = apportion.local_sgd(every=4, deadline="500 ms", outer="nesterov", outer_lr=1.0, outer_momentum=0.3)
"""
LOOP = """
from pathlib import Path

from safetensors.torch import save_file

import apportion
from work import strategy, workload

world = apportion.World.from_env(device="cpu", insecure=True, meets=False)
step = strategy.build(workload, world)
with open(f"rank{world.rank}", "a") as note:
    for batch in apportion.batches(step):
        step(batch)
        print(step.done, file=note, flush=True)
if world.rank == 0:
    step.log()[0].save("log")
    save_file({name: t.contiguous() for name, t in step.state_dict().tensors()}, "state")
step.close()
"""
TRAIN = """
import sys

import apportion
from work import made, strategy

workload = made(**eval(sys.argv[1]))
launcher = apportion.env(device="cpu", insecure=True)
often = apportion.Policy(checkpoint_every="1 steps")
result = apportion.train(
    workload, strategy, launcher=launcher, run_dir="run", resume="auto", policy=often, check=False
)
print(result.reason, result.step)
"""


@dataclass
class Ranks:
    """Ranks as their launcher would start them, each by itself; all are gone in the end."""

    places: list[dict[str, str]]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def begin(self, rank: int, *command: str) -> subprocess.Popen[str]:
        """Starts a rank, once more where it was there before."""
        self.started.append(start([sys.executable, *command], **self.places[rank], OMP_NUM_THREADS="1"))
        return self.started[-1]


@contextmanager
def ranks_of(hosts: Sequence[int]) -> Iterator[Ranks]:
    ranks = Ranks(places(*hosts))
    try:
        yield ranks
    finally:
        for process in ranks.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("work", WORK), ("loop", LOOP), ("training", TRAIN)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reached(rank: int) -> int:
    """The batches in the average that a rank has taken last."""
    note = Path(f"rank{rank}")
    lines = note.read_text().split() if note.exists() else []
    return int(lines[-1]) if lines else 0


def says(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=SECONDS)[0]


@pytest.mark.slow
def test_replicas_that_are_killed_frozen_and_started_again_hold_nobody_up_and_the_log_leads_to_the_same_network(
    folder: Path, eventually: Eventually
) -> None:
    with ranks_of([1, 1, 1]) as ranks:
        first, frozen, killed = (ranks.begin(rank, "loop.py") for rank in range(3))
        eventually(lambda: reached(0) > 60, within=60, what="some rounds")
        killed.kill()
        killed.wait()
        gone = reached(0)
        os.kill(frozen.pid, signal.SIGSTOP)
        eventually(lambda: reached(0) > gone + 30, within=60, what="rounds of rank 0 alone")
        os.kill(frozen.pid, signal.SIGCONT)
        again = ranks.begin(2, "loop.py")
        for process in (first, frozen, again):
            said = says(process)
            assert process.returncode == 0, said
    log = RoundLog.load("log")
    check_log(log, 0)
    assert log.longest <= DEADLINE + 0.2
    alone = [each.number for each in log.rounds if [p.rank for p in each.parts if p.examples] == [0]]
    assert alone
    for rank in (1, 2):
        assert log.took_part(rank)[0] < alone[-1] < log.took_part(rank)[-1]
    returned = [(rank, at, first) for rank, at, first in log.returns() if at > alone[0]]
    for rank in (1, 2):
        assert any(rank == who and first == at + 1 for who, at, first in returned), "it is in the next round"
    assert len({part.life for each in log.rounds for part in each.parts if part.rank == 2}) == 2
    strategy = LocalSgd(every=4, deadline="500 ms", outer="nesterov", outer_lr=1.0, outer_momentum=0.3)
    expected = next(strategy.reference(load_workload("work.py:fast"), 3, (log,)))
    found = load_file("state")
    assert expected.step == 300
    for name, tensor in expected.tensors():
        assert (found[name].double() - tensor.double()).abs().max() <= EXACT, name


def saved() -> int:
    steps = [int(path.name.removeprefix("step-")) for path in Path("run/checkpoints").glob("step-*")]
    return max(steps, default=0)


@pytest.mark.slow
def test_a_run_under_env_goes_on_without_a_rank_with_it_again_and_after_rank_0_itself_was_started_again(
    folder: Path, eventually: Eventually
) -> None:
    with ranks_of([1, 1]) as ranks:
        first, other = (ranks.begin(rank, "training.py", "{}") for rank in range(2))
        eventually(lambda: saved() > 30, within=60, what="checkpoints")
        other.kill()
        other.wait()
        eventually(lambda: saved() > 90, within=60, what="checkpoints of rank 0 alone")
        other = ranks.begin(1, "training.py", "{}")
        eventually(lambda: saved() > 150, within=60, what="checkpoints of both")
        first.kill()
        first.wait()
        first = ranks.begin(0, "training.py", "{}")
        ends = [says(process) for process in (first, other)]
        assert [process.returncode for process in (first, other)] == [0, 0], ends
    assert all(end.endswith("finished 300\n") for end in ends), ends
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    starts = [event["data"] for event in events if event["kind"] == "start"]
    assert [one["workers"] for one in starts] == [2, 2]
    assert starts[1]["first_step"] > 150
    assert events[-1]["data"]["metrics"]["accuracy"] > 0.6
    assert apportion.load("run", trust=True) is not None


@pytest.mark.slow
def test_a_rank_that_was_given_another_run_is_refused_by_name_and_the_others_go_on(folder: Path) -> None:
    with ranks_of([1, 1, 1]) as ranks:
        first, second = (ranks.begin(rank, "training.py", "{'steps': 200}") for rank in range(2))
        wrong = ranks.begin(2, "training.py", "{'steps': 200, 'lr': 0.02}")
        said = says(wrong)
        assert wrong.returncode != 0
        assert "rank 2 on host" in said
        assert "rates of optimizer=" in said
        for process in (first, second):
            text = says(process)
            assert process.returncode == 0, text
            assert "finished 200" in text


@pytest.mark.slow
def test_a_process_whose_rank_another_one_has_taken_ends_when_it_wakes(folder: Path, eventually: Eventually) -> None:
    with ranks_of([1, 1]) as ranks:
        first, old = (ranks.begin(rank, "loop.py") for rank in range(2))
        eventually(lambda: reached(1) > 20, within=60, what="some rounds")
        os.kill(old.pid, signal.SIGSTOP)
        new = ranks.begin(1, "loop.py")
        before = reached(0)
        eventually(lambda: reached(0) > before + 60, within=60, what="rounds with the new one")
        os.kill(old.pid, signal.SIGCONT)
        assert "another process has taken the place of rank 1" in says(old)
        for process in (first, new):
            text = says(process)
            assert process.returncode == 0, text
