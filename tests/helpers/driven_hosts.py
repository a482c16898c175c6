"""A run on several hosts that something happens to: its driver, what it tells, and the processes of its ranks.

The workload says the number of each rank's process when its optimizer is made, and the driver passes that on. (A
network may have been built in the process that a rank is forked from.)
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from ssh_hosts import SshHosts

import apportion
from apportion.comm.world import World
from apportion.core.address import load_workload

WORK = """
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion


def examples():
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def slow(outputs, targets):
    time.sleep(PAUSE)
    return nn.functional.cross_entropy(outputs, targets)


def network():
    layers = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(32, 2)
    return nn.Sequential(*layers)


def sgd(parameters):
    print("process", os.environ.get("RANK"), os.getpid(), flush=True)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


workload = apportion.Workload(
    model=network, data=examples, loss=slow, batch_size=16, epochs=None, steps=STEPS,
    optimizer=sgd, precision="float64",
)
"""
DRIVER = """
import json
import sys

import apportion
from apportion.core.value import parse

launcher, policy = parse(sys.argv[1], "apportion.runtime.launch"), apportion.Policy(**json.loads(sys.argv[2]))
if __name__ == "__main__":
    for event in apportion.run(
        "work.py:workload", sys.argv[4], launcher=launcher, check=False, run_dir=sys.argv[3], policy=policy,
        resume=sys.argv[5] == "resume",
    ):
        print(json.dumps({"kind": event.kind, "step": event.step, "data": dict(event.data)}), flush=True)
"""
SECONDS = 120.0
"""The seconds that a run may take in all."""


@dataclass
class DrivenRun:
    """A run that goes on, as this process sees it."""

    process: subprocess.Popen[str]
    steps: int
    told: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """The events, each with the time when it came."""
    said: list[str] = field(default_factory=list)
    """The lines on standard error."""
    pids: dict[str, dict[int, int]] = field(default_factory=dict)
    """The newest process of each rank, by its host and the rank that its slot began with."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def until(self, holds: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Waits until a condition on what was told holds."""
        with self.changed:
            assert self.changed.wait_for(lambda: holds() or self.process.poll() is not None, seconds), self.text()
        assert holds(), self.text()

    def until_step(self, step: int) -> None:
        """Waits until so many updates were told."""
        self.until(lambda: self.step >= step)

    def until_begun(self, ranks: int) -> None:
        """Waits until some steps were told, and every rank has said its process."""
        self.until_step(5)
        self.until(lambda: sum(map(len, self.pids.values())) == ranks)

    @property
    def step(self) -> int:
        return max((event["step"] for _, event in self.told if event["kind"] == "step"), default=0)

    def faults(self) -> list[dict[str, Any]]:
        """What was told of each fault, and its step."""
        return [{"step": e["step"], **e["data"]} for _, e in list(self.told) if e["kind"] == "fault"]

    def end(self, seconds: float = SECONDS) -> dict[str, Any]:
        """Waits for the end of the run, and returns its last event."""
        try:
            self.process.wait(seconds)
        finally:
            self.process.kill()
        self.until(lambda: bool(self.told) and self.told[-1][1]["kind"] == "end", 10)
        assert self.process.returncode == 0, self.text()
        return self.told[-1][1]

    def interrupt(self) -> int:
        """Ends the run as Ctrl-C does, and returns the step that it has saved."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)
        with self.changed:  # what it has printed may still be on its way
            self.changed.wait_for(lambda: self.told[-1][1]["kind"] == "end" or self._interrupted() is not None, 10)
        end = self.told[-1][1]
        if (saved := self._interrupted()) is not None:  # the signal was raised in the driver's own loop over the events
            return int(saved)
        assert end["data"]["reason"] == "interrupted", self.text()
        assert end["data"]["resume"] is not None, self.text()
        return int(end["step"])

    def _interrupted(self) -> str | None:
        """The step that the driver has said to have saved as it was interrupted."""
        found = (re.match(r"interrupted; step (\d+) is saved$", line) for line in list(self.said))
        return next((match[1] for match in found if match), None)

    def kill(self, host: str, rank: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Sends a signal to the process of a rank, and returns the seconds until the step after the one under way, for
        a signal that takes it out of the run."""
        self.until(lambda: rank in self.pids.get(host, {}))
        pid = self.pids[host][rank]
        began, before = time.monotonic(), self.step
        os.kill(pid, number)
        self.until(lambda: self.pids[host][rank] != pid and any(at > began for at, _ in self.told))
        self.until(lambda: self.step > before + 1)
        return next(at for at, e in self.told if e["kind"] == "step" and at > began and e["step"] > before + 1) - began

    def text(self) -> str:
        tail = [f"{event['kind']} {event['step']} {event['data']}" for _, event in self.told[-5:]]
        return "\n".join([*tail, *self.said[-40:]])

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                with self.changed:
                    self.told.append((time.monotonic(), json.loads(line)))
                    self.changed.notify_all()

    def _read_words(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            found = re.match(r"(\w+), rank \d+: process (\d+) (\d+)$", line)
            with self.changed:
                if found is None:
                    self.said.append(line.rstrip())
                else:
                    self.pids.setdefault(found[1], {})[int(found[2])] = int(found[3])
                self.changed.notify_all()


@contextmanager
def driven(  # noqa: PLR0913 (what a run is of)
    hosts: SshHosts,
    project: Path,
    *names: str,
    steps: int = 120,
    run_dir: str = "run",
    strategy: str = "data_parallel",
    resume: bool = False,
    host: str = "a",
    pause: float = 0.01,
    dropout: float = 0.3,
    work: str = WORK,
    loaders: int = 0,
    **policy: Any,
) -> Iterator[DrivenRun]:
    """A run on these hosts (``a:2``), whose driver runs on ``host``, in a folder of its own. ``pause``: the seconds
    that a step takes longer. ``work``: the workload's file, with the steps, the pause and the dropout to fill in."""
    work = work.replace("STEPS", str(steps)).replace("PAUSE", str(pause)).replace("DROPOUT", str(dropout))
    (project / "work.py").write_text(work)
    (project / "driver.py").write_text(DRIVER)
    launcher = str(hosts.launcher(*names, threads=1, loaders=loaders))
    words = [launcher, json.dumps(policy), run_dir, strategy, "resume" if resume else "begin"]
    command = hosts.command([sys.executable, "driver.py", *words], host, project)
    process = subprocess.Popen(
        command, cwd=project,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    run = DrivenRun(process, steps)
    readers = [threading.Thread(target=read, daemon=True) for read in (run._read_events, run._read_words)]
    for reader in readers:
        reader.start()
    try:
        yield run
    finally:
        process.kill()
        process.wait()
        for reader in readers:
            reader.join(10)
        for file in (process.stdout, process.stderr):
            assert file is not None
            file.close()


@contextmanager
def cut(hosts: SshHosts, name: str) -> Iterator[None]:
    """Lets nothing through the cable of a host, neither way, without a word to either end."""
    switch, end = hosts.made.cables[len(hosts.names) + hosts.names.index(name)]
    port = ["ip", "-n", switch, "link", "set", "dev", end]
    subprocess.run([*port, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run([*port, "up"], check=True)


def weights(project: Path, run_dir: str = "run") -> dict[str, torch.Tensor]:
    """The last weights of a run."""
    return dict(load_file(project / run_dir / "checkpoints" / "latest" / "model.safetensors"))


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each tensor that has not the same bits in both."""
    return {
        name: float((tensor.double() - other[name].double()).abs().max())
        for name, tensor in one.items()
        if not torch.equal(tensor, other[name])
    }


def one_device(project: Path, steps: int) -> dict[str, torch.Tensor]:
    """The weights that one process has after so many steps of the workload in a folder."""
    text = re.sub(r"time.sleep\(.*\)", "pass", (project / "work.py").read_text())
    (project / "alone.py").write_text(text)
    workload = load_workload(f"{project / 'alone.py'}:workload")
    step = apportion.single_device().build(replace(workload, steps=steps), World())
    for batch in apportion.batches(step):
        step(batch)
    return dict(step.state_dict().model)


def from_one_device(project: Path, steps: int, found: dict[str, torch.Tensor] | None = None) -> float:
    """How far the last weights of a run, or those given, are from those of one device after so many steps."""
    found, exact = weights(project) if found is None else found, one_device(project, steps)
    return max(float((found[name] - exact[name]).abs().max()) for name in exact)
