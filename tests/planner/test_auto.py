"""What a run takes where no strategy is given: what is kept of a decision, and what is tried without predictions."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import networks
import pytest
import torch
from conftest import Within
from ranks import by_value
from torch import nn

from apportion.core.event import Event
from apportion.core.workload import Workload
from apportion.planner import auto
from apportion.planner.auto import decide
from apportion.planner.predict import offered
from apportion.reporting.progress.plain_lines import plan_line
from apportion.runtime.launch.local import Local
from apportion.strategies.single_device import SingleDevice

MARK = {"batch_size": 64, "parameters": {"elements": 10}, "batch": [[[64, 3], "torch.float32"]]}
PLAN = {"told": {}, "expected": None, "a_step": 0.1, "measured_for": 2.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


# What is kept


def test_a_plan_is_found_again_for_the_same_workload_asked_for_in_the_same_way() -> None:
    key = auto.decision_key(MARK, {"launcher": "local"})
    assert auto.load_decision(key) is None
    auto.save_decision(key, PLAN)
    assert auto.load_decision(auto.decision_key(dict(MARK), {"launcher": "local"})) == PLAN
    for other in ({**MARK, "batch_size": 32}, {**MARK, "batch": [[[64, 4], "torch.float32"]]}):
        assert auto.load_decision(auto.decision_key(other, {"launcher": "local"})) is None
    assert auto.load_decision(auto.decision_key(MARK, {"launcher": "local(threads=1)"})) is None


def test_a_plan_that_cannot_be_kept_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    there = auto.decisions_folder() / "x.json"
    there.mkdir(parents=True)  # nothing can be put in its place
    auto.save_decision("x", PLAN)
    assert list(auto.decisions_folder().iterdir()) == [there]


def test_another_machine_or_another_torch_has_plans_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = auto.decision_key(MARK, {})
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert auto.decision_key(MARK, {}) != here


@pytest.mark.parametrize("text", ["", "{", "[]", '{"told": {}}'])
def test_what_is_damaged_counts_as_nothing(text: str) -> None:
    key = auto.decision_key(MARK, {})
    auto.save_decision(key, PLAN)
    (auto.decisions_folder() / f"{key}.json").write_text(text)
    assert auto.load_decision(key) is None


def test_where_nothing_can_be_kept_nothing_is(cache: Path) -> None:
    cache.write_text("a file")
    auto.save_decision("name", PLAN)
    assert auto.load_decision("name") is None


# What is tried


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_one_process_with_all_threads_is_always_offered_first_unless_workers_are_asked_for(workers: int | None) -> None:
    offers = list(map(str, offered(Local(workers=workers, threads=2, device="cpu"))))
    if workers is None:
        assert offers[0] == 'single_device on local(workers=1, threads=2, device="cpu")'.replace('"', "'")
        assert any(o.startswith("single_device(fused=True) on ") for o in offers)
        assert "single_device on local(workers=1, threads=1, device='cpu')" in offers
    else:
        name = "single_device" if workers == 1 else "data_parallel"
        assert offers == [f"{name} on local(workers={workers}, threads=2, device='cpu')"]


class Rests(nn.Linear):
    """A step takes long enough for a run to be long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.004)
        return super().forward(x)


def resting() -> Workload:
    return replace(networks.cases["mlp"](64), model=lambda: Rests(10, 3))


@pytest.mark.processes
@pytest.mark.thorough
def test_a_short_run_takes_one_process_and_a_long_one_what_is_found() -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        short = decide(resting(), {"steps": 100}, Local())
        long = decide(resting(), {"steps": 3_000}, Local())
        again = decide(resting(), {"steps": 2_900}, Local())
        (kept,) = auto.decisions_folder().glob("*.json")
        kept.write_text(json.dumps({**json.loads(kept.read_text()), "measured_for": 1.0}))
        longer = decide(resting(), {"steps": 90_000}, Local())
    assert short.chosen.strategy == SingleDevice()
    assert short.plan is not None
    assert "too short" in short.plan["why"]
    assert short.plan["candidates"] == []
    assert long.plan is not None
    assert len([c for c in long.plan["candidates"] if c["step_seconds"]]) >= 2
    assert long.expected is not None
    assert long.expected.measured
    assert sum(long.expected.terms.values()) == pytest.approx(long.expected.step_seconds)
    assert again.plan is not None
    assert (again.plan["remembered"], again.chosen) == (True, long.chosen)
    assert again.expected == long.expected
    assert longer.plan is not None
    assert longer.plan["remembered"] is False, "what one second found is not enough for ten"


class Heavy(Rests):
    """A process takes half a second to start, and a step a tenth."""

    def __init__(self, *sides: int) -> None:
        import time

        super().__init__(*sides)
        time.sleep(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.1)
        return super().forward(x)


@pytest.mark.processes
@pytest.mark.serial
@pytest.mark.parametrize(
    ("steps", "priced", "tried"),
    [
        pytest.param(60, False, False, id="one process"),
        pytest.param(400, False, False, id="no time for trials and a proof"),
        pytest.param(2_400, False, True, id="trials"),
        pytest.param(100_000, True, True, id="prices and trials", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.thorough
def test_prices_and_trials_are_left_out_where_they_would_not_leave_time_for_a_proof(
    steps: int, priced: bool, tried: bool, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(auto, "predicted", lambda *a, **_: asked.append(a[2]) or [])
    heavy = replace(networks.cases["mlp"](64), model=lambda: Heavy(10, 3))
    # The first decision of a process starts what workers are forked from, and has seconds less for everything else.
    with by_value(networks), by_value(sys.modules[__name__]):
        decide(replace(heavy, model=lambda: networks.cases["mlp"](64).model()), {"steps": 1}, Local())
    with within(30.0, "the decision"), by_value(networks), by_value(sys.modules[__name__]):
        told = decide(heavy, {"steps": steps}, Local()).plan
    assert told is not None
    assert bool(asked) == priced
    assert bool([c for c in told["candidates"] if c["step_seconds"]]) == tried


# What is told


def test_the_line_of_a_plan_says_what_was_taken_and_what_the_others_took() -> None:
    def told(strategy: str, seconds: float | None = None, refused: str | None = None) -> dict[str, object]:
        return {"strategy": strategy, "launcher": "local", "step_seconds": seconds, "refused": refused}

    candidates = [told("a", 0.001), told("b", 0.002), told("c"), told("d", refused="it cannot")]
    data = {"strategy": "a", "launcher": "local", "why": "the fastest, 1 ms a step", "candidates": candidates}
    line = plan_line(Event(kind="plan", step=0, epoch=0.0, seconds=0.0, data=data))
    assert line == "a on local: the fastest, 1 ms a step (b on local: 2 ms; d on local: it cannot)"
