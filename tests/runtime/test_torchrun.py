"""Ranks that are running already: torchrun on one host and on two, and what is said where it is set up wrongly."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from commands import SECONDS, finish, free_port, start

import apportion

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
WORK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


def examples():
    x = torch.randn(61, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 61

    def __getitem__(self, index):
        return torch.rand(8), index % 2


workload = apportion.Workload(
    model=network,
    data=examples,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    batch_size=16,
    steps=30,
    evaluation=apportion.Evaluation(data=examples, every=None),
)
"""
LOOP = """
import json
import os
import sys

import torch

import apportion
from work import workload

world = apportion.World.from_env(device="cpu")
step = apportion.data_parallel().build(workload, world)
losses = []
for batch in apportion.batches(step):
    losses.append(float(step(batch)["loss"]))
with open(f"{sys.argv[1]}-{world.rank}.json", "w") as file:
    json.dump({"losses": losses, "group": type(world.group()).__name__}, file)
world.close()
"""
RUNS = """
import dataclasses
import json

import apportion
from work import Rows, workload


def losses(workload, run_dir, until=None, **options):
    options = {"launcher": apportion.env(device="cpu"), **options}
    found, last = [], None
    for event in apportion.run(workload, "data_parallel", run_dir=run_dir, **options):
        last = event
        if event.kind == "step":
            found += event.data["values"]["loss"]
            if until is not None and event.step >= until:
                break
    return found, last


whole, end = losses(workload, "whole")
cut, _ = losses(dataclasses.replace(workload, steps=100_000), "cut", until=5)
last = apportion.train(workload, apportion.data_parallel(), launcher=apportion.env(), run_dir="half", steps=12)
assert (last.kind, last.step, set(last.data["metrics"])) == ("end", 12, {"accuracy"}), "on every rank"
rest, _ = losses(workload, "half", resume=True)
rows = dataclasses.replace(workload, data=Rows, steps=6)
alone, _ = losses(rows, "alone")
ahead, _ = losses(rows, "ahead", launcher=apportion.env(loaders=1))
if whole:  # rank 0 is told
    told = {"whole": whole, "metrics": dict(end.data["metrics"]), "rest": rest, "ahead": ahead == alone}
    with open("told.json", "w") as file:
        json.dump({**told, "cut": len(cut)}, file)
"""

PARTS = """
import json
import sys

import torch

import apportion

if sys.argv[1] == "given":  # the script has a group of its own, which stays
    torch.distributed.init_process_group("gloo")
world = apportion.World.from_env(device="cpu")
told = []


def told_of(part):
    total = torch.tensor([10.0**world.rank])
    part.group().all_reduce(total).wait()
    other = torch.zeros(1)
    if part.size > 1:
        work = part.group().send(torch.tensor([float(world.rank)]), (part.rank + 1) % part.size)
        part.group().receive(other, (part.rank - 1) % part.size).wait()
        work.wait()
    told.append([part.rank, part.size, part.local_rank, part.local_size, total.item(), other.item() * (part.size > 1)])
    return part


for number, ranks in enumerate(json.loads(sys.argv[2])):
    part = told_of(world.split(f"axis{number}", ranks))
    if number == 0 and part.size > 1:  # those of one rank have no parts
        told_of(part.split("nested", [[0], list(range(part.size))[:0:-1]]))
told_of(world)
world.close()
again = apportion.World.from_env(device="cpu")
told_of(again.split("axis0", json.loads(sys.argv[2])[0]))
again.close()
with open(f"{sys.argv[1]}-{world.rank}.json", "w") as file:
    json.dump(told, file)
"""

ENDING = """
import os

import torch
import torch.distributed as dist

from apportion.comm.process_group import ProcessGroup

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # whoever wakes another thread goes on after it


class Waited:
    def __init__(self, work):
        self._work = work

    def wait(self):
        self._work.wait()
        self._work = None


class Long:
    # Gloo, with so many tensors in a collective that its thread takes long to let go of them.

    def __init__(self, gloo):
        self._gloo, self.rank, self.size = gloo, gloo.rank, lambda: 100_000

    def allgather(self, into, own):
        work = self._gloo.allreduce(into[0])
        into[0].clear()
        return Waited(work)


gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
group = ProcessGroup(Long(gloo), owned=False)
group.all_gather(torch.ones(1))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's files are, and where everything runs."""
    for name, text in (
        ("work.py", WORK),
        ("loop.py", LOOP),
        ("runs.py", RUNS),
        ("parts.py", PARTS),
        ("ending.py", ENDING),
    ):
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def local_losses(folder: Path) -> tuple[list[float], Mapping[str, float]]:
    """What the launcher of this package gives, with two workers."""
    launcher = apportion.local(workers=2, threads=1, device="cpu")
    losses: list[float] = []
    for event in apportion.run("work.py:workload", "data_parallel", launcher=launcher, run_dir=folder / "local"):
        if event.kind == "step":
            losses += event.data["values"]["loss"]
        elif event.kind == "end":
            metrics = event.data["metrics"]
    assert len(losses) == 30
    return losses, metrics


# One host


@pytest.mark.processes
def test_the_loop_in_a_script_of_ones_own_gives_the_losses_of_the_local_launcher(folder: Path) -> None:
    finish([start([*TORCHRUN, "--standalone", "--nproc-per-node=2", "loop.py", "own"])])
    expected, _ = local_losses(folder)
    for rank in (0, 1):
        assert json.loads((folder / f"own-{rank}.json").read_text())["losses"] == expected


@pytest.mark.processes
@pytest.mark.thorough
def test_run_under_torchrun_breaks_resumes_and_gives_the_losses_of_the_local_launcher(folder: Path) -> None:
    finish([start([*TORCHRUN, "--standalone", "--nproc-per-node=2", "runs.py"])])
    expected, metrics = local_losses(folder)
    told = json.loads((folder / "told.json").read_text())
    assert told["whole"] == expected
    assert told["metrics"] == metrics
    assert told["rest"] == expected[12:], "resumed at step 12"
    assert told["ahead"], "with data-loading processes"
    assert 5 <= told["cut"] < 100_000
    state = json.loads((folder / "cut" / "checkpoints" / "latest" / "state.json").read_text())
    assert state["step"] >= 5, "break has left a checkpoint"
    for name in ("whole", "cut", "half"):
        assert (folder / name / "report.html").exists()


Lists = list[list[list[int]]]
UNEVEN: dict[int, Lists] = {
    3: [[[0, 1], [2]], [[0], [1, 2]], [[2, 0], [1]], [[0], [1], [2]], [[0], [2, 1]], [[0, 1, 2]]],
    4: [[[0, 1, 2], [3]], [[0], [3, 1], [2]], [[0, 3], [2, 1]], [[1], [0, 2, 3]], [[0, 3], [2, 1]], [[1, 3, 0, 2]]],
}


def what_parts_tell(rank: int, splits: Lists, hosts: list[int]) -> list[list[float]]:
    def of(part: list[int]) -> list[float]:
        here = [other for other in part if hosts[other] == hosts[rank]]
        at, total = part.index(rank), sum(10.0**other for other in part)
        place = [at, len(part), here.index(rank), len(here)]
        return [*place, total, part[at - 1] if len(part) > 1 else 0.0]

    told = []
    for number, split in enumerate(splits):
        part = next(part for part in split if rank in part)
        told.append(of(part))
        if number == 0 and len(part) > 1:
            told.append(of([part[0]] if rank == part[0] else part[:0:-1]))
    return [*told, of(list(range(len(hosts)))), told[0]]


def assert_parts(folder: Path, name: str, splits: Lists, hosts: list[int]) -> None:
    for rank in range(len(hosts)):
        found = json.loads((folder / f"{name}-{rank}.json").read_text())
        assert found == what_parts_tell(rank, splits, hosts), f"rank {rank}"


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "group"), [(3, "own"), (4, "own"), (3, "given")])
def test_parts_of_uneven_sizes_find_each_other_whatever_parts_their_ranks_were_in_before(
    folder: Path, ranks: int, group: str
) -> None:
    splits = UNEVEN[ranks]
    finish([start([*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", "parts.py", group, json.dumps(splits)])])
    assert_parts(folder, group, splits, [0] * ranks)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs one core for all threads, which Linux gives")
@pytest.mark.thorough
def test_a_process_may_end_while_gloo_lets_go_of_the_last_collective(folder: Path) -> None:
    for _ in range(3):
        finish([start([sys.executable, "ending.py"])])


@pytest.mark.processes
def test_a_part_knows_which_of_its_ranks_are_on_its_host(folder: Path) -> None:
    """Two agents of torchrun stand for two hosts."""
    splits = [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 1, 0], [2]], [[0], [3, 2, 1]]]
    port, processes = free_port(), []
    for node in range(2):
        where = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
        command = [*TORCHRUN, *where, f"--master-port={port}", "parts.py", "two", json.dumps(splits)]
        processes.append(start(command))
    finish(processes)
    assert_parts(folder, "two", splits, [0, 0, 1, 1])


# Two hosts


def can_make_hosts() -> str | None:
    """Why not, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux: two network namespaces stand for two hosts"
    if shutil.which("ip") is None:
        return "needs iproute2's ip: two network namespaces stand for two hosts"
    probe = f"apportion-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two network namespaces joined by a cable: name and address of each."""
    why = can_make_hosts()
    if why is not None:
        pytest.skip(why)
    names = [f"apportion-{os.getpid()}-{side}" for side in "ab"]
    cable = [f"ap{os.getpid()}{side}" for side in "ab"]
    addresses = ["10.123.45.1", "10.123.45.2"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for name, end, address in zip(names, cable, addresses, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield dict(zip(names, addresses, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", cable[0]], capture_output=True)  # where it never moved


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stderr)


@pytest.mark.processes
def test_two_hosts_give_the_losses_of_one(folder: Path, hosts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    master = next(iter(hosts.values()))
    processes = []
    secret = folder / "secret"
    secret.write_text("a secret of this test")
    secret.chmod(0o600)
    monkeypatch.setenv("APPORTION_SECRET_FILE", str(secret))
    for rank, name in enumerate(hosts):
        where = ["--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", f"--master-addr={master}"]
        command = ["ip", "netns", "exec", name, *TORCHRUN, *where, "--master-port=29511", "loop.py", "hosts"]
        processes.append(start(command))
    finish(processes)
    told = [json.loads((folder / f"hosts-{rank}.json").read_text()) for rank in (0, 1)]
    expected, _ = local_losses(folder)
    assert told[0]["losses"] == told[1]["losses"]
    # On one host the update is made elsewhere, in other pieces: the same numbers up to rounding.
    assert told[0]["losses"] == pytest.approx(expected, rel=1e-5)
    assert [t["group"] for t in told] == ["NetworkGroup"] * 2


# Set up wrongly


def test_without_an_address_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        ValueError, match=r"LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set: .* \(MASTER_ADDR: the host of"
    ):
        apportion.World.from_env()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1"}, (5, 7, 1, 7)),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_STEP_NUM_TASKS": "6",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
            },
            (5, 6, 1, 2),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (1, 4, 1, 2),
        ),
    ],
    ids=["srun", "srun on nodes", "mpirun"],
)
def test_other_launchers_names_are_understood(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, ...]
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"WORLD_SIZE={expected[1]} but MASTER_ADDR, MASTER_PORT is not set"):
        apportion.World.from_env(device="cpu")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29511")
    world = apportion.World.from_env(device="cpu")
    assert (world.rank, world.size, world.local_rank, world.local_size) == expected


def test_torchruns_names_win_over_slurms(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for name, text in {**given, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, text)
    world = apportion.World.from_env(device="cpu")
    assert (world.rank, world.size) == (1, 2)


def world(monkeypatch: pytest.MonkeyPatch, number: int, address: str, near: bool = False) -> apportion.World:
    """One rank of two, that does not wait long for the other. ``near``: on one host."""
    given = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number if near else 0)}
    given |= {"LOCAL_WORLD_SIZE": "2" if near else "1", "MASTER_PORT": str(free_port()), "MASTER_ADDR": address}
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("apportion.comm.network.rendezvous.DEADLINE_SECONDS", 2.0)
    monkeypatch.setattr("apportion.comm.network.meeting_place.RESOLVE_SECONDS", 0.5)
    monkeypatch.setattr("apportion.comm.network.rendezvous.PATIENCE_SECONDS", 0.2)
    return apportion.World.from_env(device="cpu", insecure=True)


def test_a_name_that_does_not_resolve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = world(monkeypatch, 1, "no-such-host.invalid")
    with pytest.raises(
        apportion.ApportionError, match=r"MASTER_ADDR=no-such-host.invalid cannot be resolved \(.*give the"
    ):
        asked.group()


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize(("number", "why"), [(0, "rank 1 is not there: it did not connect in"), (1, "nothing answers")])
@pytest.mark.cases(1)
def test_where_nobody_answers_a_rank_says_that_it_waits_and_then_gives_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int, why: str, near: bool
) -> None:
    monkeypatch.setattr("apportion.comm.world.is_loopback", lambda host: near)  # or a host that nobody else reaches
    asked = world(monkeypatch, number, "127.0.0.1", near)
    with pytest.raises(
        apportion.ApportionError, match=rf"rank {number} of 2 could not meet the others at 127.0.0.1:\d+"
    ) as e:
        asked.group()
    assert why in str(e.value)
    assert "check that rank 0 runs there" in str(e.value)
    assert f"rank {number} of 2 has waited 0 s for the others at 127.0.0.1:" in capfd.readouterr().err


FOUND_OUT = """
import json
import sys

import torch

import apportion

world = apportion.World.from_env(device="cpu", insecure=True)
total = torch.tensor([10.0**world.rank])
world.group().all_reduce(total).wait()
world.close()
print(json.dumps([world.local_rank, world.local_size, total.item()]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("numbers", [[0, 1], [0, 0]])
def test_how_many_ranks_a_host_has_is_found_out_where_nobody_says_it(numbers: list[int]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # sends nothing
        except OSError:
            pytest.skip("needs an address that is not of this host alone")
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": probe.getsockname()[0], "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FOUND_OUT],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, number in enumerate(numbers)
    ]
    told = [process.communicate(timeout=SECONDS) for process in ranks]
    for rank, (out, err) in enumerate(told):
        if numbers == [0, 1]:
            assert json.loads(out) == [rank, 2, 11.0], err
        else:
            assert "were given LOCAL_RANK=[0, 0]: they must be 0 to 1, each once" in err


def test_several_hosts_without_a_secret_are_refused_with_the_command_that_makes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = replace(world(monkeypatch, 0, "10.0.0.1"), insecure=False)
    with pytest.raises(
        ValueError, match=r"APPORTION_SECRET_FILE is not set: .* \(umask 077; python3 -c .*insecure=Tru"
    ):
        asked.group()


@pytest.mark.processes
def test_a_group_of_the_users_own_is_used_and_left_alone(folder: Path) -> None:
    code = """
    import torch.distributed as dist
    import apportion
    from work import workload

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from apportion.comm.process_group import ProcessGroup
    import torch

    group = ProcessGroup.connect(rank=0, size=1, device=torch.device("cpu"), local_size=1)
    group.close()
    assert dist.is_initialized()
    dist.destroy_process_group()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
