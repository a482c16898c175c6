"""local_sgd: the average of replicas, nobody waited for in vain, and no death that costs more than one round."""

from __future__ import annotations

import gzip
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import slots
import torch
from conftest import data_folder
from hypothesis import given
from hypothesis import strategies as st
from ranks import by_value, on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion
from apportion import Evaluation, Workload
from apportion.comm.world import World
from apportion.core.strategy import State, batches
from apportion.parallel.averaging.rounds import LATE_SECONDS, assigned_round, is_late
from apportion.runtime.supervisor import run as supervisor
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.strategies.local_sgd import LocalSgd
from apportion.strategies.single_device import SingleDevice

pytestmark = pytest.mark.processes

EXACT = 1e-10
BATCH, EVERY = 4, 3


def prove(workload: Workload, strategy: LocalSgd, workers: int) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(replace(workload, steps=8 * workers), strategy, workers=workers, steps=8)
    (found,) = proof.rounds
    assert proof.holds, found
    assert not proof.exact
    assert found.steps == 8
    assert found.worst.absolute <= EXACT, found


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "strategy",
    [
        LocalSgd(every=1),
        LocalSgd(every=3),
        LocalSgd(every=2, outer="nesterov"),
        LocalSgd(every=3, outer="nesterov", outer_lr=0.5, outer_momentum=0.6, slots="averaged"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mlp", "batch_norm_2d", "adam"])
def test_the_average_is_that_of_replicas_one_after_the_other(name: str, strategy: LocalSgd, workers: int) -> None:
    prove(networks.cases[name](61), strategy, workers)


@pytest.mark.parametrize(
    "name",
    ["tied_weights", "frozen_and_unused_parameters", "sparse_embeddings", "buffers", "coupled_examples",
     "two_optimizers", "counted_tokens", "one_cycle", "draws_in_the_data", "parameters_without_optimizer"],
)  # fmt: skip
def test_every_kind_of_workload_is_averaged(name: str) -> None:
    prove(networks.cases[name](61), LocalSgd(every=3, outer="nesterov", slots="averaged"), 3)


# What the average is


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def ordered(batch_size: int, optimizer: Any, steps: int) -> Workload:
    """The same examples in the same order, whatever the size of the batch."""
    data = lambda: TensorDataset(networks.numbers(240, 10), networks.classes(240, 3))  # noqa: E731
    return networks.workload(
        networks.perceptron, data, batch_size, optimizer=optimizer, steps=steps, order="sequential"
    )


def trained(world: World, strategy: LocalSgd, workload: Workload, states: list[State], supervised: bool) -> State:
    """The last average of a training from the last of these states. Not supervised: as under torchrun."""
    world.group()
    step = strategy.build(workload, world if supervised else replace(world, channel=None))
    if states:
        step.load_state_dict(states[-1])
        assert step.done == states[-1].step
    for batch in batches(step):
        step(batch)
    world.group().barrier()
    return step.state_dict()


@pytest.mark.parametrize("optimizer", [plain_sgd, networks.momentum])
@pytest.mark.parametrize("workers", [2, 3])
def test_averaging_every_step_of_sgd_is_the_synchronous_step_on_all_the_batches(workers: int, optimizer: Any) -> None:
    """Of one size: the mean of the means is then the mean. SGD is linear in the gradient, its momentum too."""
    alone = SingleDevice().build(ordered(20 * workers, optimizer, 6), World())
    for batch in batches(alone):
        alone(batch)
    with by_value(networks):
        found = on_ranks(trained, workers, LocalSgd(every=1), ordered(20, optimizer, 6 * workers), [], True)[0]
    for name, expected in alone.state_dict().model.items():
        assert (found.model[name] - expected).abs().max() <= EXACT, name


def assert_same(found: State, expected: State, bound: float) -> None:
    left, right = dict(found.tensors()), dict(expected.tensors())
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert (left[name].double() - tensor.double()).abs().max() <= bound, name


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_without_a_supervisor_the_average_is_the_same(workers: int) -> None:
    strategy = LocalSgd(every=3, outer="nesterov")
    workload = replace(networks.cases["batch_norm_2d"](61), steps=31)
    with by_value(networks):
        shared = on_ranks(trained, workers, strategy, workload, [], True)
        together = on_ranks(trained, workers, strategy, workload, [], False)
    expected = list(strategy.reference(workload, workers))[-1]
    for state in (*shared, *together):
        assert state.step == 31, "the last round falls short, and is averaged"
        assert_same(state, expected, 1e-12)


@pytest.mark.parametrize("supervised", [True, False])
def test_a_state_goes_on_where_it_was(supervised: bool) -> None:
    strategy = LocalSgd(every=2, outer="nesterov", slots="averaged")
    workload = networks.cases["one_cycle"](61)
    with by_value(networks):
        whole = on_ranks(trained, 2, strategy, replace(workload, steps=24), [], supervised)
        halves = on_ranks(cut, 2, strategy, replace(workload, steps=24), 12, supervised)
        rest = on_ranks(trained, 2, strategy, replace(workload, steps=24), [halves[1]], supervised)
    assert halves[0].step == 12
    for found, expected in zip(rest, whole, strict=True):
        assert_same(found, expected, 0.0)


def cut(world: World, strategy: LocalSgd, workload: Workload, stop: int, supervised: bool) -> State:
    world.group()
    step = strategy.build(workload, world if supervised else replace(world, channel=None))
    for batch in batches(step, stop=stop):
        step(batch)
    world.group().barrier()
    return step.state_dict()


@pytest.mark.parametrize(
    ("stops", "done"),
    [
        ((12, 14), (14, 14)),  # 12 batches are handed out at 8, and the last two, one a rank, at 12
        ((14, 4), (14, 4)),
        ((12, 4), (12, 4)),  # one may stop as the other has
    ],
)
def test_a_rank_that_stops_is_not_waited_for_and_none_stops_within_the_last_round(
    stops: tuple[int, int], done: tuple[int, int]
) -> None:
    """A stop reaches each rank at a step of its own."""
    workload = replace(networks.cases["one_cycle"](61), steps=14)
    with by_value(networks):
        assert tuple(on_ranks(stopped, 2, LocalSgd(every=2), workload, stops)) == done


def stopped(world: World, strategy: LocalSgd, workload: Workload, stops: tuple[int, int]) -> int:
    world.group()
    step = strategy.build(workload, world)
    for batch in batches(step):
        step(batch)
        if stops[world.rank] <= step.done < workload.steps and step.stop():
            break
    world.group().barrier()
    return step.done


def test_a_state_goes_to_and_comes_from_other_strategies() -> None:
    workload = networks.cases["mlp"](61)
    with by_value(networks):
        state = on_ranks(trained, 2, LocalSgd(every=2, outer="nesterov"), workload, [], True)[0]
        alone = SingleDevice().build(replace(workload, steps=12), World())
        alone.load_state_dict(state)
        for batch in batches(alone):
            alone(batch)
        after = alone.state_dict()
        assert after.step == 12
        assert not any(name.startswith("outer/") for name in after.optimizer)
        more = on_ranks(trained, 3, LocalSgd(every=2), replace(workload, steps=18), [after], True)
    assert more[0].step == 18
    assert_same(more[1], more[0], 0.0)


# Evaluation and checkpoints


def seen_by_others(world: World, workload: Workload) -> list[bool]:
    """In the middle of a round: are the state, and what is predicted, those of the last average?"""
    step = LocalSgd(every=4).build(workload, world)
    taken = [step(batch) for batch, _ in zip(batches(step), range(6), strict=False)]
    state = step.state_dict()
    model = networks.perceptron().double()
    model.load_state_dict(state.model)
    batch = step.source.at(0)
    same = torch.equal(step.predict(batch), model(batch.inputs))
    own = [p.detach().clone() for p in step.model.parameters()]
    step.predict(batch)
    moved = any(not torch.equal(p, state.model[name]) for name, p in step.model.named_parameters())
    kept = all(torch.equal(p, before) for p, before in zip(step.model.parameters(), own, strict=True))
    world.group().barrier()
    return [len(taken) == 6, state.step == step.done == 4 * world.size, same, moved, kept]


def test_what_is_saved_and_evaluated_is_the_last_average() -> None:
    with by_value(networks):
        answers = on_ranks(seen_by_others, 2, replace(networks.cases["mlp"](61), steps=40))
    assert answers == [[True] * 5] * 2


def test_a_run_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    held_out = TensorDataset(networks.numbers(50, 10, seed=7), networks.classes(50, 3, seed=8))
    workload = replace(
        networks.cases["mlp"](61), steps=16, evaluation=Evaluation(data=lambda: held_out, every=None), epochs=None
    )
    strategy, options = LocalSgd(every=2, slots="averaged"), {"launcher": apportion.local(workers=2, threads=1)}
    with by_value(networks), by_value(sys.modules[__name__]):
        end = apportion.train(workload, strategy, run_dir=tmp_path / "a", **options)  # type: ignore[arg-type]
        longer = replace(workload, steps=24)
        apportion.train(longer, strategy, run_dir=tmp_path / "a", resume=True, **options)  # type: ignore[arg-type]
        apportion.train(longer, strategy, run_dir=tmp_path / "b", **options)  # type: ignore[arg-type]
    assert 0 <= end.data["metrics"]["accuracy"] <= 1
    for file in ("model", "optimizer"):
        found, expected = (load_file(tmp_path / run / "checkpoints" / "latest" / f"{file}.safetensors") for run in "ab")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), file


# Decisions


@given(
    done=st.integers(0, 50), of=st.integers(1, 7), every=st.integers(1, 9), total=st.integers(0, 120),
)  # fmt: skip
def test_a_round_deals_every_batch_once(done: int, of: int, every: int, total: int) -> None:
    rounds = [assigned_round(done, index, of, every, total) for index in range(of)]
    numbers = sorted(r.batch(i) for r in rounds for i in range(r.batch_count))
    assert numbers == list(range(done, max(done, min(total, done + of * every))))


@given(
    done=st.integers(0, 50), of=st.integers(1, 7), every=st.integers(1, 9), total=st.integers(1, 120),
    later=st.integers(0, 99),
)  # fmt: skip
def test_a_schedule_has_a_step_left_for_every_batch(done: int, of: int, every: int, total: int, later: int) -> None:
    """OneCycleLR refuses a step more than it was made for; ``later``: the others went on before the round was begun."""
    for index in range(of):
        on_time = assigned_round(done, index, of, every, total)
        late = replace(on_time, done=min(total, done + later))
        assert all(late.place(made) < total for made in range(on_time.batch_count))
        assert all(on_time.place(made) == done + made * of for made in range(on_time.batch_count))


def test_who_is_late() -> None:
    assert not is_late(100.0, [])
    assert not is_late(5.9, [1.0, 2.0, 9.0])
    assert is_late(6.1, [1.0, 2.0, 9.0])
    assert not is_late(LATE_SECONDS, [0.001, 0.001]), "a hiccup of the machine"
    assert is_late(LATE_SECONDS + 0.01, [0.001, 0.001])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"every": 0}, "every=0 must be"),
        ({"outer": "adam"}, "outer='adam' must be"),
        ({"outer_lr": 0.0}, "outer_lr=0.0 must be"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 must be"),
        ({"slots": "lost"}, "slots='lost' must be"),
    ],
)
def test_wrong_parameters_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LocalSgd(**fields)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for _, p in parameters])


def called_outer(parameters: Any) -> dict[str, torch.optim.Optimizer]:
    return {"outer": plain_sgd(list(parameters))}


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("carried_state", {}, "a recurrent state that is carried along"),
        ("mlp", {"optimizer": lbfgs}, "LBFGS searches along the loss of one batch"),
        ("mlp", {"optimizer": called_outer}, 'an optimizer called "outer"'),
    ],
)
def test_what_cannot_be_averaged_is_refused(name: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LocalSgd().build(replace(networks.cases[name](61), **changes), World())


# What it learns


def mnist(part: str) -> TensorDataset:
    def read(name: str, offset: int) -> Tensor:
        data = gzip.decompress((data_folder() / "mnist" / name).read_bytes())
        return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=offset)

    images, labels = read(f"{part}-images-idx3-ubyte.gz", 16), read(f"{part}-labels-idx1-ubyte.gz", 8)
    return TensorDataset(images.view(-1, 1, 28, 28).float() / 255, labels.long())


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.data("mnist")
@pytest.mark.parametrize(
    "strategy",
    [LocalSgd(every=10), LocalSgd(every=10, outer="nesterov"), LocalSgd(every=10, slots="averaged")],
    ids=str,
)
def test_two_replicas_learn_mnist(strategy: LocalSgd) -> None:
    workload = Workload(
        model=lenet,
        data=lambda: mnist("train"),
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        batch_size=64,
        epochs=2,
        evaluation=Evaluation(data=lambda: mnist("t10k"), batch_size=1000),
    )
    with by_value(sys.modules[__name__]):
        end = apportion.train(workload, strategy, launcher=apportion.local(workers=2, threads=1), run_dir=None)
    assert end.data["metrics"]["accuracy"] >= 0.98


# Late and dead replicas


@pytest.mark.thorough
def test_a_run_goes_on_after_deaths_with_all_its_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[WorkerPool] = []
    monkeypatch.setattr(supervisor, "WorkerPool", lambda *made: pools.append(WorkerPool(*made)) or pools[-1])
    workload = stamped(1500, 2)
    assert workload.steps is not None
    workload = replace(
        workload, evaluation=Evaluation(data=workload.data, metrics={"least": least, "most": most}, batch_size=10**6)
    )
    with by_value(networks), by_value(sys.modules[__name__]):
        faults = killed = 0
        for event in apportion.run(
            workload, LocalSgd(every=EVERY), launcher=apportion.local(workers=2, threads=1), run_dir=None
        ):
            faults += event.kind == "fault"
            if event.kind == "step" and killed == faults < 3 and event.step < workload.steps * 0.8:
                os.kill(pools[-1].pids()[killed % 2], signal.SIGKILL)
                killed += 1
    assert event.kind == "end"
    assert faults == killed >= 1
    assert event.data["metrics"]["least"] > 0, "none is lost"
    assert event.data["metrics"]["most"] <= 1 / BATCH + EXACT


def least(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.min()


def most(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.max()


class Stamps(nn.Module):
    """A weight an example: it says how often, and with which share of an average, the example was learnt."""

    def __init__(self, examples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(examples, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.weight[index]


class StopsItself(Stamps):
    """Whoever computes this example is stopped: in the middle of its own work, where it holds nothing that others
    wait for. A supervisor would end it after some seconds wherever it is."""

    def __init__(self, examples: int, at: int) -> None:
        super().__init__(examples)
        self.at = at

    def forward(self, index: Tensor) -> Tensor:
        if self.training and int(index[0]) == self.at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(index)


def minus(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.mean()


def stamped(rounds: int, workers: int) -> Workload:
    """One epoch. Every example that is in an average has 1 / BATCH, times its replica's share of that average."""
    n = rounds * workers * EVERY * BATCH
    return networks.workload(
        lambda: Stamps(n),
        lambda: TensorDataset(torch.arange(n), torch.zeros(n)),
        BATCH,
        loss=minus,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        steps=rounds * workers * EVERY,
        order="sequential",
    )


def on_slots(workload: Workload, workers: int, killed: list[slots.Kill], *, replaced: bool = True) -> slots.Outcome:
    with by_value(networks), by_value(sys.modules[__name__]):
        outcome = slots.on_slots(
            slots.train, workers, LocalSgd(every=EVERY), workload, killed=killed, replaced=replaced
        )
    assert outcome.kills == len(killed)
    states = [result[0] for result in outcome.results if result is not None]
    assert all(state.step == workload.steps for state in states)
    assert all(torch.equal(state.model["weight"], states[0].model["weight"]) for state in states)
    return outcome


def shares_of(outcome: slots.Outcome) -> Tensor:
    """Of each example: its replica's share of the average that it is in."""
    state = next(result[0] for result in outcome.results if result is not None)
    return state.model["weight"] * BATCH


def assert_each_once(shares: Tensor, workers: int) -> None:
    """A share of one whole average: 1, a half, a third. In two averages it would be the sum of two such."""
    last = len(shares) - workers * EVERY * BATCH  # the last round deals out unequal rests
    whole = torch.stack([(shares[:last] - 1 / k).abs() for k in range(1, workers + 1)]).amin(0)
    assert float(whole.max()) < EXACT
    assert float(shares.min()) > EXACT
    assert float(shares.max()) <= 1 + EXACT


@pytest.mark.timeout(240)
@pytest.mark.parametrize("many", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("workers", "seed"), [(2, 0), (3, 1)])
def test_whoever_dies_every_example_is_in_an_average_once(workers: int, seed: int, many: int) -> None:
    workload = stamped(100 + many, workers)  # long beside a death: what is killed is still at work
    assert workload.steps is not None
    outcome = on_slots(workload, workers, slots.kills(many, workload.steps, workers, seed=seed))
    assert outcome.changes > many / 3
    shares = shares_of(outcome)
    assert_each_once(shares, workers)
    usual = (shares - 1 / workers).abs() < EXACT
    assert usual.double().mean() > 0.8, "a death leaves the average to the others, or lets them wait for the round"


def test_the_death_of_all_replicas_at_once_loses_nothing() -> None:
    killed = [slots.Kill(3 * EVERY * round, 0.002, slot) for round in (5, 10, 20) for slot in range(3)]
    assert_each_once(shares_of(on_slots(stamped(100, 3), 3, killed)), 3)


def test_those_who_are_left_lose_one_round_of_each_of_the_dead() -> None:
    killed = [slots.Kill(150, 0.001, 2), slots.Kill(300, 0.0, 0)]
    outcome = on_slots(stamped(60, 3), 3, killed, replaced=False)
    _, sizes = outcome.results[1]
    assert sorted(set(sizes)) == [1, 2, 3]
    assert int((shares_of(outcome) == 0).sum()) <= 2 * EVERY * BATCH


@pytest.mark.thorough
def test_a_stopped_replica_holds_up_nobody_and_its_work_enters_a_later_average() -> None:
    """The others go on for 40 rounds before it is woken."""
    a_round = 3 * EVERY
    first = (20 * a_round + 1) * BATCH  # of rank 1's in that round
    workload = stamped(120, 3)
    assert workload.steps is not None
    many = workload.steps * BATCH
    woken = slots.Kill(60 * a_round, 0.0, 1, signal.SIGCONT)
    outcome = on_slots(replace(workload, model=lambda: StopsItself(many, first)), 3, [woken])
    assert outcome.changes == 0
    shares = shares_of(outcome)
    assert_each_once(shares, 3)
    halves = (shares - 1 / 2).abs() < EXACT
    assert halves.double().mean() > 0.2, "the average of two"
