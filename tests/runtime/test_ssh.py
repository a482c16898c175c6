"""One command that trains on several hosts: real sshds in network namespaces, real failures, real kills."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import SECONDS
from conftest import Eventually, Within
from proc_files import told_of
from ssh_hosts import SshHosts

import apportion
from apportion.comm.world import World
from apportion.core.address import load_workload

pytestmark = [pytest.mark.processes, pytest.mark.serial, pytest.mark.usefixtures("nothing_is_left_on_a_host")]
HOSTS = 3

NETWORK = """
from torch import nn


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
"""
WORK = """
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion
from network import network  # another file of the project


def examples():
    x = torch.randn(61, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def raising(outputs, targets):
    if os.environ.get("RANK") == "1":
        raise KeyError("on purpose")
    return nn.functional.cross_entropy(outputs, targets)


def slow(outputs, targets):
    time.sleep(0.02)
    return nn.functional.cross_entropy(outputs, targets)


def talking():
    print("hello from", os.environ.get("RANK"))
    return network()


def made(**fields):
    given = {"model": network, "data": examples, "loss": nn.functional.cross_entropy, "batch_size": 16, "steps": 20}
    return apportion.Workload(
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01), precision="float64", **{**given, **fields}
    )


workload = made(model=talking, evaluation=apportion.Evaluation(data=examples, every=None))
raises = made(loss=raising)
endless = made(loss=slow, steps=100_000)
"""
DRIVER = """
import json
import sys
import time

import apportion
from apportion.core.value import parse

launcher, address, options = parse(sys.argv[1], "apportion.runtime.launch"), sys.argv[2], json.loads(sys.argv[3])
until, rest, strategy = options.pop("until", None), options.pop("rest", 0), options.pop("strategy", "data_parallel")
if "max_restarts" in options:
    options["policy"] = apportion.Policy(max_restarts=options.pop("max_restarts"))
if options.pop("imported", False):
    import work
    address = getattr(work, address.partition(":")[2])
losses, last = [], None
if __name__ == "__main__":
    for event in apportion.run(address, strategy, launcher=launcher, check=False, **options):
        last = event
        if event.kind == "step":
            losses += event.data["values"]["loss"]
            print("step", event.step, flush=True)
            if until is not None and event.step >= until:
                break
            if event.step > 2:
                time.sleep(rest)
    print(json.dumps({"losses": losses, "kind": last.kind, "step": last.step, "data": dict(last.data)}))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {"network.py": NETWORK, "work.py": WORK, "driver.py": DRIVER}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


Drive = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def drive(hosts: SshHosts, project: Path) -> Iterator[Drive]:
    """``drive(launcher, "workload", steps=3)`` starts a driver on host a; none goes on after its test."""
    with ExitStack() as stack:

        def start(launcher: Any, workload: str = "workload", **options: Any) -> subprocess.Popen[str]:
            given = json.dumps({"run_dir": "run", **options})
            process = hosts.start([sys.executable, "driver.py", str(launcher), f"work.py:{workload}", given], project)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def ended(process: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, out + err
    return out, err


def result(out: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


def losses_here(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The losses of the same workload in one process."""
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.delitem(sys.modules, "network", raising=False)
    workload = load_workload("work.py:workload")
    monkeypatch.delitem(sys.modules, "network")
    step = apportion.single_device().build(workload, World())
    found = [float(step(batch)["loss"]) for batch in apportion.batches(step)]
    step.close()
    return found


def test_two_hosts_train_what_one_host_trains(
    hosts: SshHosts, drive: Drive, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = ended(drive(hosts.launcher("a", "b", workers=1)))
    told = result(out)
    assert (told["kind"], told["step"], told["data"]["reason"]) == ("end", 20, "finished")
    assert set(told["data"]["metrics"]) == {"accuracy"}
    assert {"a, rank 0: hello from 0", "b, rank 1: hello from 1"} <= set(err.splitlines())
    monkeypatch.chdir(project)
    assert told["losses"] == pytest.approx(losses_here(monkeypatch), rel=1e-10, abs=0)
    events = [json.loads(line)["kind"] for line in Path("run/events.jsonl").read_text().splitlines() if "kind" in line]
    assert events[-1] == "end"
    assert "ssh('a', 'b', workers=1" in json.loads(Path("run/run.json").read_text())["launcher"]
    assert apportion.load("run", trust=True)[0].weight.shape == (16, 8)


def other_python(folder: Path, **environment: str) -> str:
    """An interpreter that starts with another environment."""
    path = folder / "python"
    said = "".join(f"export {name}={value}\n" for name, value in environment.items())
    path.write_text(f'#!/bin/sh\n{said}exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def another_torch(folder: Path) -> str:
    about = folder / "other" / "torch-0.0.7.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.7\n")
    return other_python(folder, PYTHONPATH=f"{about.parent}:{Path(apportion.__file__).parents[1]}")


def another_apportion(folder: Path) -> str:
    shutil.copytree(Path(apportion.__file__).parent, folder / "src" / "apportion")
    with open(folder / "src" / "apportion" / "process.py", "a") as file:
        file.write("# edited\n")
    return other_python(folder, PYTHONPATH=str(folder / "src"))


def no_apportion(folder: Path) -> str:
    (folder / "empty" / "apportion").mkdir(parents=True)
    (folder / "empty" / "apportion" / "__init__.py").write_text("")
    return other_python(folder, PYTHONPATH=str(folder / "empty"))


FAILURES = {
    "no such name": (("a", "nowhere.invalid"), None, "host nowhere.invalid cannot be reached: ssh: Could not resolve"),
    "no such user": (
        ("a", "nobody-here@b"),
        None,
        "host nobody-here@b cannot be reached: nobody-here@10.123.46.2: Permission",
    ),
    "no sshd": (("a", "127.0.0.1"), None, "host 127.0.0.1 cannot be reached: ssh: connect to host 127.0.0.1 port"),
    "no Python": (("a", "b"), lambda folder: "/opt/python9", "host [ab] has no Python /opt/python9: install it there"),
    "no apportion": (("a", "b"), no_apportion, "host [ab] has no apportion, or an older one ."),
    "another torch": (("a", "b"), another_torch, "host [ab] has torch 0.0.7 ."),
    "another apportion": (("a", "b"), another_apportion, "host [ab] has apportion 0.1.0 ."),
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_is_wrong_with_a_host_is_said_in_one_message(
    hosts: SshHosts, drive: Drive, project: Path, tmp_path: Path, within: Within, what: str
) -> None:
    names, python, told = FAILURES[what]
    launcher = hosts.launcher(*names, workers=1, python=None if python is None else python(tmp_path))
    process = drive(launcher)
    with within(10, "the message"):
        _, err = ended(process, 1)
    last = err.strip().splitlines()[-1]
    assert re.search(told, last), err
    assert "Warning" not in err
    assert not (project / "run").exists()


def test_the_command_line_says_it_with_its_exit_status(hosts: SshHosts, project: Path) -> None:
    path = f"{hosts.folder / 'bin'}:{os.environ['PATH']}"
    command = [sys.executable, "-m", "apportion", "train", "work.py:workload", "data_parallel", "--hosts"]
    _, err = ended(hosts.start([*command, "nowhere.invalid"], project, PATH=path), 3)
    assert err.startswith("error: host nowhere.invalid cannot be reached: ssh: Could not resolve hostname")
    assert err.endswith("; check the name, or give it an address in ssh's configuration\n")
    _, err = ended(hosts.start([*command, "a,a"], project, PATH=path), 2)
    assert err == "error: host a is named twice: name it once, with the number of its workers, a:4\n"
    _, err = ended(hosts.start([*command, "a", "--members", "2"], project, PATH=path), 2)
    assert "leave --hosts out" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_before_the_first_step_leaves_nothing(
    hosts: SshHosts, drive: Drive, project: Path, within: Within, eventually: Eventually, number: signal.Signals
) -> None:
    process = drive(hosts.launcher("a", "b", workers=1))
    eventually(lambda: agents_on(hosts, "a") and agents_on(hosts, "b"), within=20, what="the agents run")
    process.send_signal(number)
    with within(5, "the end"):
        _, err = process.communicate(timeout=SECONDS)
    statuses = {signal.SIGINT: (1, 130, -number), signal.SIGTERM: (128 + number,), signal.SIGKILL: (-number,)}
    assert process.returncode in statuses[number], err
    assert ("interrupted before anything was saved" in err) == (number == signal.SIGINT)
    assert ("told to end by SIGTERM before anything was saved" in err) == (number == signal.SIGTERM)
    assert not (project / "run").exists()


def test_hosts_that_do_not_reach_each_other_are_named(
    hosts: SshHosts, drive: Drive, project: Path, within: Within
) -> None:
    first = hosts.made.addresses[1]
    route = ["ip", "-n", hosts.made.names[2], "route"]
    subprocess.run([*route, "add", "unreachable", first], check=True)
    try:
        process = drive(hosts.launcher("b", "c", workers=1))
        with within(10, "the message"):
            _, err = ended(process, 1)
    finally:
        subprocess.run([*route, "del", "unreachable", first], check=True)
    assert f"ApportionError: host c cannot connect to host b at {first}, where the ranks meet" in err
    assert "is there a firewall?" in err


def test_a_full_disk_on_a_host_is_named(hosts: SshHosts, drive: Drive, project: Path, within: Within) -> None:
    (project / "large.py").write_bytes(os.urandom(1 << 17))
    with hosts.small_disk("c"), within(10, "the message"):
        _, err = ended(drive(hosts.launcher("a", "c", workers=1)), 1)
    last = err.strip().splitlines()[-1]
    assert "host c: the code of the run cannot be written to" in last
    assert "(No space left on device): make room there" in last


@pytest.mark.slow
def test_an_exception_on_the_second_host_ends_the_run_with_its_line(
    hosts: SshHosts, drive: Drive, project: Path, within: Within
) -> None:
    process = drive(hosts.launcher("a", "b", workers=1), "raises")
    with within(30, "the end"):
        _, err = ended(process, 1)
    assert "WorkerFailed: rank 1 on host b: KeyError: 'on purpose'" in err
    assert "work.py:" in err
    assert 'raise KeyError("on purpose")' in err


def stepping(process: subprocess.Popen[str]) -> None:
    """Waits until a run makes steps."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and int(line.split()[1]) > 2:
            return
    raise AssertionError(process.stderr.read() if process.stderr is not None else "")


def ranks_on(hosts: SshHosts, name: str) -> list[int]:
    """The ranks of a host: the grandchildren of its agent, by what only they have in their environment."""
    found = []
    for pid in hosts.processes(name):
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            command = Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            continue
        if b"runtime.spawn.template" in command and words:
            found.append(pid)
    return found


def agents_on(hosts: SshHosts, name: str) -> list[int]:
    found = hosts.processes(name)
    return [pid for pid, words in found.items() if "-m apportion.runtime.hosts.agent" in words and " -c " not in words]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "told"),
    [
        ("rank", "rank 1 on host b was killed by SIGKILL"),
        ("agent", "host b is lost with rank 1: its agent was ended by SIGKILL"),
        ("sshd", "host b is lost with rank 1: the connection was lost"),
    ],
)
def test_what_is_killed_on_a_host_ends_a_run_that_may_lose_nothing_and_leaves_nothing(
    hosts: SshHosts, drive: Drive, project: Path, within: Within, victim: str, told: str
) -> None:
    process = drive(hosts.launcher("a", "b", workers=1), "endless", strategy="local_sgd(every=2)", max_restarts=0)
    stepping(process)
    if victim == "sshd":
        pids = [pid for pid, words in hosts.processes("b").items() if words.startswith("sshd: ")]
    else:
        pids = ranks_on(hosts, "b") if victim == "rank" else agents_on(hosts, "b")
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with within(10, "the end"):
        _, err = ended(process, 1)
    assert told in err.strip().splitlines()[-1]
    assert "--resume goes on" in err


def look_for_the_secret(hosts: SshHosts) -> None:
    """The secret of a run lies in a file of its owner's, and in no argument and no variable."""
    for name in ("a", "b"):
        (file,) = (hosts.folder / name).glob("apportion-hosts-*/secret")
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        secret = file.read_bytes()
        assert len(secret) == 64
        for pid in hosts.processes(name):
            told = [told_of(pid, what) for what in ("cmdline", "environ")]
            assert all(secret not in text for text in told)


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_nothing(
    hosts: SshHosts, drive: Drive, project: Path, eventually: Eventually
) -> None:
    process = drive(hosts.launcher("a", "b", workers=1), "endless")
    stepping(process)
    look_for_the_secret(hosts)
    process.kill()
    process.communicate(timeout=10)
    eventually(lambda: hosts.left() == [], within=10, what="nothing is left on the hosts")


@pytest.mark.slow
@pytest.mark.parametrize("rest", [0, 60], ids=["in the run", "in the body of the loop"])
def test_ctrl_c_saves_and_says_how_to_go_on(
    hosts: SshHosts, drive: Drive, project: Path, within: Within, rest: int
) -> None:
    process = drive(hosts.launcher("a", "b", workers=1), "endless", rest=rest)
    stepping(process)
    process.send_signal(signal.SIGINT)
    with within(10, "the end"):
        out, err = process.communicate(timeout=SECONDS)
    assert "KeyboardInterrupt" in err
    assert "is saved" in err
    assert f"it is on host a, in {project}/run" in err
    saved = max(int(path.name.partition("-")[2]) for path in (project / "run/checkpoints").glob("step-*"))
    out, _ = ended(drive(hosts.launcher("a", "b", workers=1), "endless", resume=True, steps=saved + 3))
    assert result(out)["step"] == saved + 3


@pytest.mark.slow
def test_a_loop_that_is_left_stops_all_ranks_at_one_step(hosts: SshHosts, drive: Drive, project: Path) -> None:
    launcher = hosts.launcher("a", "b:2", workers=1)
    out, err = ended(drive(launcher, "endless", until=5, imported=True))
    assert result(out)["kind"] == "step"
    assert "could not be saved" not in err
    assert "host b has 2 workers x 1 threads and loaders on 1 cores: they take turns" in err
    assert list((project / "run/checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_named(hosts: SshHosts, drive: Drive, project: Path, within: Within) -> None:
    os.kill(hosts.servers["b"].pid, signal.SIGSTOP)
    try:
        process = drive(hosts.launcher("a", "b", workers=1))
        with within(11, "the message"):
            _, err = ended(process, 1)
    finally:
        os.kill(hosts.servers["b"].pid, signal.SIGCONT)
    assert re.search("host b cannot be reached: Connection .* timed out.*; it did not answer for 8 s", err), err


@pytest.mark.slow
def test_an_agent_that_is_stopped_is_named(hosts: SshHosts, drive: Drive, project: Path, within: Within) -> None:
    process = drive(hosts.launcher("a", "b", workers=1), "endless", strategy="local_sgd(every=2)", max_restarts=0)
    stepping(process)
    (agent,) = agents_on(hosts, "b")
    os.kill(agent, signal.SIGSTOP)
    try:
        with within(50, "the end"):
            _, err = ended(process, 1)
    finally:
        os.kill(agent, signal.SIGCONT)
    assert "host b is lost with rank 1: it has said nothing for " in err


@pytest.mark.slow
def test_a_run_on_another_disk_is_copied_to_the_driver(hosts: SshHosts, drive: Drive, project: Path) -> None:
    run_dir = hosts.private / "run"
    out, err = ended(drive(hosts.launcher("b", "a", workers=1), run_dir=str(run_dir)))
    assert result(out)["data"]["run_dir"] == str(run_dir)
    assert "not copied" not in err
    assert [path.name for path in hosts.private.iterdir()] == ["run"]
    (run_dir / "notes.txt").touch()
    kinds = [json.loads(line).get("kind") for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert kinds[-1] == "end"
    assert os.readlink(run_dir / "checkpoints/latest") == "step-00000020"
    assert (run_dir / "report.html").exists()
    assert apportion.load(run_dir, trust=True)[0].weight.shape == (16, 8)
    options = {"run_dir": str(run_dir), "resume": "auto", "steps": 25}
    ended(drive(hosts.launcher("b", "also-a", "a", workers=1), **options))
    assert os.readlink(run_dir / "checkpoints/latest") == "step-00000025"
    assert (run_dir / "notes.txt").exists(), "what is not the run's stays"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_one_other_host_trains_too(hosts: SshHosts, drive: Drive, project: Path, workers: int) -> None:
    out, err = ended(drive(hosts.launcher("b", workers=workers)))
    assert (result(out)["kind"], result(out)["step"]) == ("end", 20)
    assert ("b, rank 0: hello from 0" if workers > 1 else "hello from 0") in err.splitlines()


@pytest.mark.slow
def test_the_command_line_names_hosts(hosts: SshHosts, project: Path) -> None:
    path = f"{hosts.folder / 'bin'}:{os.environ['PATH']}"
    command = [sys.executable, "-m", "apportion", "train", "work.py:workload", "data_parallel", "--hosts", "a,b:1"]
    process = hosts.start([*command, "--workers", "1", "--run-dir", "run", "--no-check"], project, PATH=path)
    out, _ = ended(process)
    assert "data_parallel on ssh('a', 'b:1', workers=1)" in out
    process = hosts.start([*command, "--run-dir", "run", "--no-check"], project, PATH=path)
    _, err = ended(process, 2)
    assert "run" in err
    assert "--resume" in err
    command[command.index("work.py:workload")] = "work.py:endless"
    process = hosts.start([*command, "--run-dir", "cut", "--no-check"], project, PATH=path)
    assert process.stdout is not None
    assert any("step" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert "is saved\ngo on with: resume=True, run_dir='cut'" in err
    assert err.endswith(f"it is on host a, in {project}/cut\n")


@pytest.mark.slow
def test_without_a_strategy_the_ranks_choose_one_and_go_on_with_it(hosts: SshHosts, project: Path) -> None:
    given = {"PATH": f"{hosts.folder / 'bin'}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(project / "cache")}
    command = [sys.executable, "-m", "apportion", "train", "work.py:workload", "--hosts", "a,b", "--workers", "1"]
    ended(hosts.start([*command, "--run-dir", "run", "--steps", "12", "--no-check"], project, **given))
    chosen = json.loads((project / "run" / "run.json").read_text())["strategy"]
    assert any(json.loads(line)["kind"] == "plan" for line in (project / "run/events.jsonl").read_text().splitlines())
    ended(hosts.start([*command, "--run-dir", "run", "--steps", "20", "--no-check", "--resume"], project, **given))
    assert json.loads((project / "run" / "run.json").read_text())["strategy"] == chosen
    assert os.readlink(project / "run/checkpoints/latest") == "step-00000020"
