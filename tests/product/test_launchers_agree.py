"""A verb answers alike whichever launcher has started its ranks: the same sentences and tables, except for hosts and
measured figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SECONDS = 100.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
VERBS = """
import json, os, pathlib, sys, torch, apportion
from torch import nn

def rows():
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))

workload = apportion.Workload(
    model=lambda: nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)), data=rows, batch_size=24, steps=12,
    loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), seed=3)

def check(launcher):
    return apportion.check("verbs.py:workload", "data_parallel", steps=3, launcher=launcher).to_json()

def compare(launcher):
    rows = apportion.compare(
        "verbs.py:workload", ["data_parallel", "map_reduce"], steps=5, launcher=launcher, path=f"{out}.rows")
    return [row.to_json() for row in rows]

def plan(launcher):
    where = {"workers": 2} if started_by == "local" else {"launcher": launcher}
    made = apportion.plan("verbs.py:workload", trial=False, **where)
    return {**made.to_json(), "refused": {str(p.strategy): p.refusal for p in made.candidates if p.refusal}}

def train(launcher):
    events = list(apportion.run("verbs.py:workload", "data_parallel", launcher=launcher, run_dir=f"{out}.run"))
    return [[event.kind, event.step, event.data] for event in events if event.kind not in ("speed", "drift", "proof")]

def choose(launcher):
    events = apportion.run("verbs.py:workload", launcher=launcher, run_dir=f"{out}.run")
    return [[event.kind, event.step, event.data] for event in events if event.kind in ("plan", "start", "end")]

if __name__ == "__main__":
    verb, started_by = sys.argv[1:]
    out = started_by
    answer = globals()[verb]({
        "local": lambda: apportion.local(workers=2, threads=1, device="cpu"),
        "torchrun": apportion.env,
        "ssh": lambda: apportion.ssh("one", "two", workers=1),
        "ray": lambda: apportion.ray(workers=1, python=os.path.abspath("python")),
    }[started_by]())
    if os.environ.get("RANK", "0") == "0":
        pathlib.Path(f"{out}.json").write_text(json.dumps(answer, default=str))
"""


SSH = """#!/bin/sh
for word; do last=$word; done
exec sh -c "$last"
"""
"""A stand-in for ssh, which runs the agents of other hosts on this one."""
OTHERS = [
    "torchrun",
    pytest.param("ssh", marks=pytest.mark.slow),
    pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(400)]),
]


SEVERAL_HOSTS = ("ssh", "ray")


def started(program: list[str], verb: str, launcher: str, folder: Path) -> Any:
    """What the verb returns in a program that is started like this, in a folder with verbs.py."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*program, "verbs.py", verb, launcher],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / f"{launcher}.json").read_text())


def on_ray(verb: str, folder: Path) -> Any:
    """What it returns on the two nodes of a Ray cluster."""
    import ray_cluster

    why = ray_cluster.cannot()
    if why is not None:
        pytest.skip(why)
    ray_cluster.write_project(folder)
    (folder / "cluster").mkdir()
    with ray_cluster.ray_cluster(folder / "cluster") as cluster:
        process = cluster.start([sys.executable, "verbs.py", verb, "ray"], folder, OMP_NUM_THREADS="1")
        try:
            _, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        assert process.returncode == 0, errors
    return json.loads((folder / "ray.json").read_text())


@pytest.fixture
def answers(tmp_path: Path) -> Any:
    """``answers("check", "ssh")`` is what the verb returns on local processes and on those that ssh starts."""
    (tmp_path / "verbs.py").write_text(VERBS)
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)

    def ask(verb: str, other: str) -> list[Any]:
        local = started([sys.executable], verb, "local", tmp_path)
        if other == "ray":
            return [local, on_ray(verb, tmp_path)]
        return [local, started(TORCHRUN if other == "torchrun" else [sys.executable], verb, other, tmp_path)]

    return ask


def without_figures(answer: Any) -> Any:
    """The answer with each number, and each name of a launcher, replaced by a mark."""
    if isinstance(answer, dict):
        return {key: without_figures(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [without_figures(value) for value in answer]
    if isinstance(answer, str):
        text = re.sub(r"\b(local|ssh|ray)\((\([^()]*\)|[^()])*\)|\benv\b", "LAUNCHER", answer)
        return re.sub(r"\d[\d,]*(\.\d+)?(e[-+]\d+)?", "#", text)
    return "#" if isinstance(answer, int | float) and not isinstance(answer, bool) else answer


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.thorough
def test_a_proof_says_the_same(answers: Any, other: str) -> None:
    local, launched = answers("check", other)
    assert local["rounds"]
    if other in SEVERAL_HOSTS:
        assert local.pop("uncompared") == []
        assert launched.pop("uncompared") == ["what it predicts (the ranks are on several hosts)"]
    assert without_figures(local) == without_figures(launched)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.thorough
def test_a_comparison_has_the_same_rows_and_columns(answers: Any, other: str) -> None:
    local, launched = ({row["strategy"]: row for row in rows} for rows in answers("compare", other))
    assert set(local) == {"single_device", "data_parallel", "map_reduce"}
    if other in SEVERAL_HOSTS:  # whose links are not measured for a comparison
        for row in launched.values():
            assert row.pop("predicted_seconds") is None
            assert row.pop("error") is None
        for row in local.values():
            del row["predicted_seconds"], row["error"]
    assert without_figures(local) == without_figures(launched)
    assert {name: row["workers"] for name, row in local.items()} == {
        name: row["workers"] for name, row in launched.items()
    }


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.slow
def test_a_plan_has_the_same_candidates_and_refuses_the_same_for_the_same_reasons(answers: Any, other: str) -> None:
    local, launched = answers("plan", other)
    assert local["refused"]
    local["refused"].pop("single_device")  # two workers were asked for; of running ranks one alone is looked at too
    assert local["workload"] == launched["workload"]
    assert local.keys() == launched.keys()
    networks = [
        name for name in local["refused"] if name != "single_device"
    ]  # of one worker, of which plan has none here
    assert {n: without_figures(local["refused"][n]) for n in networks} == {
        n: without_figures(launched["refused"][n]) for n in networks
    }


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.thorough
def test_a_training_has_the_same_events_and_the_same_proof(answers: Any, other: str) -> None:
    local, launched = answers("train", other)
    assert [(kind, step) for kind, step, _ in local if kind in ("start", "end")] == [
        (kind, step) for kind, step, _ in launched if kind in ("start", "end")
    ]
    starts = [next(data for kind, _, data in events if kind == "start") for events in (local, launched)]
    assert starts[0].keys() == starts[1].keys()
    assert starts[0]["proof"]["verdict"] == starts[1]["proof"]["verdict"] == "equal"
    ends = [next(data for kind, _, data in events if kind == "end") for events in (local, launched)]
    assert without_figures(ends[0]["metrics"]) == without_figures(ends[1]["metrics"])


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.slow
def test_a_choice_of_a_strategy_is_described_by_the_same_fields(answers: Any, other: str) -> None:
    local, launched = answers("choose", other)
    plans = [next((data for kind, _, data in events if kind == "plan"), None) for events in (local, launched)]
    assert launched[0][0] == "plan"
    if plans[0] is not None:  # two workers of a launcher leave nothing to choose
        assert plans[0].keys() == plans[1].keys()
    assert [kind for kind, *_ in local if kind != "plan"] == [kind for kind, *_ in launched if kind != "plan"]
