"""Two processes on two hosts that were not given the same run: within seconds both are told what differs, and nothing
trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import SECONDS

pytestmark = [pytest.mark.processes, pytest.mark.serial]

WITHIN = 5.0
CASES = {
    "learning rate": "optimizer lr=0.01",
    "momentum": "optimizer momentum=0.8",
    "seed": "seed=1",
    "data": "of example ",
    "length": "examples=62",
    "strategy": "strategy=map_reduce",
    "steps": "steps=29",
    "resume": "resume=True",
    "torch": "torch=9.9.9",
    "batch size": "batch_size=15",
    "precision": "precision=bfloat16",
    "width": "parameters=189",
    "loss": "sum of squares after the first update=",
    "policy": "checkpoint_every='5 steps'",
}
"""What rank 1 is given otherwise, and how that is named."""
SCRIPT = """
import json
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion

torch.set_num_threads(1)
version = torch.__version__


def given(case):
    def network():
        width = 17 if case == "width" else 16
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    def rows():
        seed, count = int(case == "data"), 62 if case == "length" else 61
        x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x, (x.sum(1) > 0).long())

    def sgd(parameters):
        lr, momentum = 0.01 if case == "learning rate" else 0.1, 0.8 if case == "momentum" else 0.9
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum)

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1 if case == "loss" else 0.0)

    return apportion.Workload(
        model=network, data=rows, loss=loss, optimizer=sgd, batch_size=15 if case == "batch size" else 16,
        steps=29 if case == "steps" else 30, seed=int(case == "seed"),
        precision="bfloat16" if case == "precision" else "float32",
    )


rank, told = int(os.environ["RANK"]), {}
for case in json.loads(sys.argv[1]):
    mine = case if rank else ""
    torch.__version__ = "9.9.9" if mine == "torch" else version
    options = {"policy": apportion.Policy(checkpoint_every="5 steps")} if mine == "policy" else {}
    began = time.monotonic()
    try:
        apportion.train(
            given(mine), "map_reduce" if mine == "strategy" else "data_parallel", launcher=apportion.env(device="cpu"),
            run_dir="run", resume=mine == "resume", **options,
        )
    except ValueError as error:
        told[case] = [began, time.monotonic(), str(error)]
with open(f"told-{rank}.json", "w") as file:
    json.dump(told, file)
"""


def told_on_two_hosts(folder: Path, cases: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What both ranks are told, by case: when they called ``train``, when it raised, and what."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "lib"))
    import hosts as module

    why = module.cannot()
    if why is not None:
        pytest.skip(why)
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    with module.two_hosts() as made:
        port, started = made.port(), []
        for rank, name in enumerate("ab"):
            named = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]
            command = made.command(rank, [*named, sys.executable, "script.py", json.dumps(list(cases))])
            environment = {**os.environ, **made.environment(rank, 2, port)}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            started.append(subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes))  # type: ignore[call-overload]
        try:
            said = [process.communicate(timeout=SECONDS)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert [process.returncode for process in started] == [0, 0], said
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in (0, 1)]


def assert_refused(case: str, told: Sequence[dict[str, Any]], folder: Path) -> float:
    """Both ranks have refused this case with the same words; returns the seconds from when the second of them asked to
    train until both were told."""
    (began, ended, said), (also_began, also_ended, also_said) = told[0][case], told[1][case]
    assert said == also_said
    assert re.search(r"rank 1 on host b has .* where rank 0 on host a has ", said), said
    assert CASES[case] in said
    assert not (folder / "run").exists(), "nothing was trained"
    return max(ended, also_ended) - max(began, also_began)


@pytest.mark.slow
def test_whatever_two_hosts_were_given_otherwise_is_named_on_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = told_on_two_hosts(tmp_path, list(CASES), monkeypatch)
    seconds = {case: assert_refused(case, told, tmp_path) for case in CASES}
    with capsys.disabled():
        print("\nseconds to a refusal: " + ", ".join(f"{case} {s:.2f}" for case, s in seconds.items()))
    assert max(seconds.values()) < WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_that_have_just_been_started_are_told_within_five_seconds(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = assert_refused(case, told_on_two_hosts(tmp_path, [case], monkeypatch), tmp_path)
    with capsys.disabled():
        print(f"\n{case}: refused after {seconds:.2f} s")
    assert seconds < WITHIN
