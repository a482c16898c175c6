"""A data set in three parts on three hosts, which are network namespaces: each host opens the file of its own part
alone, the run is proved with rows that are sent, goes on on two hosts, and trains the network of one process."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import finish, free_port, start
from safetensors.torch import load_file
from torch import Tensor

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "lib"
BOUND = 1e-10
LENGTHS = (31, 12, 23)
WORK = """
import json
import os

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import apportion

FOLDER = os.environ["PARTS_FOLDER"]
HERE = json.loads(os.environ["PARTS_HERE"])
HOST = os.environ["PARTS_HOST"]


class Pictures(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index]}, int(self.y[index])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        middle = nn.BatchNorm1d(8) if NORM else nn.Tanh()
        self.layers = nn.Sequential(nn.Linear(6, 8, bias=False), middle, nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)


NORM = os.environ.get("PARTS_NORM") == "1"


def part(number):
    with open(os.path.join(FOLDER, f"opened-{HOST}"), "a") as file:
        file.write(f"{number}\\n")
    if number not in HERE:
        raise FileNotFoundError(f"part-{number}.pt is not on this host")
    x, y = torch.load(os.path.join(FOLDER, f"part-{number}.pt"))
    return Pictures(x, y) if NORM else TensorDataset(x, y)


def noise(batch, draws):
    inputs = batch.inputs
    if NORM:
        return batch.replace(inputs={"x": inputs["x"] + 0.1 * draws.normal(6)})
    return batch.replace(inputs=inputs + 0.1 * draws.normal(6))


workload = apportion.Workload(
    model=Net,
    data=part,
    parts=3,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    batch_size=16,
    steps=12,
    precision="float64",
    augment=noise,
)
"""
TRAIN = """
import json
import os
import sys

import apportion
from apportion.errors import ApportionError
from work import workload

strategy, steps, resume, check = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resume", sys.argv[4] == "check"
told = {}
try:
    events = apportion.run(
        workload, strategy, launcher=apportion.env(device="cpu"), run_dir="run", steps=steps, resume=resume, check=check
    )
    for event in events:
        if event.kind == "start":
            told = dict(event.data)
except (ValueError, ApportionError) as error:
    told = {"error": str(error)}
with open(f"told-{os.environ['RANK']}.json", "w") as file:
    json.dump(told, file)
"""

CHECK = """
import json
import os

import apportion
from apportion.errors import ApportionError
from work import workload

proof = apportion.check(workload, "map_reduce", launcher=apportion.env(device="cpu"), steps=6)
told = {"verdict": proof.verdict, "differs": proof.rounds[0].worst.absolute, "sentence": proof.sentence}
try:
    apportion.train(workload, launcher=apportion.env(device="cpu"), run_dir="run")
except ValueError as error:
    told["error"] = str(error)
with open(f"told-{os.environ['RANK']}.json", "w") as file:
    json.dump(told, file)
"""


def rows(part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(part)
    x = torch.randn(LENGTHS[part], 6, generator=generator, dtype=torch.float64)
    return x, (x.sum(1) > 0).long()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the scripts and the parts are, which all hosts of this machine see."""
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    for part in range(3):
        torch.save(rows(part), tmp_path / f"part-{part}.pt")
    monkeypatch.chdir(tmp_path)
    for name, value in {"OMP_NUM_THREADS": "1", "PARTS_FOLDER": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that makes hosts; skipped where there can be none."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import hosts as module

    why = module.cannot()
    if why is not None:
        pytest.skip(why)
    return module


def run(hosts: Any, here: Sequence[Sequence[int]], *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """What the ranks tell of a run on so many hosts of one rank, each of which has these parts."""
    with hosts.several_hosts((1,) * len(here)) as made:
        port, command = made.port(), [sys.executable, "train.py", *arguments]
        finish(
            [
                start(
                    made.command(rank, command),
                    **made.environment(rank, len(here), port),
                    PARTS_HERE=json.dumps([*parts]),
                    PARTS_HOST=str(rank),
                    **environment,
                )
                for rank, parts in enumerate(here)
            ]
        )
    return [json.loads(Path(f"told-{rank}.json").read_text()) for rank in range(len(here))]


def opened(host: int) -> set[int]:
    """The parts that the processes of a host have asked for since the last look."""
    path = Path(f"opened-{host}")
    found = {int(line) for line in path.read_text().split()}
    path.unlink()
    return found


def alone(norm: bool) -> dict[str, Tensor]:
    """The weights that one process trains on all parts."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    of_parts = {"PARTS_HERE": "[0, 1, 2]", "PARTS_HOST": "alone", "PARTS_NORM": str(int(norm))}
    os.rename("run", "run-on-hosts")
    command = [sys.executable, "train.py", "single_device", "12", "new", "no-check"]
    finish([start(command, **place, MASTER_PORT=str(free_port()), **of_parts)])
    return load_file("run/checkpoints/latest/model.safetensors")


def difference(norm: bool) -> float:
    expected = alone(norm)
    found = load_file("run-on-hosts/checkpoints/latest/model.safetensors")
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "norm"), [("data_parallel", True), ("map_reduce", False)])
def test_three_hosts_with_a_part_each_and_then_two_train_the_network_of_one_process(
    folder: Path, hosts: Any, strategy: str, norm: bool
) -> None:
    environment = {"PARTS_NORM": str(int(norm))}
    told = run(hosts, [[0], [1], [2]], strategy, "5", "new", "check", **environment)
    assert [opened(host) for host in range(3)] == [{0}, {1}, {2}]
    sentence = told[0]["proof"]["sentence"]
    assert told[0]["proof"]["verdict"] == "equal", sentence
    assert "rows of the 3 parts were sent to rank 0 on host " in sentence
    described = json.loads((folder / "run" / "run.json").read_text())
    assert described["fingerprint"]["examples of each part"] == [*LENGTHS]
    run(hosts, [[0, 1], [2]], strategy, "12", "resume", "no-check", **environment)
    assert [opened(host) for host in range(2)] == [{0, 1}, {2}]
    assert difference(norm) <= BOUND


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_strategy_is_checked_on_the_hosts_that_have_the_parts(folder: Path, hosts: Any) -> None:
    (folder / "train.py").write_text(CHECK)
    told = run(hosts, [[0], [1], [2]])
    assert [opened(host) for host in range(3)] == [{0}, {1}, {2}]
    assert told[0] == told[1] == told[2]
    assert told[0]["verdict"] == "equal", told
    assert told[0]["differs"] <= BOUND
    assert "3 hosts have some of the 3 parts of the data set each" in told[0]["error"]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_cannot_be_done_with_parts_on_hosts_is_refused_on_all_of_them(folder: Path, hosts: Any) -> None:
    for strategy, here, said in (
        ("pipeline_parallel", [[0, 1], [2]], "pipeline_parallel gives every rank rows of all of the 3 parts"),
        ("data_parallel", [[0], [1], [2], []], "parts=3 cannot be dealt to 4 hosts"),
        ("data_parallel", [[0, 1], []], "part 2 of 3 could not be opened on rank 1 on host"),
    ):
        told = run(hosts, here, strategy, "5", "new", "no-check")
        assert len({rank["error"] for rank in told}) == 1
        assert told[0]["error"].startswith(said), told
    assert not (folder / "run").exists()
