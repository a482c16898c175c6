"""Actor-critics under every strategy that can train them: the same network as one process, or the same as logged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import played
import pytest
import torch
from ranks import by_value, on_ranks

import apportion
from apportion import State, Workload
from apportion.comm.world import World
from apportion.core.strategy import batches
from apportion.core.value import parse

pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]
EXACT = 1e-10


def checked(name: str, strategy: str, workers: int) -> Any:
    with by_value(played):
        return apportion.check(played.workload(**played.cases[name]), strategy, workers=workers, steps=8)


@pytest.mark.parametrize("name", played.cases)
@pytest.mark.parametrize("strategy", ["data_parallel", 'parameter_server(mode="ordered")', "map_reduce"])
def test_two_workers_train_the_network_of_one_process(name: str, strategy: str) -> None:
    if strategy == "map_reduce" and "normalised" in name:
        with pytest.raises(ValueError, match="the buffer observation_statistics.count takes in what the rows"):
            checked(name, strategy, 2)
        return
    proof = checked(name, strategy, 2)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT


@pytest.mark.parametrize("strategy", ["single_device", "data_parallel", 'parameter_server(mode="ordered")', "hogwild"])
def test_one_worker_trains_the_network_of_one_process(strategy: str) -> None:
    proof = checked("plain", strategy, 1)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT


@pytest.mark.parametrize("name", ["plain", "normalised", "recurrent"])
def test_a_logged_asynchronous_run_is_replayed_to_the_bit(name: str) -> None:
    proof = checked(name, "parameter_server", 2)
    assert proof.holds
    assert all(one.worst.absolute == 0.0 for one in proof.rounds)


@pytest.mark.parametrize("strategy", ["fully_sharded", "pipeline_parallel", "tensor_parallel", "layer_placement"])
def test_a_strategy_without_a_whole_network_on_a_worker_refuses_to_act(strategy: str) -> None:
    with by_value(played), pytest.raises(ValueError, match="cannot train on what its network does"):
        apportion.check(played.workload(), strategy, workers=2, steps=2)


def trained(world: World, strategy: Any, workload: Workload) -> State:
    step = strategy.build(workload, world)
    for batch in batches(step):
        step(batch)
    world.group().barrier()
    return step.state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["data_parallel", 'parameter_server(mode="ordered")'])
def test_it_gives_the_same_bits_twice(strategy: str) -> None:
    value = parse(strategy, "apportion.strategies")
    with by_value(played):
        one, other = (on_ranks(trained, 2, value, played.workload(normalise_observations=True))[0] for _ in range(2))
    assert one.step == 20
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one.tensors(), other.tensors(), strict=True))


def test_hogwild_makes_every_update_once() -> None:
    with by_value(played):
        states = on_ranks(trained, 2, parse("hogwild", "apportion.strategies"), played.workload())
    assert {state.step for state in states} == {20}
    assert all(t.isfinite().all() for state in states for t in state.model.values())


def test_loaders_are_refused() -> None:
    step = apportion.single_device().build(played.workload(), World())
    with pytest.raises(ValueError, match="loaders=2: the network makes these examples"):
        next(batches(step, loaders=2))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"frames": 0}, "frames=0 must be a whole number of at least 1"),
        ({"gamma": 1.5}, "gamma=1.5 must be from 0 to 1"),
        ({"environment": "NoSuchGame-v7"}, "environment='NoSuchGame-v7': gymnasium has none of that id"),
        ({"environment": 7}, "environment=7 must be the id of an environment, or a function that makes it"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        played.workload(**changes)


def test_it_learns() -> None:
    """The score of greedy episodes rises from that of a network that knows nothing."""
    workload = played.workload(frames=60_000, environments=16, actors=1, entropy=0.0)
    step = apportion.single_device().build(replace(workload, seed=1), World())
    told = []
    for batch in batches(step):
        step(batch)
        if step.done in (5, step.source.total - 100, step.source.total):
            told.append(step.source.dataset.told()["score"])  # type: ignore[attr-defined]
    assert told[-1] > told[0] + 0.5
