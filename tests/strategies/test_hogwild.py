"""Hogwild: one worker is the one-device step; several write to one memory, each row only where it has something."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import networks
import pytest
import slots
import torch
from ranks import by_value, on_ranks

import apportion
from apportion import Workload
from apportion.comm.world import World
from apportion.core.strategy import State, batches
from apportion.parallel.replica.step import reference
from apportion.strategies.hogwild import Hogwild
from apportion.strategies.single_device import SingleDevice

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXACT = 1e-10
REFUSED = ("two_optimizers", "update_with_a_shard_without_loss_terms", "carried_state", "few_lanes")
ALWAYS = ("mlp", "sparse_embeddings", "adagrad", "sgd_dampened", "batch_norm_2d", "one_cycle", "clipped")
pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in networks.cases if n not in REFUSED],
)
def test_one_worker_is_the_one_device_step(name: str) -> None:
    with by_value(networks):
        proof = apportion.check(networks.cases[name](61), "hogwild", workers=1, steps=networks.STEPS)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT
    assert not proof.exact


def test_several_workers_are_not_checked_and_it_says_what_can_be() -> None:
    with by_value(networks), pytest.raises(ValueError, match=r'check parameter_server\(mode="ordered"\)'):
        apportion.check(networks.cases["mlp"](61), "hogwild", workers=2)


@pytest.mark.thorough
def test_check_exits_2_with_several_workers(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from apportion.cli import app

    address = f"{EXAMPLES / 'digits.py'}:workload"
    monkeypatch.setattr(sys, "argv", ["apportion", "check", address, "--strategy", "hogwild", "--workers", "2"])
    with pytest.raises(SystemExit) as left:
        app.main()
    assert left.value.code == 2
    assert 'parameter_server(mode="ordered")' in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("name", REFUSED)
def test_what_asynchronous_workers_cannot_do_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="does not go with asynchronous workers"):
        Hogwild().build(networks.cases[name](61), World())


# Several workers


def touched(world: World, workload: Workload) -> Any:
    """One step each, one after the other; which rows of the embedding each has changed, and which words it saw."""
    step = Hogwild().build(workload, world)
    batch = step.take()
    assert batch is not None
    weight = dict(step.model.named_parameters())["0.weight"]
    told = []
    for rank in range(world.size):
        world.group().barrier()
        before = weight.detach().clone()
        world.group().barrier()
        if rank == world.rank:
            step(batch)
        world.group().barrier()
        told.append(sorted((weight != before).any(1).nonzero().flatten().tolist()))
    return told, sorted(set(batch.inputs.flatten().tolist())), step.done


def bag() -> Workload:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("embedding_bag").workload  # type: ignore[no-any-return]
    finally:
        sys.path.remove(str(EXAMPLES))


def test_a_sparse_update_is_seen_by_the_others_at_once_and_touches_its_own_rows_alone() -> None:
    # Either worker may be dealt either batch. At the example's own learning rate of 2 the first step makes the network
    # so sure of some texts of the second that their gradient is 0, and leaves their rows as they are.
    slow = replace(bag(), batch_size=4, evaluation=None, optimizer=partial(torch.optim.SGD, lr=0.01))
    with by_value(sys.modules[bag().model.__module__]):
        answers = on_ranks(touched, 2, slow)
    for told, _, done in answers:
        assert told == [answers[0][1], answers[1][1]]
        assert done == 2
    assert len(answers[0][1]) < 200, "of 20,000"


def trained(world: World, workload: Workload) -> tuple[State, list[int]]:
    step = Hogwild().build(workload, world)
    dealt = []
    for batch in batches(step):
        dealt.append(batch.step)
        step(batch)
    world.group().barrier()
    return step.state_dict(), dealt


@pytest.mark.parametrize("name", ["mlp", "adam", "batch_norm_2d", "adagrad"])
def test_every_batch_is_dealt_once_and_all_see_the_same_weights(name: str) -> None:
    workload = replace(networks.cases[name](13), steps=90)
    with by_value(networks):
        answers = on_ranks(trained, 3, workload)
    assert Counter(b for _, dealt in answers for b in dealt) == dict.fromkeys(range(90), 1)
    first = dict(answers[0][0].tensors())
    for state, _ in answers:
        assert state.step == 90
        assert all(torch.equal(tensor, first[key]) for key, tensor in state.tensors())
    *_, alone = reference(workload)
    assert first.keys() == dict(alone.tensors()).keys()


def go_on(world: World, strategy: Any, workload: Workload, state: State | None, steps: int) -> State:
    step = strategy.build(workload, world)
    if state is not None:
        step.load_state_dict(state)
        found = dict(step.state_dict().tensors())
        assert all(torch.equal(found[key], tensor) for key, tensor in state.tensors())
    for batch in batches(step, stop=step.done + steps):
        step(batch)
    world.group().barrier()
    return step.state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["adam", "batch_norm_2d", "one_cycle", "sgd_dampened"])
def test_a_state_of_any_strategy_goes_on_here_and_the_other_way_round(name: str) -> None:
    workload = networks.cases[name](61)
    *_, whole = reference(workload)
    with by_value(networks):
        first = on_ranks(go_on, 1, SingleDevice(), workload, None, 3)[0]
        second = on_ranks(go_on, 1, Hogwild(), workload, first, 3)[0]
        last = on_ranks(go_on, 1, SingleDevice(), workload, second, 2)[0]
        several = on_ranks(go_on, 2, Hogwild(), workload, first, 0)
    expected = dict(whole.tensors())
    assert all((tensor - expected[key]).abs().max() <= 1e-12 for key, tensor in last.tensors())
    assert all(torch.equal(a, b) for state in several for (_, a), (_, b) in
               zip(state.tensors(), first.tensors(), strict=True))  # fmt: skip


@pytest.mark.parametrize("replaced", [True, False])
def test_a_killed_worker_loses_its_gradient_and_no_batch(replaced: bool) -> None:
    workload = replace(networks.cases["mlp"](13), steps=300)
    with by_value(networks):
        outcome = slots.on_slots(
            slots.train, 3, Hogwild(), workload,
            killed=slots.kills(5 if replaced else 2, 300, 3, seed=1), replaced=replaced,
        )  # fmt: skip
    assert outcome.kills >= (4 if replaced else 1)
    states = [r[0] for r in outcome.results if r is not None]
    assert {state.step for state in states} == {300}
    assert all(t.isfinite().all() for state in states for t in state.model.values())


@pytest.mark.parametrize("strategy", ["hogwild", 'parameter_server(mode="hogwild")', "parameter_server"])
def test_two_workers_learn_the_texts(tmp_path: Path, strategy: str) -> None:
    end = apportion.train(
        f"{EXAMPLES / 'embedding_bag.py'}:workload", strategy, launcher=apportion.local(workers=2, threads=1),
        run_dir=tmp_path / "run",
    )  # fmt: skip
    assert end.data["metrics"]["accuracy"] >= 0.97
