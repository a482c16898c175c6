"""Downpour SGD: what asynchronous workers have done can be done again, to the bit; in rank order it is a definition."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import planted
import pytest
import slots
import torch
from proofs import EXACT, assert_equal
from ranks import by_value, on_ranks
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.comm.world import World
from apportion.core.sampler import DataShard
from apportion.core.strategy import State, batches
from apportion.core.value import parse
from apportion.parallel.parameter_store.push_log import PushLog
from apportion.parallel.parameter_store.replay import replay
from apportion.parallel.replica.step import reference
from apportion.runtime.proof.proof import Proof
from apportion.strategies.parameter_server import ParameterServer
from apportion.strategies.single_device import SingleDevice

REFUSED = {
    "two_optimizers": "update=",
    "update_with_a_shard_without_loss_terms": "update=",
    "carried_state": "carry=",
    "few_lanes": "carry=",
}
ALWAYS = ("mlp", "batch_norm_2d", "adam", "clipped", "frozen_and_unused_parameters", "sparse_embeddings", "one_cycle")
pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]


def prove(workload: Workload, strategy: str, workers: int) -> Proof:
    with by_value(networks):
        return apportion.check(workload, strategy, workers=workers, steps=networks.STEPS)


def assert_same(found: State, expected: State, bound: float = 0.0) -> None:
    left, right = dict(found.tensors()), dict(expected.tensors())
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert (left[name].double() - tensor.double()).abs().max() <= bound, name


# In rank order


def ordered() -> list[object]:
    every = [(name, workers) for name in networks.cases if name not in REFUSED for workers in (1, 2, 3)]
    return [pytest.param(*at, marks=() if at[0] in ALWAYS else pytest.mark.slow) for at in every]


@pytest.mark.parametrize(("name", "workers"), ordered())
def test_pushes_in_rank_order_give_what_is_defined(name: str, workers: int) -> None:
    proof = prove(networks.cases[name](61), 'parameter_server(mode="ordered")', workers)
    assert_equal(proof, by_design=True)
    assert not proof.exact


def test_the_definition_for_one_worker_is_the_one_device_step() -> None:
    for name in ("mlp", "batch_norm_2d", "one_cycle", "adam"):
        workload = networks.cases[name](61)
        defined = ParameterServer(mode="ordered").reference(workload, 1)
        for found, expected in zip(defined, reference(workload), strict=True):
            assert_same(found, expected, 1e-12)


def test_the_definition_for_several_workers_is_another_network() -> None:
    workload = networks.cases["mlp"](61)
    *_, last = ParameterServer(mode="ordered").reference(workload, 3)
    *_, alone = reference(workload)
    assert (last.model["0.weight"] - alone.model["0.weight"]).abs().max() > 1e-6


@pytest.mark.parametrize("mode", ["sharded", "hogwild"])
@pytest.mark.parametrize("name", ALWAYS)
def test_one_worker_is_the_one_device_step(name: str, mode: str) -> None:
    proof = prove(networks.cases[name](61), f"parameter_server(mode={mode!r})", 1)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT


def evaluated_as_it_trains(world: World, workload: Workload) -> State:
    step = ParameterServer(mode="ordered").build(workload, world)
    for batch in batches(step):
        step(batch)
        if batch.step % world.size == 0:
            step.predict(step.source.at(0, DataShard()))
    return step.state_dict()


def test_an_evaluation_in_the_middle_of_a_round_changes_nothing() -> None:
    workload = replace(networks.cases["mlp"](61), steps=6)
    *_, defined = ParameterServer(mode="ordered").reference(workload, 3)
    with by_value(networks):
        for found in on_ranks(evaluated_as_it_trains, 3, workload):
            assert_same(found, defined, EXACT)


# Each its own way


def trained(world: World, strategy: ParameterServer, workload: Workload) -> tuple[State, PushLog, list[float]]:
    step = strategy.build(workload, world)
    stale: list[float] = []
    if step.data_shard is None:
        step.serve()
    else:
        stale = [float(step(batch)["staleness"]) for batch in batches(step)]
    world.group().barrier()
    return step.state_dict(), step.log()[0], stale


def again(
    world: World, strategy: ParameterServer, workload: Workload, log: PushLog, start: State | None = None
) -> State:
    return replay(strategy._ruled(workload), log, strategy._rhythm, start=start)


LONG = {"steps": 60, "precision": "float32"}


def in_float32(name: str, **changes: Any) -> Workload:
    made = networks.cases[name](13)
    data = made.data

    def narrow() -> Any:
        return TensorDataset(*(t.float() if t.is_floating_point() else t for t in data().tensors))  # type: ignore[attr-defined]

    return replace(made, data=narrow, **{**LONG, **changes})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {}),
        ("batch_norm_2d", {}),
        ("adam", {}),
        ("rmsprop", {}),
        ("sgd_dampened", {}),
        ("parameter_groups", {}),
        ("frozen_and_unused_parameters", {}),
        ("large_parameters", {}),
        ("clipped", {"push_every": 3}),
        ("one_cycle", {"pull_every": 2}),
        ("batch_norm_2d", {"push_every": 2, "pull_every": 3}),
        ("mlp", {"max_staleness": 1}),
        ("mlp", {"mode": "ordered"}),
        ("mlp", {"rule": "adagrad(lr=0.05)"}),
        ("batch_norm_2d", {"servers": 1}),
        ("adam", {"servers": 2, "push_every": 2}),
        ("large_parameters", {"servers": 2, "pull_every": 2}),
    ],
)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.cases(4)
def test_a_run_is_done_again_from_its_log_to_the_bit(name: str, options: dict[str, Any], workers: int) -> None:
    strategy, workload = ParameterServer(**options), in_float32(name)
    with by_value(networks):
        runs = on_ranks(trained, strategy.ranks(workers), strategy, workload)
        (replayed,) = on_ranks(again, 1, strategy, workload, runs[0][1])
    for state, _, _ in runs:
        assert state.step == workload.steps
        assert_same(state, replayed)
    handed_out = Counter(batch for pushed in runs[0][1].pushes() for batch, _ in pushed.batches)
    assert handed_out == dict.fromkeys(range(60), 1), "every batch is in the weights, once"


def test_a_log_with_one_push_exchanged_is_another_network() -> None:
    strategy, workload = ParameterServer(), in_float32("mlp")
    with by_value(networks):
        state, log, _ = on_ranks(trained, 2, strategy, workload)[0]
        entries = [e.copy() for e in log.entries]
        entries[0][[1, 2], 0] = entries[0][[2, 1], 0]
        (replayed,) = on_ranks(again, 1, strategy, workload, PushLog(log.first, tuple(entries), log.made))
    assert any(not torch.equal(t, replayed.model[name]) for name, t in state.model.items())


def test_a_log_that_is_cut_off_or_has_a_batch_twice_is_refused() -> None:
    workload = in_float32("mlp")
    with by_value(networks):
        _, log, _ = on_ranks(trained, 2, ParameterServer(max_staleness=2), workload)[0]  # both make many
    (one, two), (made_one, made_two) = log.entries, log.made
    again = one.copy()
    again[3, 0] = one[2, 0]
    for entries, made, message in (
        ((one[1:], two), log.made, "not whole"),
        ((one[:-1], two), log.made, "not whole"),
        (log.entries, (made_one[:-1], made_two), "not whole"),
        ((one[: len(one) // 2], two), (made_one[: len(one) // 2], made_two), "not whole"),
        ((again, two), log.made, "pushed more than once"),
    ):
        with pytest.raises(ValueError, match=message):
            replay(workload, PushLog(log.first, entries, made))


def test_a_log_can_be_kept_in_a_file(tmp_path: Path) -> None:
    with by_value(networks):
        _, log, _ = on_ranks(trained, 2, ParameterServer(), in_float32("mlp"))[0]
    log.save(tmp_path / "pushes.log")
    assert list(PushLog.load(tmp_path / "pushes.log").pushes()) == list(log.pushes())


def test_staleness_is_measured_and_in_rank_order_it_is_the_place_in_the_round() -> None:
    with by_value(networks):
        alone = on_ranks(trained, 1, ParameterServer(), in_float32("mlp"))[0][2]
        in_order = on_ranks(trained, 3, ParameterServer(mode="ordered"), in_float32("mlp"))[1][2]
        two = [on[2] for on in on_ranks(trained, 2, ParameterServer(), in_float32("mlp", steps=300))]
    assert alone == [0.0] * 60
    assert in_order == [0.0, 1.0, 2.0] * 20
    assert all(s >= 0 for of in two for s in of)
    assert any(s > 0 for of in two for s in of), "two workers that compute at the same time"


def limping(world: World, strategy: ParameterServer, workload: Workload) -> int:
    """Rank 1 makes one step and then waits until rank 0 no longer goes on; by how much rank 0 was ahead."""
    import time

    step = strategy.build(workload, world)
    store = step.store  # type: ignore[attr-defined]
    deadline = time.monotonic() + 20
    if world.rank == 1:
        batch = step.take()
        assert batch is not None
        while store.memory.lines[0].pushes < 3 and time.monotonic() < deadline:
            store.queue.wait_until(lambda: store.memory.lines[0].pushes >= 3, lambda: "rank 0")
        ahead = store.memory.lines[0].pushes - store.memory.lines[1].pushes
        step(batch)
    else:
        ahead = 0
    for batch in batches(step):
        ahead = max(ahead, store.queue.pushes_ahead([0, 1])) if world.rank == 0 else ahead
        step(batch)
    world.group().barrier()
    return int(ahead)


def test_nobody_is_further_ahead_than_max_staleness_allows() -> None:
    with by_value(networks):
        bound = on_ranks(limping, 2, ParameterServer(max_staleness=2), in_float32("mlp"))
    assert bound[0] <= 2
    assert bound[1] == 3, "the push that was under way when the limit was reached"


# States


def test_a_state_of_any_strategy_goes_on_here_and_the_other_way_round() -> None:
    for name in ("adam", "batch_norm_2d", "one_cycle"):
        workload = networks.cases[name](61)
        *_, whole = reference(workload)
        with by_value(networks):
            first = on_ranks(go_on, 1, SingleDevice(), workload, None, 3)[0]
            second = on_ranks(go_on, 1, ParameterServer(), workload, first, 3)[0]
            last = on_ranks(go_on, 1, SingleDevice(), workload, second, 2)[0]
        assert_same(last, whole, 1e-12)


def go_on(world: World, strategy: Any, workload: Workload, state: State | None, steps: int) -> State:
    step = strategy.build(workload, world)
    if state is not None:
        step.load_state_dict(state)
        assert_same(step.state_dict(), state)
    for batch in batches(step, stop=step.done + steps):
        step(batch)
    world.group().barrier()
    return step.state_dict()  # type: ignore[no-any-return]


def test_a_run_that_goes_on_from_a_state_is_done_again_too_and_deals_what_was_not_pushed() -> None:
    strategy, workload = ParameterServer(), in_float32("adam")
    with by_value(networks):
        (start,) = on_ranks(go_on, 1, SingleDevice(), workload, None, 9)
        start.settings["unpushed"] = [4, 7]
        runs = on_ranks(from_there, 2, strategy, workload, start)
        (replayed,) = on_ranks(again, 1, strategy, workload, runs[0][1], start)
    assert_same(runs[0][0], replayed)
    assert sorted(b for p in runs[0][1].pushes() for b, _ in p.batches) == [4, 7, *range(11, 60)]


def from_there(world: World, strategy: ParameterServer, workload: Workload, start: State) -> tuple[State, PushLog]:
    step = strategy.build(workload, world)
    step.load_state_dict(start)
    for batch in batches(step):
        step(batch)
    world.group().barrier()
    return step.state_dict(), step.log()[0]


# Kills


def surviving_run(world: World, progress: Any, strategy: ParameterServer, workload: Workload) -> tuple[State, PushLog]:
    step = strategy.build(workload, world)
    ready = world.generation == 0
    while True:
        try:
            if not ready:
                step.rejoin(world)
                ready = True
            if step.data_shard is None:
                step.serve()
                world.group().barrier()
            else:
                slots._steps(step, world, progress, [])
            return step.state_dict(), step.log()[0]
        except slots.MembershipChanged:
            world, ready = slots._rejoined(world), False


def killed(mode: str, many: int, *, workers: int, steps: int, replaced: bool = True, **options: Any) -> None:
    strategy = ParameterServer(mode=mode, **options)  # type: ignore[arg-type]
    workload = in_float32("large_parameters", steps=steps)
    with by_value(networks), by_value(sys.modules[__name__]):
        outcome = slots.on_slots(
            surviving_run, strategy.ranks(workers), strategy, workload,
            killed=slots.kills(many, steps, strategy.ranks(workers), seed=many, seconds=0.01), replaced=replaced,
        )  # fmt: skip
    state, log = next(r for r in outcome.results if r is not None)
    with by_value(networks):
        (replayed,) = on_ranks(again, 1, strategy, workload, log)
    assert outcome.kills >= (many * 9 // 10 if replaced else 1)
    assert state.step == steps
    assert_same(state, replayed)
    handed_out = Counter(batch for pushed in log.pushes() for batch, _ in pushed.batches)
    assert handed_out == dict.fromkeys(range(steps), 1), "no batch is lost, and none is in the weights twice"


@pytest.mark.parametrize(
    ("mode", "options"),
    [("sharded", {}), ("ordered", {}), ("sharded", {"push_every": 2}), ("sharded", {"servers": 2, "push_every": 2})],
)
@pytest.mark.thorough
def test_workers_are_killed_and_replaced_and_the_run_is_done_again_to_the_bit(mode: str, options: Any) -> None:
    killed(mode, 4 if "servers" in options else 8, workers=3, steps=400, **options)


@pytest.mark.parametrize("mode", ["sharded", "ordered"])
def test_the_run_goes_on_without_those_who_were_killed(mode: str) -> None:
    killed(mode, 2, workers=3, steps=300, replaced=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["sharded", "ordered"])
def test_a_hundred_kills_at_random_moments(mode: str) -> None:
    killed(mode, 100, workers=3, steps=2000)


# The face


def test_it_is_written_as_it_was_made() -> None:
    for text in (
        "parameter_server",
        "parameter_server(push_every=2, pull_every=3, mode='ordered')".replace("push_every=2, pull_every=3, ", ""),
        "parameter_server(rule='adagrad(lr=0.01)', max_staleness=4)",
    ):
        value = parse(text, "apportion.strategies")
        assert str(value) == text
        assert parse(str(value), "apportion.strategies") == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"push_every": 0}, "push_every=0 must be a whole number of at least 1"),
        ({"mode": "wild"}, "mode='wild' must be one of 'sharded', 'hogwild', 'ordered'"),
        ({"mode": "ordered", "push_every": 2}, "pushes every batch"),
        ({"rule": "adadelta(lr=1)"}, "must be one of sgd"),
        ({"rule": "adagrad(rate=1)"}, "has no 'rate'"),
        ({"max_staleness": -1}, "max_staleness=-1 must be"),
        ({"servers": 1, "mode": "hogwild"}, 'servers=1 take locks: leave mode="hogwild" out'),
        ({"copies": 1}, "copies=1 must be 0 or 1, and copies go with servers"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ParameterServer(**options)


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_what_asynchronous_workers_cannot_do_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} does not go with asynchronous workers"):
        ParameterServer().build(networks.cases[name](61), World())


def test_an_optimizer_that_is_not_element_wise_is_refused_by_name() -> None:
    workload = replace(networks.cases["mlp"](61), optimizer=lambda p: torch.optim.Adadelta(p))
    with pytest.raises(ValueError, match="the parameter store has no rule for Adadelta"):
        ParameterServer().build(workload, World())


def test_servers_alone_train_nothing() -> None:
    with pytest.raises(ValueError, match="servers=1 leaves no worker among 1 processes"):
        ParameterServer(servers=1).build(networks.cases["mlp"](61), World())


@pytest.mark.parametrize("servers", [1, 2])
def test_one_worker_and_its_servers_are_the_one_device_step(servers: int) -> None:
    proof = prove(networks.cases["batch_norm_2d"](61), f"parameter_server(servers={servers})", 1)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "options",
    ["", "push_every=2", "push_every=3, pull_every=2", "max_staleness=1", "servers=1", "rule='adagrad(lr=0.1)'"],
)
def test_check_does_an_asynchronous_run_again_to_the_bit(options: str, workers: int) -> None:
    workload = replace(in_float32("mlp"), steps=24)
    proof = prove(workload, f"parameter_server({options})", workers)
    assert proof.holds
    assert not proof.exact
    assert [found.precision for found in proof.rounds] == ["float64", "float32"]
    assert all(found.worst.absolute == 0.0 for found in proof.rounds)
    assert all(found.bound == 0.0 for found in proof.rounds)


def test_check_finds_an_update_that_was_lost() -> None:
    with by_value(networks), by_value(planted):
        proof = apportion.check(networks.cases["mlp"](61), planted.LosesAnUpdate(), workers=2)
    assert not proof.holds
    assert proof.rounds[0].worst.absolute > 1e-6


def test_check_refuses_what_is_too_short_for_its_workers() -> None:
    workload = replace(networks.cases["mlp"](61), steps=2)
    with pytest.raises(ValueError, match="2 batches are too few for 3 workers"):
        prove(workload, "parameter_server", 3)


def test_check_says_what_can_be_checked_with_several_workers() -> None:
    with pytest.raises(ValueError, match=r'check parameter_server\(mode="ordered"\)'):
        prove(networks.cases["mlp"](61), 'parameter_server(mode="hogwild")', 2)


# A whole run


@pytest.mark.parametrize("strategy", ["parameter_server", "parameter_server(servers=1)"])
@pytest.mark.thorough
def test_a_run_trains_evaluates_and_saves(tmp_path: Path, strategy: str) -> None:
    workload = f"{Path(__file__).parents[2] / 'examples' / 'digits.py'}:workload"
    launcher = apportion.local(workers=2, threads=1)
    end = apportion.train(workload, strategy, launcher=launcher, run_dir=tmp_path / "run")
    assert end.data["metrics"]["accuracy"] >= 0.96
    assert end.step == 690
    assert apportion.load(tmp_path / "run") is not None


def recognized(world: World, strategy: ParameterServer, workload: Workload) -> tuple[float, bool]:
    """MNIST's test accuracy, and is the replay the same to the bit?"""
    state, log, _ = trained(world, strategy, workload)
    if world.rank:
        return 0.0, True
    found = replay(strategy._ruled(workload), log, strategy._rhythm)
    model = workload.model()
    model.load_state_dict(found.model)
    model.eval()
    assert workload.evaluation is not None
    x, y = workload.evaluation.data().tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        accuracy = float((model(x).argmax(1) == y).double().mean())
    return accuracy, all(torch.equal(t, found.model[name]) for name, t in state.model.items())


@pytest.mark.data("mnist")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_replicas_with_adagrad_learn_mnist_and_the_run_is_done_again_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ranks.SECONDS", 500.0)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "lib"))
    import mnist

    with by_value(mnist):
        accuracy, same = on_ranks(recognized, 2, ParameterServer(), mnist.workload)[0]
    assert accuracy >= 0.98
    assert same
