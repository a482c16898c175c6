"""A run on several hosts: what it records of its faults, what it prints, and what it refuses. The hosts are all this
machine: a stand-in for ssh runs the agents here, as if each were another host."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import apportion
from apportion.core.event import Event
from apportion.errors import NotFinite

SSH = """#!/bin/sh
for word; do before=$name; name=$last; last=$word; done
echo $$ > "$FAKE/agent-$name"
export FAKE_HOST=$name
exec sh -c "$last"
"""
WORK = """
import os, signal, sys, time
from pathlib import Path

import torch
from torch import nn

import apportion

FAKE = Path(os.environ["FAKE"])
X = torch.randn(400, 10, generator=torch.Generator().manual_seed(1))


def loss(outputs, labels):
    rank = os.environ.get("RANK", "driver")
    (FAKE / f"new-{rank}").write_text(str(os.getpid()))
    os.replace(FAKE / f"new-{rank}", FAKE / f"rank-{rank}")  # it is read at any time
    found = nn.functional.cross_entropy(outputs, labels)
    if rank == "1" and (FAKE / "now").exists():
        if KIND == "nan":
            return found * float("nan")
        if KIND == "raises":
            raise RuntimeError("a fault of the user's own")
        if KIND == "memory":
            raise MemoryError("no room for 3 tensors")
        if KIND == "exits":
            sys.exit(3)
    time.sleep(PACE)
    return found


def data():
    return torch.utils.data.TensorDataset(X, X[:, :3].argmax(1))


workload = apportion.Workload(
    model=lambda: nn.Linear(10, 3), data=data, loss=loss, batch_size=40, steps=STEPS,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)
"""
SECONDS = 60.0


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stand-in for ssh, where ranks and agents leave their process ids."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def written(folder: Path, *, kind: str = "", pace: float = 0.02, steps: int = 300) -> str:
    """Writes the workload, and returns its address."""
    text = WORK.replace("KIND", repr(kind)).replace("PACE", str(pace)).replace("STEPS", str(steps))
    (folder / "work.py").write_text(text)
    return f"{folder / 'work.py'}:workload"


def pid_of(path: Path) -> int:
    return int(path.read_text())


def send(path: Path, number: int, *, group: bool = False) -> None:
    with suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid_of(path), number)


def agents_of(host: Path) -> list[int]:
    """The processes of a host's agent: the shell of the connection, and what it has started but the ranks."""
    found = [pid_of(host)]
    for pid in found:
        with suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found += [int(c) for c in children if b"hosts.agent" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return found


def signal_agent(host: Path, number: int) -> None:
    for pid in agents_of(host):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def report_text(run_dir: Path) -> str:
    """What a person reads of the report."""
    text = re.sub(r"<(style|script).*?</\1>", "", (run_dir / "report.html").read_text(), flags=re.S)
    return html.unescape(re.sub(r"<[^>]+>", " ", text))


@dataclass(frozen=True)
class FaultCase:
    """A fault, how it is made, and what must be recorded of it."""

    make: Callable[[Path], None]
    cause: str
    """A pattern of the cause."""
    kind: str = ""
    """What the loss of rank 1 does from then on."""
    raises: type[Exception] | None = None
    strategy: str = "data_parallel"
    policy: Mapping[str, Any] | None = None
    after: Callable[[Path, Event], None] = lambda fake, fault: None
    """What is done once it was reported."""


def touched(fake: Path) -> None:
    (fake / "now").touch()


CASES = {
    "a rank is killed": FaultCase(
        lambda fake: send(fake / "rank-1", signal.SIGKILL), r"rank 1 on host second was killed by SIGKILL"
    ),
    "rank 0 is killed": FaultCase(
        lambda fake: send(fake / "rank-0", signal.SIGKILL), r"rank 0 on host first was killed by SIGKILL"
    ),
    "a rank is stopped": FaultCase(
        lambda fake: send(fake / "rank-1", signal.SIGSTOP), r"rank 1 on host second has been stopped"
    ),
    "an agent is killed": FaultCase(
        lambda fake: signal_agent(fake / "agent-second", signal.SIGKILL), r"host second is lost with rank 1"
    ),
    "a host is slow": FaultCase(
        lambda fake: signal_agent(fake / "agent-second", signal.SIGSTOP),
        r"host second \(rank 1\) has said nothing for",
        policy={"host_grace": "30 s"},
        after=lambda fake, fault: signal_agent(fake / "agent-second", signal.SIGCONT),
    ),
    "a host is given up": FaultCase(
        lambda fake: signal_agent(fake / "agent-second", signal.SIGSTOP),
        r"host second is lost with rank 1: it has said nothing for",
        policy={"host_grace": "2 s"},
    ),
    "a loss is not finite": FaultCase(touched, r"rank 1 on host second: loss is nan", kind="nan", raises=NotFinite),
    "the user's code raises": FaultCase(
        touched, r"rank 1 on host second: RuntimeError: a fault of", kind="raises", raises=apportion.WorkerFailed
    ),
    "memory is refused": FaultCase(
        touched, r"rank 1 on host second: MemoryError: no room", kind="memory", raises=apportion.WorkerFailed
    ),
    "the user's code exits": FaultCase(
        touched, r"rank 1 on host second: SystemExit: .* with status 3", kind="exits", raises=apportion.WorkerFailed
    ),
    "too many ranks are lost": FaultCase(
        lambda fake: send(fake / "rank-1", signal.SIGKILL),
        r"rank 1 on host second was killed by SIGKILL",
        raises=apportion.WorkerFailed,
        policy={"max_restarts": 0},
    ),
    "a worker of a server is lost": FaultCase(
        lambda fake: send(fake / "rank-1", signal.SIGKILL),
        r"rank 1 on host second was killed by SIGKILL",
        strategy="parameter_server(servers=1)",
    ),
}
SHORT = "a rank is killed"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough, *[pytest.mark.slow] * (n != SHORT)]) for n in CASES]
)
def test_a_fault_is_recorded_with_its_host_whichever_process_saw_it(fake: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    hosts = ("first:1", "second:1", "third:1") if "server" in case.strategy else ("first:1", "second:1")
    policy = apportion.Policy(checkpoint_every="40 steps", **(case.policy or {}))
    events = apportion.run(
        written(tmp_path, kind=case.kind, steps=150 if name == SHORT else 300),
        case.strategy,
        launcher=apportion.ssh(*hosts, threads=1),
        run_dir=tmp_path / "run",
        policy=policy,
        check=False,
    )
    seen, raised = list[Event](), None
    speeds, made, end = set[int](), False, time.monotonic() + SECONDS
    try:
        for event in events:
            assert time.monotonic() < end
            if event.kind == "speed":
                speeds.add(event.rank)
            if event.kind == "fault":
                seen.append(event)
                case.after(fake, event)
            if event.kind == "step" and event.step >= 60 and not made:
                made = True
                case.make(fake)
    except apportion.ApportionError as error:
        raised = error
    finally:
        for path in fake.glob("agent-*"):
            signal_agent(path, signal.SIGCONT)
        events.close()
    assert (type(raised) if raised else None) is case.raises, raised
    causes = [event.cause for event in seen]
    assert any(re.search(case.cause, cause) for cause in causes), causes
    kept = records(tmp_path / "run")
    faults = [record["data"]["cause"] for record in kept if record["kind"] == "fault"]
    assert sorted(faults) == sorted(causes)
    assert speeds <= {record["data"]["rank"] for record in kept if record["kind"] == "speed"}
    report = " ".join(report_text(tmp_path / "run").split())
    assert all(" ".join(cause.split()) in report for cause in causes)
    if raised is not None:
        assert "no checkpoint was saved" not in str(raised)
        assert "host second" in str(raised)


def command(folder: Path, *words: str) -> list[str]:
    program = str(Path(sys.executable).with_name("apportion"))
    return [program, "train", written(folder), "--run-dir", str(folder / "run"), *words]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the driver", "an agent"])
def test_a_notice_to_end_is_recorded_and_the_run_goes_on_as_it_says(fake: Path, tmp_path: Path, whom: str) -> None:
    words = ["--hosts", "first:1,second:1", "--strategy", "data_parallel", "--no-check"]
    process = subprocess.Popen(command(tmp_path, *words), text=True, stdin=-3, stdout=-1, stderr=-2)
    try:
        end = time.monotonic() + SECONDS
        while not (tmp_path / "run" / "events.jsonl").exists() or not any(
            record["kind"] == "step" and record["step"] >= 40 for record in records(tmp_path / "run")
        ):
            assert time.monotonic() < end
            time.sleep(0.1)
        if whom == "the driver":
            process.send_signal(signal.SIGTERM)
        else:
            for pid in agents_of(fake / "agent-second"):
                if b"hosts.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGTERM)
        output = process.communicate(timeout=SECONDS)[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143, output
    assert [r["data"]["reason"] for r in records(tmp_path / "run") if r["kind"] == "end"] == ["interrupted"], output
    assert "--no-check" in output
    assert "'\"'\"'" not in output


LIES = {
    "a negative number of cores": {"cores": -1},
    "gpus that are a fraction": {"gpus": 0.5},
    "versions that are a text": {"versions": "2.13"},
    "an address that is a list": {"address": ["127.0.0.1"]},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "gpus that are a fraction" else pytest.mark.thorough) for n in LIES]
)
def test_an_agent_that_sends_an_invalid_value_is_refused_by_its_host(fake: Path, tmp_path: Path, name: str) -> None:
    facts = {
        "hostname": "liar", "cores": 2, "gpus": 0, "address": "127.0.0.1", "python": sys.executable,
        "versions": {}, **LIES[name],
    }  # fmt: skip
    message = json.dumps({"kind": "here", **facts}).encode()
    (fake / "sent-bytes").write_bytes(b"\napportion-agent/1\nJ" + len(message).to_bytes(4, "big") + message)
    (fake / "ssh").write_text(f"#!/bin/sh\ndate +%s.%N > {fake}/sent; cat {fake}/sent-bytes; exec sleep 60\n")
    given = command(tmp_path, "--hosts", "liar")
    done = subprocess.run(given, text=True, stdin=-3, stdout=-1, stderr=-2, timeout=SECONDS)
    assert time.time() - float((fake / "sent").read_text()) < 5.0, "as soon as it was sent, and the program ended"
    assert done.returncode != 0
    assert "host liar: what its agent sent is not valid" in done.stdout
    assert next(iter(LIES[name])) in done.stdout


@pytest.mark.thorough
@pytest.mark.slow
def test_each_host_may_have_an_interpreter_of_its_own(fake: Path, tmp_path: Path) -> None:
    own = tmp_path / "bin" / "python"
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\necho "$FAKE_HOST" >> {fake}/own\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)
    before = set(Path(os.environ["TMPDIR"]).iterdir())
    written(tmp_path, steps=20, pace=0.0)
    given = [f"{tmp_path}/work.py:workload", "--run-dir", f"{tmp_path}/run", "--strategy", "data_parallel"]
    words = [*given, "--hosts", f"first:1={own},second:1"]
    done = subprocess.run(
        [sys.executable, "-m", "apportion", "train", *words], text=True, stdin=-3, stdout=-1, stderr=-2, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout
    assert set((fake / "own").read_text().split()) == {"first"}
    assert re.search(r"proved|trains the same network", done.stdout), "the sentence of the proof"
    assert {p.name for p in set(Path(os.environ["TMPDIR"]).iterdir()) - before} == set()


def test_an_interpreter_is_written_behind_its_host_or_by_the_names_of_hosts() -> None:
    assert apportion.ssh("first=/a/python", "second:4").parsed()[0].python == "/a/python"
    launcher = apportion.ssh("first", "second:4", python={"second": "/b/python"})
    assert [host.python for host in launcher.parsed()] == [None, "/b/python"]
    with pytest.raises(ValueError, match=r"python=.*'third'"):
        apportion.ssh("first", python={"third": "/b/python"})
