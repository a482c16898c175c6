"""The plan of a network that plays, on this machine: what is measured, and what it costs a workload that does not."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import networks
import played
import pytest
from ranks import by_value

import apportion
from apportion.cost_model.cluster import Cluster, Device, Link, Rate
from apportion.profiler import measure_cluster, measure_workload
from apportion.profiler.discover import discover

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine, of which two cores are told to be known: nothing is measured of it, and of workloads little."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.import_module("apportion.api.plan"), "ROLLOUT_SECONDS", 2.0)
    monkeypatch.setitem(measure_workload.profile.__kwdefaults__, "seconds", 0.5)
    own = next(d for d in discover().devices if d.kind == "cpu")
    rates = tuple(Rate(threads=1, together=n, flops=1e10, bytes_per_second=1e10) for n in (1, 2))
    cores = Device(name="a/cpu", host="a", kind="cpu", model=own.model, memory_bytes=1 << 32, rates=rates, cores=2)
    memory = Link(kind="memory", devices=("a/cpu",), latency=1e-5, bandwidth=1e9)
    measure_cluster.write_cached(Cluster(name="a", devices=(cores,), links=(memory,), measured=True), 1e9)
    with by_value(played), by_value(networks):
        yield


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the orders that workers were given."""
    asked = list[str]()
    ask = measure_workload._Measuring._ask

    def noted(self: Any, order: Mapping[str, Any]) -> Any:
        asked.append(order["kind"])
        return ask(self, order)

    monkeypatch.setattr(measure_workload._Measuring, "_ask", noted)
    return asked


@pytest.mark.thorough
def test_frames_a_second_of_other_rollouts_are_predicted_by_every_strategy(orders: list[str], tmp_path: Path) -> None:
    plan = apportion.plan(played.workload(), trial=False)
    assert {"play", "learn"} <= {*orders}
    sizes = {(r.environments, r.steps) for r in plan.rollouts}
    assert {(1, 6), (4, 6)} <= sizes, "as many as there is time for on a machine that may be busy"
    for size in sizes:
        told = {(r.strategy, r.workers) for r in plan.rollouts if (r.environments, r.steps) == size}
        several = {(name, 2) for name in ("data_parallel", "parameter_server", "hogwild")}
        assert told <= {("single_device", 1), *several}
        assert told == {("single_device", 1), *several} or size not in ((1, 6), (4, 6))
    assert all(r.frames_per_second > 0 and r.environment_seconds > 0 for r in plan.rollouts)
    assert [r.own for r in plan.rollouts] == [(r.environments, r.steps) == (4, 6) for r in plan.rollouts]
    for r in plan.rollouts:
        assert r.frames_per_second == pytest.approx(r.workers / r.seconds)
    assert plan.rollouts_why[-1].startswith("these are frames a second and not scores")
    told = plan.to_json()
    assert json.loads(json.dumps(told))["rollouts"] == told["rollouts"]
    plan.profile.save(tmp_path / "profile.json")
    again = apportion.plan(network=tmp_path / "profile.json", cluster=plan.cluster)
    assert (again.rollouts, again.rollouts_why) == (plan.rollouts, plan.rollouts_why), (
        "the file holds what was measured"
    )


@pytest.mark.thorough
def test_nothing_more_is_measured_of_a_workload_whose_examples_are_given(orders: list[str]) -> None:
    plan = apportion.plan(networks.workload(networks.perceptron, networks.tabular(16, 10), 16), trial=False)
    assert (plan.rollouts, plan.rollouts_why, plan.profile.rollouts) == ((), (), None)
    assert "pass" in orders
    assert not {"play", "learn"} & {*orders}
