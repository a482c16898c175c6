"""A plan among ranks that run already: under torchrun's variables, on one host and on two, with real steps."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from click.testing import CliRunner
from commands import finish, places, start
from ranks import by_value, on_ranks

from apportion.cli.app import app
from apportion.comm.world import World
from apportion.planner.trials.launched_trials import LEAST_ROUNDS, MOST_ROUNDS, Bench, Taken

MEASURING = 8.0
"""Seconds that a slow cable needs for messages large enough to tell its bandwidth."""
WORK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion


def network():
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def examples():
    x = torch.randn(640, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


workload = apportion.Workload(
    model=network,
    data=examples,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    batch_size=16,
    steps=30,
)
"""
PLAN = """
import json
import sys

import apportion
from apportion.planner.launched_choice import plan_launched
from apportion.planner.plan_data import plan_data, plan_of

world = apportion.World.from_env(device="cpu")
try:
    how, measuring = sys.argv[1], float(sys.argv[2])
    plan = plan_launched("work.py:workload", world, trial=how == "trial", seconds=1.0, measuring=measuring)
    told = None if plan is None else {**plan.to_json(), "devices": [d.name for d in plan.cluster.devices]}
    if plan is not None:
        assert plan_of(json.loads(json.dumps(plan_data(plan)))) == plan, "another process makes the same of its data"
        told["found"] = [[str(p.strategy), p.layout.ranks, len(p.layout.hosts)] for p in plan.found]
except ValueError as error:
    told = {"refused": str(error)}
finally:
    world.close()
with open(f"plan-{world.rank}.json", "w") as file:
    json.dump(told, file)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the workload is, and where everything runs."""
    for name, text in (("work.py", WORK), ("plan.py", PLAN)):
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def planned(
    environments: Sequence[Mapping[str, str]], how: str, prefixes: Sequence[Sequence[str]] = (), measuring: float = 0.8
) -> list[Any]:
    """What each rank was told."""
    finish(
        [
            start(
                [*(prefixes[rank] if prefixes else ()), sys.executable, "plan.py", how, str(measuring)], **environment
            )
            for rank, environment in enumerate(environments)
        ]
    )
    return [json.loads(Path(f"plan-{rank}.json").read_text()) for rank in range(len(environments))]


def by_strategy(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["strategy"]: c for c in plan["candidates"]}


# Plans


@pytest.mark.processes
@pytest.mark.thorough
def test_the_ranks_of_one_host_try_the_best_few_and_the_first_is_told(folder: Path) -> None:
    first, second = planned(places(2), "trial")
    assert second is None
    assert len(first["devices"]) == 1
    assert {ranks for _, ranks, _ in first["found"]} == {1, 2}
    known = by_strategy(first)
    for names in (("single_device", "single_device(fused=True)"), ("data_parallel",)):
        found = [known[name] for name in names if known[name]["measured"]]
        assert found, f"one of {names} is always tried"
        for one in found:
            measured = one["measured"]
            assert measured["steps"] >= LEAST_ROUNDS
            assert measured["low"] <= one["step_seconds"] == measured["step_seconds"] <= measured["high"]
    tried = [c for c in first["candidates"] if c["measured"]]
    assert first["measured"]
    assert first["exact"]
    assert first["step_seconds"] <= 1.2 * min(c["step_seconds"] for c in tried if c["exact"])
    refused = [c for c in first["candidates"] if c["refused"]]
    assert refused
    assert all(c["step_seconds"] is None for c in refused)
    assert first["workload"] == "work.py:workload"
    assert "work.py:workload" in first["commands"]["torchrun"]


@pytest.mark.processes
@pytest.mark.thorough
def test_ranks_on_hosts_of_their_own_plan_for_where_they_are(folder: Path) -> None:
    """Each host has cores for both of them: that is no place of theirs, and nothing is said of it."""
    first, second = planned(places(1, 1), "predict")
    assert second is None
    assert len(first["devices"]) == 2
    assert {(ranks, hosts) for _, ranks, hosts in first["found"]} == {(1, 1), (2, 2)}
    assert not any(c["measured"] for c in first["candidates"])
    known = by_strategy(first)
    assert known["data_parallel"]["launcher"] == "env"
    assert "do not share memory" in known["hogwild"]["refused"]


@pytest.mark.processes
@pytest.mark.thorough
def test_ranks_that_lie_unevenly_are_refused_at_once_and_on_all_of_them(folder: Path) -> None:
    told = planned(places(2, 1), "predict")
    assert told[0] == told[1] == told[2]
    assert told[0]["refused"].startswith("3 ranks on 2 hosts, 2 and 1 of them: a plan is for as many on every host")


@pytest.mark.processes
@pytest.mark.thorough
def test_what_no_rank_can_run_is_refused_on_all_of_them(folder: Path) -> None:
    text = (folder / "work.py").read_text().replace("nn.functional.cross_entropy", "lambda y, t: y")
    (folder / "work.py").write_text(text)
    told = planned(places(2), "predict")
    assert told[0] == told[1]
    assert "must be one number" in told[0]["refused"]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that makes two; skipped where there can be none."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "lib"))
    import hosts as module

    why = module.cannot()
    if why is not None:
        pytest.skip(why)
    return module


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.processes
def test_two_hosts_on_a_slow_cable_are_told_that_one_is_faster(folder: Path, hosts: Any) -> None:
    """300,000 weights of 4 bytes go each way at 100 Mb/s, longer than the whole step takes one core."""
    rate = 1e8
    sent = 4 * (64 * 512 + 512 * 512) * 8 / rate
    for _ in range(2):  # a machine that is busy meanwhile measures the cable by its smallest messages
        with hosts.two_hosts(rate) as made:
            environments = [made.environment(rank, 2, 29611) for rank in range(2)]
            first, second = planned(environments, "trial", [made.command(rank, []) for rank in range(2)], MEASURING)
        assert second is None
        assert {(ranks, hosts_) for _, ranks, hosts_ in first["found"]} == {(1, 1), (2, 2)}
        both = by_strategy(first)["data_parallel"]
        assert first["strategy"].startswith("single_device")
        assert "do not distribute: one process is fastest" in first["because"]
        assert both["measured"]["step_seconds"] > 0.8 * sent
        if both["terms"]["communicating"] > 0.4 * sent:
            break
    else:
        pytest.fail(f"as priced, twice: {both['terms']}")
    assert "--nnodes=2" not in first["commands"]["torchrun"], "one host does it"


# Steps in ranks that run


def tried(world: World) -> Any:
    bench = Bench(networks.cases["mlp"](16), world)
    before = torch.get_num_threads()
    choices = [("single_device", 1), ("data_parallel", 2), ("data_parallel(of=pipeline_parallel, replicas=3)", 1)]
    built = [bench.build(choice) for choice in choices]
    again = bench.build(choices[2]), bench.build(choices[0])
    taken = bench.measure(choices, 0.3)
    assert bench.measure(choices[:1], 0.3) == taken, "one alone has nobody to be compared with"
    more = bench.measure(choices[:2], 0.3)
    assert all(more[choice].steps - taken[choice].steps >= LEAST_ROUNDS for choice in taken)
    assert all(more[choice].rounds[: len(taken[choice].rounds)] == taken[choice].rounds for choice in taken)
    bench.close()
    same = torch.get_num_threads() == before
    return built, again, {c: (t.rounds, t.steps) for c, t in taken.items()}, bench.refused, same


@pytest.mark.processes
@pytest.mark.thorough
def test_ranks_make_the_steps_of_each_in_turns_and_all_of_them_know_what_they_took() -> None:
    with by_value(networks):
        first, second = on_ranks(tried, 2)
    assert first == second
    built, again, taken, refused, same_threads = first
    assert built == [True, True, False]
    assert again == (False, True), "once is enough"
    assert list(taken) == [("single_device", 1), ("data_parallel", 2)]
    for rounds, steps in taken.values():
        assert LEAST_ROUNDS <= len(rounds) <= MOST_ROUNDS
        assert min(rounds) > 0
        assert steps % len(rounds) == 0
    (why,) = refused.values()
    assert "cannot share 2 workers" in why
    assert same_threads


def test_a_median_has_a_quarter_of_the_rounds_on_either_side() -> None:
    assert Taken(rounds=(4.0, 1.0, 3.0, 2.0, 5.0), steps=5).quartiles == (2.0, 3.0, 4.0)


# The command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--launcher", "env"), "needs a workload (FILE:NAME)"),
        (("work.py:workload", "--launcher", "local"), "plan looks at every layout of this machine by itself"),
        (
            ("work.py:workload", "--launcher", "env", "--workers", "2"),
            "of these settings, --no-trial alone goes with it",
        ),
        (("work.py:workload", "--launcher", "env", "--remeasure"), "of these settings, --no-trial alone goes with it"),
        (
            ("work.py:workload", "--launcher", "env", "--allow-approximate"),
            "of these settings, --no-trial alone goes with it",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_go_with_ranks_that_run_is_refused(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_one_process_that_nothing_has_started_others_beside_is_told_how_to_start_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["plan", "work.py:workload", "--launcher", "env"])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "here is one alone: start torchrun --nproc-per-node=2 --no-python apportion plan work.py:workload" in said
