"""Stages: cut anywhere, in micro-batches of any size and either order, they are the network of one device."""

from __future__ import annotations

import gc
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from killed import faults_of, saved
from proofs import EXACT, assert_equal
from ranks import apart, by_value, on_ranks
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.comm.world import World
from apportion.core.data.source import BatchSource
from apportion.core.strategy import State, Strategy
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.layer_placement import LayerPlacement
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.single_device import SingleDevice

pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]


def prove(workload: Workload, strategy: Strategy, workers: int, steps: int = 5) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, strategy, workers=workers, steps=steps)
    assert_equal(proof)


def workload(model: Callable[[], nn.Module], shape: tuple[int, ...], batch_size: int = 7, **options: Any) -> Workload:
    return networks.workload(model, networks.tabular(batch_size, *shape), batch_size, **options)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)
    )  # fmt: skip


class Skipping(nn.Module):
    """Values that are used again one, two and three layers on, in place too; the input is used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.layers[0](x))
        b = torch.tanh(self.layers[1](a))
        c = self.layers[2](b)
        c += a
        c = torch.relu_(c)
        d = self.layers[4](torch.sigmoid(self.layers[3](c))) * b + a
        return self.out(d + x.reshape(x.size(0), -1))


class Normalised(nn.Module):
    """A residual block whose normalisation has the statistics of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)) + x)
        return self.out(x.mean((2, 3)))


class Attending(nn.Module):
    """A small transformer, whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.place = nn.Parameter(torch.randn(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5), persistent=False)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        b, t = tokens.shape
        h = self.encoder(self.embed(tokens) + self.place[:t], self.mask)
        return self.out(h.reshape(b * t, 8)).view(b, t, 11).transpose(1, 2)


def attending(batch_size: int = 7, **options: Any) -> Workload:
    n = networks.rows(batch_size)
    data = lambda: TensorDataset(networks.classes(n, 11, 5), networks.classes(n, 11, 5, seed=2))  # noqa: E731
    return networks.workload(Attending, data, batch_size, **options)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(9, 6), nn.LSTM(6, 5, batch_first=True)
        self.second, self.out = nn.LSTM(5, 4, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h, (last, _) = self.first(self.embed(tokens))
        h, _ = self.second(h)
        return self.out(h[:, -1]) + last[0, :, :3]


def recurrent(batch_size: int = 7, **options: Any) -> Workload:
    n = networks.rows(batch_size)
    data = lambda: TensorDataset(networks.classes(n, 9, 6), networks.classes(n, 3))  # noqa: E731
    return networks.workload(Recurrent, data, batch_size, **options)


adam: dict[str, Any] = {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01), "clip_grad_norm": 0.5}
CASES: dict[str, Callable[[], Workload]] = {
    "perceptron": lambda: workload(perceptron, (10,)),
    "adam": lambda: workload(perceptron, (10,), **adam),
    "skipping": lambda: workload(Skipping, (6,)),
    "attending": lambda: attending(),
    "attending_adam": lambda: attending(**adam),
    "recurrent": lambda: recurrent(**adam),
    "tied": lambda: networks.cases["tied_weights"](7),
    "counted": lambda: networks.cases["counted_tokens_without_norm"](61),
    "masked": lambda: replace(networks.cases["a_shard_without_loss_terms"](3), model=networks.PlainTokens),
    "unused": lambda: networks.cases["parameters_without_optimizer"](7),
    "dict_inputs": lambda: networks.cases["dict_inputs"](7),
}


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("gpipe", 3), ("1f1b", 3)])
@pytest.mark.parametrize("name", CASES)
def test_two_stages_are_the_network_of_one_device(name: str, schedule: str, microbatches: int) -> None:
    prove(CASES[name](), PipelineParallel(schedule=schedule, microbatches=microbatches), 2)


FULL = {"skipping": Skipping, "perceptron": perceptron}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("name", "workers", "microbatches"), [("skipping", 4, 8), ("attending", 3, 2), ("recurrent", 3, 5)]
)
def test_values_travel_through_the_stages_between(name: str, workers: int, microbatches: int, schedule: str) -> None:
    """Micro-batches that do not divide the batch; a last batch of one row, shorter than they are many."""
    prove(CASES[name](), PipelineParallel(schedule=schedule, microbatches=microbatches), workers)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_recomputed_activations_are_the_same(schedule: str) -> None:
    prove(CASES["skipping"](), PipelineParallel(schedule=schedule, microbatches=3, recompute=True), 3)


def alike(name: str) -> Workload:
    made = CASES[name]() if name in CASES else networks.cases[name](7)
    return replace(made, precision="float64")


def between_hosts(world: World, name: str, strategy: Strategy) -> dict[str, Tensor]:
    """The weights after training with evaluations in between, as if each rank were on a host of its own."""
    own = apart()
    step = strategy.build(alike(name), own)
    for batch in apportion.batches(step):
        step(batch)
        step.predict(batch)
    weights = {key: value.clone() for key, value in step.state_dict().model.items()}
    step.close()
    own.close()
    return weights


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["skipping", "attending", "batch_norm_2d"])
def test_between_hosts_the_next_message_comes_while_a_stage_computes(name: str, schedule: Any) -> None:
    """What comes has another size where the batch is shorter, and in evaluation."""
    whole = {"batch_norm": "whole"} if name == "batch_norm_2d" else {}
    strategy = PipelineParallel(schedule=schedule, microbatches=3, **whole)
    expected = SingleDevice().build(alike(name), World())
    for batch in apportion.batches(expected):
        expected(batch)
    with by_value(networks):
        for weights in on_ranks(between_hosts, 2 if whole else 3, name, strategy):
            for key, value in expected.state_dict().model.items():
                torch.testing.assert_close(weights[key], value, rtol=0, atol=EXACT)


BATCH_NORM = ("batch_norm_2d", "batch_norm_cumulative", "batch_norm_used_twice", "coupled_examples")


@pytest.mark.parametrize("name", BATCH_NORM)
def test_layers_placed_on_workers_see_the_whole_batch(name: str) -> None:
    prove(networks.cases[name](7), LayerPlacement(), 2)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, adam])
def test_it_is_the_network_of_one_device_at_any_number_of_workers(workers: int, options: dict[str, Any]) -> None:
    model = lambda: Normalised()  # noqa: E731
    prove(workload(model, (2, 4, 4), 6, **options), LayerPlacement(), workers, 8)
    prove(workload(perceptron, (10,), 61, **options), PipelineParallel(), workers, 8)


# What a network may have


class Modes(nn.Module):
    """Computes otherwise in evaluation, with the same layers; dropout as a function (which would draw other numbers
    than one device: 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(10, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(self.first(x)), 0.0, self.training)
        h = self.second(h)
        if not self.training:
            h = 2 * h
        return self.out(h)


def frozen() -> nn.Module:
    model = perceptron()
    model[0].requires_grad_(False)
    model[4].requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model.register_buffer("kept", torch.ones(3))
    return model


def test_frozen_layers_and_weights_that_nothing_uses_are_somebodys_all_the_same() -> None:
    """The first stage has nothing to learn; weight decay moves what has no gradient nowhere."""
    prove(workload(frozen, (10,), clip_grad_norm=0.1), PipelineParallel(cuts=("1", "3"), microbatches=2), 3)


def test_batch_normalisation_that_is_frozen_may_be_cut() -> None:
    prove(networks.cases["batch_norm_frozen"](7), PipelineParallel(microbatches=3), 2)


class NormalisedBetween(nn.Module):
    """Layers around one normalisation, whose rows come flat and go as they are, with what has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(5, 6))
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
        self.norm, self.third, self.out = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, 5, 4)
        place = torch.tanh(self.place)
        h = torch.tanh(self.second(torch.relu(self.first(x)) + place))
        b, n = h.shape[0], h.numel()
        flat = self.norm(h.view(-1, 6)) * (n / n)
        h = torch.tanh(self.third(flat).view(b, 5, 6) + place)
        return self.out(h.mean(1))


NORMALISED: dict[str, tuple[Callable[[], Workload], tuple[str, ...]]] = {
    "between": (lambda: workload(NormalisedBetween, (5, 4)), ("second", "norm", "third")),
    "first": (
        lambda: workload(lambda: nn.Sequential(nn.BatchNorm1d(10), *perceptron()), (10,), **adam), ("3", "5")
    ),
    "last": (
        lambda: workload(lambda: nn.Sequential(*perceptron(), nn.BatchNorm1d(3)), (10,), 8), ("2", "6")
    ),
    "everywhere": (lambda: workload(Normalised, (2, 4, 4)), ("conv2",)),
}  # fmt: skip


def two_at_the_end(given: Workload) -> Workload:
    """A single row of one place has no variance."""
    data = given.data()
    return replace(given, data=lambda: TensorDataset(*(t[1:][: given.batch_size * 2 + 2] for t in data.tensors)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", NORMALISED)
def test_batch_normalisation_has_the_whole_batchs_statistics_where_asked_for(name: str, schedule: str) -> None:
    made, cuts = NORMALISED[name]
    strategy = PipelineParallel(schedule=schedule, microbatches=3, cuts=cuts, batch_norm="whole")
    prove(two_at_the_end(made()), strategy, len(cuts) + 1)


@pytest.mark.parametrize("name", ["batch_norm_used_twice", "batch_norm_cumulative", "buffers_in_a_layer"])
def test_whatever_changes_with_a_forward_pass_sees_the_batch_once(name: str) -> None:
    counting = lambda: nn.Sequential(nn.Linear(10, 8), Counted(), nn.Linear(8, 3))  # noqa: E731
    cases = {**networks.cases, "buffers_in_a_layer": lambda size: workload(counting, (10,), size)}
    prove(cases[name](7), PipelineParallel(microbatches=3, batch_norm="whole"), 2)


class Counted(nn.Module):
    """A layer that cannot be followed, and tells its calls apart."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        return torch.tanh(x) / self.calls if bool(self.calls > 0) else x


@pytest.mark.parametrize("name", ["batch_norm_2d", "buffers", "skipping"])
def test_one_worker_computes_as_it_is_asked_to(name: str) -> None:
    cases = {**networks.cases, "skipping": lambda size: workload(Skipping, (6,), size)}
    if name == "skipping":
        prove(cases[name](7), PipelineParallel(microbatches=3, recompute=True), 1)
    else:
        prove(cases[name](7), PipelineParallel(microbatches=3, batch_norm="whole"), 1)


@pytest.mark.parametrize("name", ["augmented", "draws_in_the_data", "own_collate", "class_weights", "parameter_groups"])
def test_data_and_losses_of_all_kinds_go_through_a_pipeline(name: str) -> None:
    """Two stages at most: some of these networks have no third layer."""
    prove(networks.cases[name](7), PipelineParallel(microbatches=2), 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", ["perceptron", "adam", "skipping", "attending_adam", "recurrent"])
def test_every_schedule_at_every_size(name: str, workers: int, microbatches: int, schedule: str) -> None:
    prove(CASES[name](), PipelineParallel(schedule=schedule, microbatches=microbatches), workers, 8)


def test_bfloat16_differs_by_its_own_rounding() -> None:
    made = workload(perceptron, (10,), 61)
    narrow = lambda: TensorDataset(*(t.float() if t.is_floating_point() else t for t in made.data().tensors))  # type: ignore[attr-defined] # noqa: E731
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(
            replace(made, data=narrow, precision="bfloat16"), PipelineParallel(microbatches=3), workers=2, steps=5
        )
    assert proof.holds
    assert proof.rounds[1].worst.relative < 3e-2


def predicted(world: World, strategy: Strategy, given: Workload) -> tuple[list[float], Any]:
    """The losses told; the outputs of a batch in evaluation."""
    step = strategy.build(given, world)
    assert step.data_shard is not None
    losses = [step(step.source.at(n, step.data_shard))["loss"].item() for n in range(4)]
    before = dict(step.state_dict().tensors())
    outputs = step.predict(step.source.at(4, step.data_shard))
    assert all(torch.equal(t, before[name]) for name, t in step.state_dict().tensors())
    return losses, outputs


@pytest.mark.parametrize(
    ("strategy", "workers"), [(LayerPlacement(), 3), (PipelineParallel(microbatches=3), 2), (PipelineParallel(), 1)]
)
@pytest.mark.parametrize("name", ["skipping", "counted", "modes", "normalised"])
def test_losses_and_predictions_are_those_of_one_device(name: str, strategy: Strategy, workers: int) -> None:
    cases = {
        **CASES,
        "modes": lambda: workload(Modes, (10,)),
        "normalised": lambda: workload(Normalised, (2, 4, 4)),
    }
    if name == "normalised" and strategy != LayerPlacement():
        return
    if name == "counted":
        workers = min(workers, 2)
    with by_value(networks):
        ((losses, outputs),) = on_ranks(predicted, 1, SingleDevice(), cases[name]())
        answers = on_ranks(predicted, workers, strategy, cases[name]())
    assert all(told == pytest.approx(losses, rel=1e-11) for told, _ in answers)
    (found,) = [outputs for _, outputs in answers if outputs is not None]
    assert torch.allclose(found, outputs, rtol=1e-11)


# Everything that a workload can hold

_BATCH, _UPDATE, _STATE = "statistics of a part", "update= asks for the gradient", "go back from the last stage"
_UNSEEN = "cannot be followed"
REFUSED = {
    ("two_optimizers", "layer"): _UPDATE,
    ("two_optimizers", "pipeline"): _UPDATE,
    ("update_with_a_shard_without_loss_terms", "layer"): _UPDATE,
    ("update_with_a_shard_without_loss_terms", "pipeline"): _UPDATE,
    ("carried_state", "layer"): _STATE,
    ("carried_state", "pipeline"): _STATE,
    ("few_lanes", "layer"): _STATE,
    ("few_lanes", "pipeline"): _STATE,
    ("buffers", "layer"): _UNSEEN,
    ("buffers", "pipeline"): "would change the buffer calls more than once a step",
    ("frozen_and_unused_parameters", "layer"): _UNSEEN,
    ("frozen_and_unused_parameters", "pipeline"): _UNSEEN,
    ("coupled_examples", "pipeline"): "couples examples",
    ("counted_tokens", "pipeline"): _BATCH,
    ("a_shard_without_loss_terms", "pipeline"): _BATCH,
} | {
    (name, "pipeline"): _BATCH
    for name in networks.cases
    if name.startswith("batch_norm_") and name != "batch_norm_frozen"
}
"""By more than one worker."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [LayerPlacement(), PipelineParallel()])
@pytest.mark.parametrize("name", networks.cases)
def test_every_workload_is_the_network_of_one_device_or_refused(name: str, strategy: Strategy) -> None:
    refusal = REFUSED.get((name, str(strategy).partition("_")[0]))
    if refusal is None:
        prove(networks.cases[name](61), strategy, 2, 3)
    else:
        refused(networks.cases[name](61), strategy, refusal)


# The state


def go_on(world: World, strategy: Strategy, given: Workload, state: State | None, steps: int) -> State:
    step = strategy.build(given, world)
    if state is not None:
        step.load_state_dict(state)
    for n in range(step.done, step.done + steps):
        assert step.data_shard is not None
        step(step.source.at(n, step.data_shard))
    return step.state_dict()


@pytest.mark.parametrize("name", ["attending", "adam", "normalised"])
def test_a_state_goes_on_under_other_strategies_and_other_cuts(name: str) -> None:
    cases = {**CASES, "normalised": lambda: workload(Normalised, (2, 4, 4))}
    given = cases[name]()
    other = LayerPlacement() if name == "normalised" else PipelineParallel(microbatches=3)
    journey: list[tuple[Strategy, int, int]] = [
        (other, 2, 2), (DataParallel(), 2, 1), (other, 4, 2), (SingleDevice(), 1, 1), (LayerPlacement(), 3, 1),
    ]  # fmt: skip
    with by_value(networks):
        (whole,) = on_ranks(go_on, 1, SingleDevice(), given, None, 7)
        state = None
        for strategy, workers, steps in journey:
            states = on_ranks(go_on, workers, strategy, given, state, steps)
            state = states[-1]
            for rank in states:
                assert all(torch.equal(a, b) for (_, a), (_, b) in zip(rank.tensors(), state.tensors(), strict=True))
    assert state is not None
    found, expected = dict(state.tensors()), dict(whole.tensors())
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].double() - tensor.double()).abs().max() <= EXACT, key
    assert state.settings == whole.settings


# Memory


def wide() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(96, 96), nn.Tanh())), nn.Linear(96, 3))


def held(world: World, strategy: Strategy) -> tuple[int, int, int]:
    """Bytes held, the tensors of a weight's size that live in this process, micro-batches in flight."""
    step: Any = strategy.build(workload(wide, (96,), 16, **adam), world)
    for n in range(2):
        step(step.source.at(n, step.data_shard))
    gc.collect()
    found = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.shape == (96, 96)]
    return step.held().own, len({t.data_ptr() for t in found}), getattr(step._own.part, "most_in_flight", 0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_holds_its_own_layers_alone_and_as_many_micro_batches_as_its_schedule_says(schedule: str) -> None:
    strategy = PipelineParallel(schedule=schedule, microbatches=8, cuts=("4", "8"))
    with by_value(networks):
        ((whole, _, _),) = on_ranks(held, 1, PipelineParallel(microbatches=8))
        answers = on_ranks(held, 3, strategy)
    assert sum(own for own, _, _ in answers) == whole
    assert [weights for _, weights, _ in answers] == [6, 6, 6], "two layers, and Adam's two slots of each"
    assert [flight for _, _, flight in answers] == ([8, 8, 8] if schedule == "gpipe" else [3, 2, 1])


ROWS, WIDTH = 1024, 64


def narrow() -> nn.Module:
    """Six layers whose activations are far larger than their weights, and one more."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def peak(world: World, strategy: Strategy) -> float:
    """The most that a step takes beside the batch and what it leaves, in activations of one layer and micro-batch."""
    step: Any = strategy.build(workload(narrow, (WIDTH,), ROWS), world)
    step(step.source.at(0, step.data_shard))
    batch = step.source.at(1, step.data_shard)
    assert len(batch.inputs) == ROWS
    gc.collect()
    with profile(profile_memory=True) as profiled:
        step(batch)
    events = [e for e in profiled.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    events.sort(key=lambda e: e.start_ns())
    return max(itertools.accumulate(e.nbytes() for e in events)) / (ROWS // 8 * WIDTH * 8)


def test_activations_take_no_more_memory_than_the_schedule_promises() -> None:
    """Of each micro-batch a stage keeps what its two Tanh gave, and not what it handed on. Gradients, and what comes
    and goes meanwhile, are less than six activations."""
    for schedule, flights in (("gpipe", (8, 8, 8)), ("1f1b", (3, 2, 1))):
        found = on_ranks(peak, 3, PipelineParallel(schedule=schedule, microbatches=8, cuts=("5", "9")))
        for own, most in zip(flights, found, strict=True):
            assert 2.0 * own <= most <= 2.0 * own + 6.0, (schedule, found)


def test_a_batch_that_was_let_go_of_is_loaded_again() -> None:
    """What a pipeline was built with is not kept beside the batches that come."""
    batch = BatchSource(networks.cases["augmented"](7)).at(0)
    inputs = batch.inputs.clone()
    gone = weakref.ref(batch.inputs)
    batch.let_go()
    assert gone() is None
    assert torch.equal(batch.inputs, inputs)


class Noted(nn.Module):
    """Tells that it was called."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return torch.tanh(x)


def forwards(world: World, strategy: Strategy) -> list[int]:
    """The rows of each forward pass of a step."""
    calls: list[int] = []
    made = lambda: nn.Sequential(nn.Linear(10, 8), Noted(calls), nn.Linear(8, 3))  # noqa: E731
    step: Any = strategy.build(workload(made, (10,), 6), world)
    batch = step.source.at(0, step.data_shard)
    calls.clear()
    step(batch)
    return calls


def test_one_worker_recomputes_where_it_is_asked_to() -> None:
    assert on_ranks(forwards, 1, PipelineParallel(microbatches=3)) == [[2, 2, 2]]
    assert on_ranks(forwards, 1, PipelineParallel(microbatches=3, recompute=True)) == [[2, 2, 2, 2, 2, 2]]


def counts(world: World, strategy: Strategy) -> int:
    """How often the terms are counted in a step."""
    asked: list[int] = []

    def terms(targets: Tensor) -> float:
        asked.append(len(targets))
        return float(len(targets))

    step: Any = strategy.build(workload(perceptron, (10,), 12, count=terms), world)
    asked.clear()
    step(step.source.at(0, step.data_shard))
    return len(asked)


def test_terms_are_counted_once_a_micro_batch_and_once_a_batch() -> None:
    assert on_ranks(counts, 2, PipelineParallel(microbatches=4)) == [0, 5]
    assert on_ranks(counts, 2, PipelineParallel(microbatches=1)) == [0, 1]


# What goes wrong


def refused(given: Workload, strategy: Strategy, rule: str, workers: int = 2) -> None:
    with pytest.raises(ValueError, match=rule), by_value(networks), by_value(sys.modules[__name__]):
        apportion.check(given, strategy, workers=workers, steps=1)


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if bool((x > 0).any()) else self.layer(-x)


class Elsewhere(nn.Module):
    """Evaluated by a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Linear(10, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h) if self.training else self.other(h)


class Centred(nn.Module):
    """A normalisation of its own: nobody's class says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(F.dropout(h - h.mean(0), 0.0))


class Own(torch.optim.SGD):
    """Who knows what it looks at."""


def test_what_cannot_be_cut_is_refused_with_the_layer_the_reason_and_the_cure() -> None:
    cut, cases = PipelineParallel(microbatches=2), networks.cases
    refused(cases["batch_norm_2d"](7), cut, "microbatches=2 would give 1 the statistics of a part.*=1.*Group")
    refused(cases["coupled_examples"](7), cut, "under a loss that couples examples: use microbatches=1, or layer")
    refused(
        cases["carried_state"](7), cut, "would go back from the last stage.*use wavefront_parallel, or data_parallel"
    )
    refused(cases["two_optimizers"](7), LayerPlacement(), "update= asks for the gradient.*use data_parallel")
    refused(cases["buffers"](7), LayerPlacement(), "the forward of Counting cannot be followed.*changes its own calls")
    refused(workload(Undecided, (10,)), cut, "the forward of Undecided cannot.*control flow; so it cannot be cut")
    refused(workload(Elsewhere, (10,)), LayerPlacement(), "Elsewhere calls other layers in evaluation.*or use data")
    refused(cases["mlp"](7), cut, r"into 3 stages at most, and there are 4 workers: use workers<=3", 4)
    refused(workload(perceptron, (10,)), LayerPlacement(cuts=("9",)), "unknown layer '9'; a stage may")
    coupled = "microbatches=2 would change what Centred computes, .*: use microbatches=1, or layer_placement"
    for workers in (1, 2):
        refused(workload(Centred, (10,)), cut, coupled, workers)
    own = lambda p: Own([q for _, q in p], lr=0.1)  # noqa: E731
    refused(workload(perceptron, (10,), optimizer=own), cut, "Own is not known to update each parameter by itself, and")
    tall = PipelineParallel(recompute=True, microbatches=1)
    for how in (tall, replace(tall, microbatches=2, batch_norm="whole")):
        refused(
            cases["batch_norm_2d"](7), how, "recompute=True would have 1 see every batch twice: use recompute=False"
        )
    refused(cases["batch_norm_2d"](7), tall, "recompute=True would have 1 see every batch twice", 1)


def test_parameters_that_do_not_fit_each_other_are_refused() -> None:
    mlp = networks.cases["mlp"](7)
    with pytest.raises(ValueError, match=r'schedule=\'zigzag\' must be "gpipe" or "1f1b"'):
        PipelineParallel(schedule="zigzag")
    with pytest.raises(ValueError, match="batch_norm='part' must be \"whole\", or None"):
        PipelineParallel(batch_norm="part")
    for name in ("microbatches", "stages"):
        with pytest.raises(ValueError, match=f"{name}=0 must be a whole number of at least 1"):
            PipelineParallel(**{name: 0})
    with pytest.raises(ValueError, match="stages=3 needs as many workers, and there are 2: use workers=3"):
        PipelineParallel(stages=3).build(mlp, World(size=2))
    with pytest.raises(ValueError, match=r"make 3 stages, and there are 2 workers: use workers=3, or name 1 layers"):
        LayerPlacement(cuts=("1", "2")).build(mlp, World(size=2))
    with pytest.raises(ValueError, match=r'microbatches=2 would give 1 .* a part.*use batch_norm="whole", micro'):
        PipelineParallel(microbatches=2).build(networks.cases["batch_norm_2d"](7), World())


# A worker's death


class Paced(nn.Module):
    """Takes its time, and is a layer that cannot be followed."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == x).all()):
            time.sleep(0.002)
        return torch.tanh(x)


def paced() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 9), Paced(), nn.Linear(9, 9), nn.Dropout(0.2), Paced(), nn.Linear(9, 9), Paced(), nn.Linear(9, 3)
    )  # fmt: skip


CUTS = {2: ("5",), 3: ("2", "5")}
"""Not measured: another cut is another order of sums, and other draws of dropout."""


SAME_CODE = (3, True), (2, False)


def trained(strategy: Strategy, workers: int, run_dir: Path, doomed: Sequence[int] = ()) -> list[apportion.Event]:
    given = replace(workload(paced, (10,), 8, **adam), steps=120)
    with by_value(sys.modules[__name__]):
        return faults_of(given, strategy, workers, run_dir, doomed)


@pytest.mark.parametrize(
    ("workers", "placed"), [(2, True), (3, False), *(pytest.param(*at, marks=pytest.mark.slow) for at in SAME_CODE)]
)
@pytest.mark.thorough
def test_any_rank_may_be_killed_and_nothing_is_lost(workers: int, placed: bool, tmp_path: Path) -> None:
    cuts = CUTS[workers]
    strategy = LayerPlacement(cuts=cuts) if placed else PipelineParallel(cuts=cuts, microbatches=3)
    assert trained(strategy, workers, tmp_path / "whole") == []
    faults = trained(strategy, workers, tmp_path / "run", range(workers))
    assert [fault.data["rank"] for fault in faults] == list(range(workers))
    assert all(fault.data["action"].startswith("replaced in ") for fault in faults), faults
    found, expected = saved(tmp_path / "run"), saved(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
