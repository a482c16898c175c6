"""parameter_server where no memory holds the shards: servers and workers that are joined by connections alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
from commands import finish, places, start
from launched_runs import MINE
from ranks import apart, by_value, on_ranks

from apportion import Workload
from apportion.comm.world import World
from apportion.core.strategy import State, batches
from apportion.parallel.parameter_store.push_log import PushLog
from apportion.strategies.parameter_server import ParameterServer

pytestmark = pytest.mark.processes

EXACT = 1e-10


def trained(world: World, strategy: ParameterServer, workload: Workload) -> tuple[list[State], PushLog | None, float]:
    """What rank 0 has at the end, with the log; in ordered mode what every rank has after each update."""
    own = apart()
    step = strategy.build(workload, own)
    states: list[State] = []
    log, stale = None, 0.0
    try:
        if step.data_shard is None:
            step.serve()
            return states, None, 0.0
        for batch in batches(step):
            values = step(batch)
            stale = max(stale, float(values["staleness"]))
            if step.lockstep:
                states.append(step.state_dict())
        if own.rank == 0 and not step.lockstep:
            states.append(step.state_dict())
            (log,) = step.log()
    finally:
        if step.lockstep:
            own.group().barrier()
        step.close()
        own.close()
    return states, log, stale


def assert_same(found: State, expected: State, bound: float = EXACT) -> None:
    left, right = dict(found.tensors()), dict(expected.tensors())
    assert left.keys() == right.keys()
    assert found.step == expected.step
    for name, tensor in right.items():
        assert (left[name].double() - tensor.double()).abs().max() <= bound, name


@pytest.mark.parametrize(
    ("name", "workers", "options"),
    [
        ("adam", 2, {"servers": 1}),
        ("batch_norm_2d", 2, {"servers": 2, "push_every": 2}),
        ("mlp", 3, {"servers": 2, "copies": 1}),
        ("one_cycle", 2, {"servers": 2, "max_staleness": 1, "pull_every": 3}),
        ("frozen_and_unused_parameters", 2, {"servers": 2, "rule": "adagrad(lr=0.01)"}),
    ],
)
def test_a_run_is_done_again_from_its_log_to_the_bit(name: str, workers: int, options: dict[str, Any]) -> None:
    strategy = ParameterServer(**options)
    workload = replace(networks.cases[name](61), steps=24, epochs=None)
    with by_value(networks):
        (states, log, _), *_ = on_ranks(trained, workers + strategy.servers, strategy, workload)
    (found,) = states
    assert found.step == 24
    assert log is not None
    assert sorted(batch for pushed in log.pushes() for batch, _ in pushed.batches) == list(range(24))
    (expected,) = strategy.reference(workload, workers, (log,))
    assert_same(found, expected, 0.0)


@pytest.mark.parametrize(
    ("name", "workers", "options"),
    [("adam", 2, {"servers": 1}), ("batch_norm_2d", 3, {"servers": 2}), ("one_cycle", 2, {"servers": 2, "copies": 1})],
)
def test_pushes_in_rank_order_give_what_is_defined(name: str, workers: int, options: dict[str, Any]) -> None:
    strategy = ParameterServer(mode="ordered", **options)
    workload = replace(networks.cases[name](61), steps=10, epochs=None)
    expected = list(strategy.reference(workload, workers))
    with by_value(networks):
        for states, _, _ in on_ranks(trained, workers + strategy.servers, strategy, workload):
            assert len(states) == len(expected) == 10
            for found, wanted in zip(states, expected, strict=True):
                assert_same(found, wanted)


def test_without_servers_it_is_refused_with_the_cure() -> None:
    def build(world: World, strategy: ParameterServer, workload: Workload) -> str:
        own = apart()
        try:
            strategy.build(workload, own)
        except ValueError as error:
            return str(error)
        finally:
            own.close()
        return ""

    with by_value(networks):
        for said in on_ranks(build, 2, ParameterServer(), networks.cases["mlp"](61)):
            assert "2 ranks run on several hosts: give parameter_server(servers=1)" in said


@pytest.mark.slow
def test_a_run_on_several_hosts_saves_and_outlives_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE.replace("loss=slow, steps=100_000", "loss=slow, steps=300"))
    command = [sys.executable, "-m", "apportion", "train", "mine.py:endless", "--launcher", "env", "--no-check"]
    command += ["--strategy", "parameter_server(servers=1)", "--run-dir", "run"]
    started = [start(command, **place) for place in places(1, 1, 1, 1)]
    events = Path("run", "events.jsonl")
    eventually(lambda: events.exists() and "staleness" in events.read_text(), within=100, what="the first step")
    started[1].kill()  # a worker: the last rank is the server
    started[1].communicate()
    said = finish([started[0], *started[2:]])
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert (told[-1]["kind"], told[-1]["data"]["reason"]) == ("end", "finished"), said[0]
    state = json.loads(Path("run", "checkpoints", "latest", "state.json").read_text())
    assert state["step"] == 300
    assert state["settings"]["unpushed"] == []
