"""map_reduce: a pass over any batch, in parts that fit; L-BFGS on top; and a hundred deaths that change nothing."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import slots
import torch
from ranks import by_value, on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate

import apportion
from apportion import Workload
from apportion.comm.world import World
from apportion.core.address import load_workload
from apportion.core.strategy import State, Strategy, batches
from apportion.errors import MembershipChanged
from apportion.parallel.replica.committed_state import CommittedState
from apportion.runtime.supervisor import run as supervisor
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.strategies.map_reduce import MapReduce
from apportion.strategies.single_device import SingleDevice

EXAMPLE = Path(__file__).parents[2] / "examples" / "lbfgs.py"
EXACT = 1e-10
EXAMPLES = 187


def lbfgs(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    settings = {"lr": 0.8, "max_iter": 4, "history_size": 6, **options}
    return torch.optim.LBFGS([p for _, p in parameters], **settings)


def strong_wolfe(parameters: Any) -> torch.optim.Optimizer:
    return lbfgs(parameters, line_search_fn="strong_wolfe")


def whole_set(optimizer: Any = networks.momentum, **options: Any) -> Workload:
    """Every step is a pass over all the data."""
    data = lambda: TensorDataset(networks.numbers(EXAMPLES, 10), networks.classes(EXAMPLES, 3))  # noqa: E731
    return networks.workload(networks.perceptron, data, EXAMPLES, optimizer=optimizer, **options)


def prove(workload: Workload, strategy: Strategy, workers: int) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, strategy, workers=workers, steps=6)
    (found,) = proof.rounds
    assert proof.holds, found
    assert found.steps == 6
    assert found.worst.absolute <= EXACT, found


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("part", [1, 7, 50, 1024])
def test_the_whole_training_set_is_one_batch_in_uneven_parts(part: int, workers: int) -> None:
    prove(whole_set(), MapReduce(part=part), workers)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [lbfgs, strong_wolfe])
@pytest.mark.thorough
def test_lbfgs_searches_as_on_one_device(optimizer: Any, workers: int) -> None:
    prove(whole_set(optimizer), MapReduce(part=13), workers)


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    ["counted_tokens_without_norm", "a_shard_without_loss_terms_and_norm", "class_weights", "buffers",
     "frozen_and_unused_parameters", "sparse_embeddings", "augmented", "own_collate", "draws_in_the_data", "few_rows",
     "large_parameters", "batch_norm_frozen", "clipped"],
)  # fmt: skip
def test_parts_change_nothing(name: str) -> None:
    cases: dict[str, Callable[[int], Workload]] = {
        **networks.cases, "a_shard_without_loss_terms_and_norm": sparse_tokens, "few_rows": few_rows
    }  # fmt: skip
    prove(cases[name](61), MapReduce(part=4), 3)


def sparse_tokens(batch_size: int) -> Workload:
    """Most parts count nothing."""
    made = networks.cases["counted_tokens_without_norm"](batch_size)
    return replace(made, loss=networks.masked_loss)


def few_rows(batch_size: int) -> Workload:
    """The short batch has one row: two ranks of three have none."""
    return networks.workload(networks.perceptron, networks.tabular(3, 10), 3)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("batch_norm_2d", "the statistics of a part"),
        ("batch_norm_without_running_statistics", "the statistics of a part"),
        ("coupled_examples", "couples examples"),
        ("two_optimizers", "update= of your own"),
        ("carried_state", "recurrent state"),
    ],
)
def test_what_is_no_sum_over_parts_is_refused(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MapReduce().build(networks.cases[name](61), World())


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="part=0 must be"):
        MapReduce(part=0)
    with pytest.raises(ValueError, match="cannot feed 3 workers"):
        MapReduce().build(networks.cases["mlp"](2), World(size=3))


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"clip_grad_norm": 1.0}, "clip_grad_norm=1.0 does not go with LBFGS"),
     ({"precision": "float16"}, 'precision="float16" does not go with LBFGS')],
)  # fmt: skip
def test_what_a_search_cannot_have_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MapReduce().build(replace(whole_set(lbfgs), **changes), World())


def test_data_parallel_says_that_lbfgs_is_for_others() -> None:
    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times an update"):
        apportion.data_parallel().build(whole_set(lbfgs), World())


# Streaming


class Large(Dataset[Any]):
    """Examples that are made when they are asked for, and how many of them are in memory."""

    alive = most = 0

    def __len__(self) -> int:
        return 500

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return networks.numbers(10, seed=i), i % 3


def counted(samples: list[Any]) -> Any:
    inputs, targets = default_collate(samples)
    Large.alive += len(inputs)
    Large.most = max(Large.most, Large.alive)
    weakref.finalize(inputs, gone, len(inputs))
    return inputs, targets


def gone(many: int) -> None:
    Large.alive -= many


def test_no_more_than_a_part_is_in_memory() -> None:
    workload = networks.workload(networks.perceptron, Large, 500, collate=counted, steps=2)
    step = MapReduce(part=32).build(workload, World())
    for batch in batches(step):
        step(batch)
    del batch
    gc.collect()
    assert Large.most == 32, "the parts of 500 are 31 and 32"
    assert Large.alive == 0


def test_parts_that_are_loaded_apart_are_the_rows_of_the_batch_each_once() -> None:
    workload = networks.workload(networks.perceptron, Large, 500)
    step = MapReduce().build(workload, World())
    batch = step.source.at(1)
    parts = list(batch.stream(32))
    assert [i for part in parts for i in part.index.tolist()] == batch.index.tolist()
    assert {len(part) for part in parts} <= {31, 32}
    assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)
    assert [(part.rows.start, part.rows.stop) for part in batch.stream(300)] == [(0, 250), (250, 500)]


class Noisy(Dataset[Any]):
    """Draws for all its examples at once."""

    def __len__(self) -> int:
        return 40

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(zip(torch.randn(len(indices), 10, dtype=torch.float64), [0] * len(indices), strict=True))

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("all at once")


def test_parts_that_are_loaded_apart_draw_apart() -> None:
    step = MapReduce().build(networks.workload(networks.perceptron, Noisy, 40), World())
    first, second = (part.inputs for part in step.source.at(0).stream(20))
    assert not torch.equal(first, second)
    assert torch.equal(first, next(step.source.at(0).stream(20)).inputs)


# The closure


def by_hand(world: World, workload: Workload) -> list[Tensor]:
    """torch's L-BFGS with ``step.backward`` as its closure, in a loop of one's own."""
    step = MapReduce(part=13).build(workload, world)
    (optimizer,) = step.optimizers.values()
    for number in range(3):
        assert step.data_shard is not None
        batch = step.source.at(number, step.data_shard)
        optimizer.step(lambda batch=batch: step.backward(batch))  # type: ignore[misc]
    return [p.detach() for p in step.model.parameters()]


def plain_lbfgs(workload: Workload, steps: int) -> tuple[list[float], list[nn.Parameter]]:
    """As anyone would write it: the losses, and the parameters."""
    torch.manual_seed(workload.seed)
    model = networks.perceptron().double()
    x, y = workload.data().tensors  # type: ignore[attr-defined]
    optimizer = strong_wolfe(model.named_parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return [float(optimizer.step(closure)) for _ in range(steps)], list(model.parameters())  # type: ignore[arg-type]


@pytest.mark.processes
def test_backward_is_the_closure_of_lbfgs() -> None:
    workload = whole_set(strong_wolfe)
    _, expected = plain_lbfgs(workload, 3)
    with by_value(networks):
        for found in on_ranks(by_hand, 2, workload):
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours - theirs).abs().max() <= EXACT


def test_lbfgs_on_one_device_has_the_bits_of_a_plain_loop() -> None:
    workload = whole_set(strong_wolfe, order="sequential")
    losses, expected = plain_lbfgs(workload, networks.STEPS)
    step = SingleDevice().build(workload, World())
    assert [float(step(batch)["loss"]) for batch in batches(step)] == losses
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(step.model.parameters(), expected, strict=True))


def test_the_example_comes_to_the_minimum_that_scikit_learn_finds() -> None:
    from sklearn.linear_model import LogisticRegression

    workload = load_workload(f"{EXAMPLE}:workload")
    step = MapReduce(part=100).build(workload, World())
    for batch in batches(step):
        step(batch)
    x, y = (t.numpy() for t in step.source.dataset.tensors)  # type: ignore[attr-defined]
    expected = LogisticRegression(C=1 / (len(x) * 1e-3), tol=1e-8, max_iter=10_000).fit(x, y)
    weight, _ = step.model.parameters()
    worst = (weight.detach() - torch.from_numpy(expected.coef_)).abs().max()
    assert worst < 1e-2


# Its state


def go_on(world: World, workload: Workload, states: list[State], steps: int, part: int = 13) -> State:
    step = MapReduce(part=part).build(workload, world)
    if states:
        step.load_state_dict(states[-1])
    stop = step.done + steps
    for batch in batches(step, stop=stop):
        step(batch)
    return step.state_dict()


def assert_same(found: State, expected: State, bound: float = 0.0) -> None:
    left, right = dict(found.tensors()), dict(expected.tensors())
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert (left[name] - tensor).abs().max() <= bound * max(1.0, float(tensor.abs().max())), name
    if bound == 0.0:
        assert found.settings == expected.settings


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", [lbfgs, strong_wolfe, networks.momentum])
def test_a_state_of_lbfgs_goes_on_with_the_same_bits_and_at_any_number_of_workers(optimizer: Any) -> None:
    workload = whole_set(optimizer)
    with by_value(networks):
        whole = on_ranks(go_on, 2, workload, [], 6)[0]
        first = on_ranks(go_on, 2, workload, [], 3)[1]
        assert_same(on_ranks(go_on, 2, workload, [first], 3)[0], whole)
        assert_same(on_ranks(go_on, 3, workload, [first], 3)[0], whole, 1e-9)


@pytest.mark.processes
def test_a_run_with_lbfgs_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    workload = replace(whole_set(strong_wolfe), steps=3, schedule=None)
    options: dict[str, Any] = {"launcher": apportion.local(workers=2, threads=1)}
    with by_value(networks), by_value(sys.modules[__name__]):
        apportion.train(workload, "map_reduce(part=13)", run_dir=tmp_path / "a", **options)
        longer = replace(workload, steps=6)
        apportion.train(longer, "map_reduce(part=13)", run_dir=tmp_path / "a", resume=True, **options)
        apportion.train(longer, "map_reduce(part=13)", run_dir=tmp_path / "b", **options)
    for file in ("model", "optimizer"):
        found, expected = (load_file(tmp_path / run / "checkpoints" / "latest" / f"{file}.safetensors") for run in "ab")
        assert len(expected) > 3
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), file


# Deaths


TEN_OR_A_HUNDRED = [10, pytest.param(100, marks=pytest.mark.slow)]


def disturbed(optimizer: Any = networks.momentum, *, steps: int) -> Workload:
    model = lambda: nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))  # noqa: E731
    data = lambda: TensorDataset(networks.numbers(EXAMPLES, 10), networks.classes(EXAMPLES, 3))  # noqa: E731
    schedule = lambda o, total: torch.optim.lr_scheduler.CosineAnnealingLR(o, total)  # noqa: E731
    return networks.workload(model, data, 61, optimizer=optimizer, steps=steps, schedule=schedule)


def on_slots(workload: Workload, workers: int, killed: list[slots.Kill], *, replaced: bool = True) -> slots.Outcome:
    with by_value(networks), by_value(sys.modules[__name__]):
        return slots.on_slots(slots.train, workers, MapReduce(part=11), workload, killed=killed, replaced=replaced)


def assert_nothing_changes(workload: Workload, workers: int, killed: list[slots.Kill]) -> slots.Outcome:
    """Compared with the run that is left in peace."""
    expected, _ = on_slots(workload, workers, []).results[0]
    outcome = on_slots(workload, workers, killed)
    assert outcome.kills == len(killed)
    assert expected.step == workload.steps
    for state, _ in outcome.results:
        assert_same(state, expected)
    return outcome


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("many", TEN_OR_A_HUNDRED)
@pytest.mark.parametrize(("workers", "seed"), [(2, 0), (3, 1)])
@pytest.mark.thorough
def test_deaths_at_random_moments_change_no_bit(workers: int, seed: int, many: int) -> None:
    steps = 100 + 2 * many
    outcome = assert_nothing_changes(disturbed(steps=steps), workers, slots.kills(many, steps, workers, seed=seed))
    assert outcome.changes > many / 3


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("many", TEN_OR_A_HUNDRED)
@pytest.mark.thorough
def test_deaths_in_the_middle_of_a_line_search_change_no_bit(many: int) -> None:
    steps = 40 + 2 * many
    killed = slots.kills(many, steps, 2, seed=2, seconds=0.02)
    assert_nothing_changes(disturbed(strong_wolfe, steps=steps), 2, killed)


@pytest.mark.processes
def test_the_death_of_all_workers_at_once_changes_no_bit() -> None:
    killed = [slots.Kill(step, 0.0, slot) for step in (10, 20, 25) for slot in range(3)]
    assert_nothing_changes(disturbed(steps=40), 3, killed)


def keep(world: World, progress: Any, steps: int) -> int:
    """One rank keeps a state a step, whose every element is its step; whoever comes reads the last one."""
    kept = CommittedState(world)
    while True:
        try:
            state, step = kept.read(), 0
            if state is not None:
                step = state.step
                assert all((tensor == step).all() for _, tensor in state.tensors()), f"step {step} is torn"
                assert state.settings == {"of": step}
            while step < steps:
                step += 1
                world.group().barrier()
                if world.rank == 0:  # megabytes, so that the signal finds it writing; and growing
                    sizes = 0, 1, 1 << 20, 3000 * step
                    model = {f"of {size}": torch.full((size,), float(step)) for size in sizes}
                    kept.write(State(step=step, model=model, settings={"of": step}))
                progress[world.slot] = step
            world.group().barrier()
            return step
        except MembershipChanged:
            world = slots._rejoined(world)


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.thorough
def test_a_death_in_the_middle_of_keeping_leaves_the_state_before() -> None:
    killed = [replace(kill, slot=0) for kill in slots.kills(30, 400, 2, seed=4, seconds=0.004)]
    with by_value(sys.modules[__name__]):
        outcome = slots.on_slots(keep, 2, 400, killed=killed)
    assert outcome.results == [400, 400]
    assert outcome.kills == 30
    assert outcome.changes > 10, "two deaths close together are one change, on a busy machine more often"


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", [networks.momentum, strong_wolfe])
@pytest.mark.thorough
def test_a_run_of_the_supervisors_goes_on_with_the_same_bits(
    optimizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[WorkerPool] = []
    monkeypatch.setattr(supervisor, "WorkerPool", lambda *made: pools.append(WorkerPool(*made)) or pools[-1])
    workload = disturbed(optimizer, steps=600 if optimizer is networks.momentum else 100)
    assert workload.steps is not None
    options: dict[str, Any] = {"launcher": apportion.local(workers=2, threads=1)}
    faults = killed = 0
    with by_value(networks), by_value(sys.modules[__name__]):
        apportion.train(workload, MapReduce(part=11), run_dir=tmp_path / "a", **options)
        for event in apportion.run(workload, MapReduce(part=11), run_dir=tmp_path / "b", **options):
            faults += event.kind == "fault"
            if event.kind == "step" and killed == faults < 3 and event.step < workload.steps * 0.8:
                os.kill(pools[-1].pids()[killed % 2], signal.SIGKILL)
                killed += 1
    assert faults == killed >= 1
    for file in ("model", "optimizer"):
        found, expected = (load_file(tmp_path / run / "checkpoints" / "latest" / f"{file}.safetensors") for run in "ba")
        assert len(expected) >= 4
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), file


class Counts(nn.Module):
    """A weight an example: it says how often, and with which share of its batch, the example was counted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXAMPLES, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.weight[index]


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("many", TEN_OR_A_HUNDRED)
def test_every_example_is_counted_once_a_pass_whoever_dies(many: int) -> None:
    steps = 100 + 2 * many
    workload = networks.workload(
        Counts,
        lambda: TensorDataset(torch.arange(EXAMPLES), torch.zeros(EXAMPLES)),
        EXAMPLES,
        loss=lambda outputs, targets: -outputs.mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=float(EXAMPLES)),
        steps=steps,
    )
    outcome = on_slots(workload, 3, slots.kills(many, steps, 3, seed=3))
    assert outcome.kills == many
    for state, _ in outcome.results:
        assert (state.model["weight"] - steps).abs().max() <= EXACT


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_those_who_are_left_go_on_as_a_run_of_their_number_does() -> None:
    workload = disturbed(steps=60)
    killed = [slots.Kill(20, 0.001, 2), slots.Kill(40, 0.0, 1)]
    state, sizes = on_slots(workload, 3, killed, replaced=False).results[0]
    assert sorted(set(sizes)) == [1, 2, 3]
    assert len(sizes) == 60, "every step was made once"
    states: list[State] = []
    with by_value(networks):
        for size, steps in itertools.groupby(sizes):
            states = [on_ranks(go_on, size, workload, states, len(list(steps)), 11)[0]]
    assert_same(state, states[0])
