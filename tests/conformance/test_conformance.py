"""Every strategy gives the network that one device gives: in float64, on real processes, after 8 steps."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from proofs import EXACT, assert_equal
from ranks import by_value, on_ranks
from torch.utils.data import TensorDataset

import apportion
from apportion import Evaluation, Workload, accuracy
from apportion.comm.world import World
from apportion.core.address import load_workload
from apportion.core.data.source import BatchSource
from apportion.core.strategy import State, Strategy
from apportion.core.value import find, names
from apportion.runtime.proof.proof import Proof
from apportion.runtime.worker.evaluation import evaluate
from apportion.strategies.data_parallel import DataParallel

pytestmark = pytest.mark.processes

SPLITS = (
    "conv_parallel", "hybrid_parallel", "layer_placement", "pipeline_parallel", "tensor_parallel", "wavefront_parallel",
)  # fmt: skip
"""What cuts a network does so to some networks, and refuses the others."""
STRATEGIES = [
    name for name in names("apportion.strategies") if find(name, "apportion.strategies")().exact and name not in SPLITS
]
"""The others are held against references of their own, in their own tests."""
STEPS = networks.STEPS
EXAMPLES = Path(__file__).parents[2] / "examples"


def layouts(strategy: str) -> list[int]:
    return [1] if find(strategy, "apportion.strategies").one_process else [1, 2, 3]  # type: ignore[attr-defined]


def prove(workload: Workload, strategy: str | Strategy, workers: int) -> Proof:
    with by_value(networks):
        return apportion.check(workload, strategy, workers=workers, steps=STEPS)


def assert_exact(proof: Proof) -> None:
    assert assert_equal(proof).steps == STEPS


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [64, 61])
@pytest.mark.parametrize("name", ["cifar10", "resnet20_cifar10"])
def test_the_examples_equal_one_device(name: str, batch_size: int, workers: int) -> None:
    """On made-up images, with a short last batch of one."""
    example = load_workload(str(EXAMPLES / f"{name}.py") + ":workload")
    n = networks.rows(batch_size)
    images = torch.randint(0, 256, (n, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    workload = replace(
        example,
        data=lambda: TensorDataset(images.float(), networks.classes(n, 10)),
        batch_size=batch_size,
        evaluation=None,
        steps=STEPS,
        precision="float64",
    )
    with by_value(sys.modules[example.optimizer.__module__]), by_value(sys.modules[__name__]):
        assert_exact(prove(workload, "data_parallel", workers))


FAST = [(s, w, {1: 64, 2: 61, 3: 64}[w]) for s in STRATEGIES for w in layouts(s)]
REST = [(s, w, {1: 61, 2: 64, 3: 61}[w]) for s in STRATEGIES for w in layouts(s)]
BOTH = ("mlp", "cnn", "batch_norm_2d", "counted_tokens", "carried_state")
WHOLE = ("single_device", "data_parallel")
"""On which every network is run always: what the others share is theirs."""
_PART, _COUPLED = "the statistics of a part", "couples examples"
_STATE, _UPDATE = "a recurrent state that is carried", "an update= of your own"
REFUSED = {
    ("map_reduce", "a_shard_without_loss_terms"): _PART,
    ("map_reduce", "counted_tokens"): _PART,
    ("map_reduce", "coupled_examples"): _COUPLED,
    ("map_reduce", "two_optimizers"): _UPDATE,
    ("map_reduce", "update_with_a_shard_without_loss_terms"): _UPDATE,
    ("map_reduce", "carried_state"): _STATE,
    ("map_reduce", "few_lanes"): _STATE,
    ("fully_sharded", "two_optimizers"): "update= asks for gradients of whole parameters",
    ("fully_sharded", "update_with_a_shard_without_loss_terms"): "update= asks for gradients of whole parameters",
    ("fully_sharded", "sparse_embeddings"): "sparse gradients",
} | {
    ("map_reduce", name): _PART
    for name in networks.cases
    if name.startswith("batch_norm_") and name != "batch_norm_frozen"
}
"""What a strategy says that cannot do it exactly."""


def everything() -> list[object]:
    """Always what is two of these: one of a few networks, by data_parallel, at three workers. Else when asked for."""
    made: list[object] = []
    for name in networks.cases:
        for strategy, workers, batch_size in FAST:
            always = (name in BOTH) + (strategy in WHOLE) + (workers == 3) >= 2
            made.append(pytest.param(name, strategy, workers, batch_size, marks=() if always else pytest.mark.slow))
        for strategy, workers, batch_size in REST:
            made.append(pytest.param(name, strategy, workers, batch_size, marks=pytest.mark.slow))
    return made


@pytest.mark.parametrize(("name", "strategy", "workers", "batch_size"), everything())
@pytest.mark.cases(16)
def test_equals_one_device(name: str, strategy: str, workers: int, batch_size: int) -> None:
    refusal = REFUSED.get((strategy, name))
    if refusal is None:
        assert_exact(prove(networks.cases[name](batch_size), strategy, workers))
        return
    with pytest.raises(ValueError, match=refusal):
        prove(networks.cases[name](batch_size), strategy, workers)


IMAGES = ("cnn", *(f"batch_norm_{kind}" for kind in ("1d", "2d", "3d", "cumulative", "without_weights")),
          "batch_norm_without_running_statistics", "batch_norm_frozen", "batch_norm_channels_last")  # fmt: skip
RECURRENT = ("carried_state", "few_lanes")
_CALLS = ("two_optimizers", "update_with_a_shard_without_loss_terms")
_UNSEEN = (*_CALLS, *RECURRENT, "buffers", "frozen_and_unused_parameters")
_WHOLE_BATCH = ("coupled_examples", "counted_tokens", "a_shard_without_loss_terms")
CAN = {
    "conv_parallel": IMAGES,
    "hybrid_parallel": IMAGES,
    "layer_placement": tuple(name for name in networks.cases if name not in _UNSEEN),
    "pipeline_parallel": tuple(
        name
        for name in networks.cases
        if name not in (*_UNSEEN, *_WHOLE_BATCH) and (name == "batch_norm_frozen" or not name.startswith("batch_norm_"))
    ),
    "tensor_parallel": tuple(name for name in networks.cases if name not in _CALLS),
    "wavefront_parallel": RECURRENT,
}
"""What each of them must be able to cut in two."""


def cuts() -> list[object]:
    made: list[object] = []
    for strategy in SPLITS:
        for name in networks.cases:
            marks = () if name in BOTH else pytest.mark.slow
            made.append(pytest.param(name, strategy, marks=marks))
    return made


@pytest.mark.parametrize(("name", "strategy"), cuts())
@pytest.mark.cases(8)
def test_a_network_that_is_cut_equals_one_device_or_is_refused(name: str, strategy: str) -> None:
    workload = networks.cases[name](61)
    if name in CAN[strategy]:
        assert_exact(prove(workload, strategy, 2))
        return
    with pytest.raises(ValueError, match=r"data_parallel|use "):  # the cure
        prove(workload, strategy, 2)


@pytest.mark.parametrize(
    ("workers", "microbatches"),
    [(1, 4), (2, 3), *(pytest.param(*at, marks=pytest.mark.slow) for at in ((1, 2), (1, 3), (2, 2), (2, 4)))],
)
@pytest.mark.parametrize(
    "name", ["mlp", "counted_tokens_without_norm", "carried_state", "frozen_and_unused_parameters"]
)
def test_microbatches_change_nothing(name: str, microbatches: int, workers: int) -> None:
    assert_exact(prove(networks.cases[name](61), DataParallel(microbatches=microbatches), workers))


def test_microbatches_are_refused_where_they_would_change_the_network() -> None:
    with pytest.raises(ValueError, match="statistics of a part of the batch"):
        prove(networks.cases["batch_norm_2d"](64), DataParallel(microbatches=2), 2)
    with pytest.raises(ValueError, match="couples examples"):
        prove(networks.cases["coupled_examples"](64), DataParallel(microbatches=2), 2)
    with pytest.raises(ValueError, match="under update="):
        prove(networks.cases["two_optimizers"](64), DataParallel(microbatches=2), 2)


def test_the_micro_batches_of_a_single_stage_are_refused_where_they_would_change_the_network() -> None:
    for name, what in (("update_with_a_shard_without_loss_terms", "update="), ("carried_state", "that is carried")):
        with pytest.raises(ValueError, match=f"would cut the batch under .*{what}.* use microbatches=1"):
            prove(networks.cases[name](61), "pipeline_parallel", 1)


def in_float32(name: str, **changes: Any) -> Workload:
    """The same workload as users have it: float32 data and weights."""
    made = networks.cases[name](61)
    data = made.data

    def narrow() -> Any:
        return TensorDataset(*(t.float() if t.is_floating_point() else t for t in data().tensors))  # type: ignore[attr-defined]

    return replace(made, data=narrow, **{"precision": "float32", **changes})


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["mlp", "batch_norm_2d", "carried_state", "clipped", "two_optimizers", "adam"])
def test_the_runs_own_precision_differs_by_its_own_rounding(name: str, precision: str) -> None:
    if name == "carried_state":
        try:  # of float16 there is none on the CPU; of bfloat16 where the processor can compute with it
            with torch.autocast("cpu", getattr(torch, precision), enabled=precision != "float32"):
                torch.nn.LSTM(4, 4)(torch.zeros(2, 1, 4))
        except RuntimeError as error:
            pytest.skip(f"torch has no {precision} LSTM on this CPU: {str(error).partition('.')[0]}")
    proof = prove(in_float32(name, precision=precision), "data_parallel", 2)
    wide, own = proof.rounds
    assert wide.holds
    assert wide.worst.relative <= EXACT, wide
    assert own.precision == precision
    assert own.verdict == "equal" or (own.verdict == "undecided" and precision != "float32"), own
    assert own.share < {"float32": 1e-4, "bfloat16": 3e-1, "float16": 1e-1}[precision]  # of the largest change


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["mlp", "batch_norm_2d"])
def test_a_compiled_network_is_the_same_network(name: str) -> None:
    proof = prove(in_float32(name, compile=True), "data_parallel", 2)
    assert proof.holds
    assert proof.rounds[1].verdict == "equal"
    assert not proof.by_design


# What a state holds, and where it can be loaded


def go_on(world: World, workload: Workload, states: list[State], steps: int) -> State:
    """From the last of these states; loaded and given again before anything else."""
    step = DataParallel().build(workload, world)
    start = 0
    if states:
        step.load_state_dict(states[-1])
        start = states[-1].step
        assert step.state_dict().step == start
        step.load_state_dict(step.state_dict())
    for number in range(start, start + steps):
        assert step.data_shard is not None
        step(step.source.at(number, step.data_shard))
    return step.state_dict()


def assert_same(found: State, expected: State, bound: float) -> None:
    left, right = dict(found.tensors()), dict(expected.tensors())
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert (left[name].double() - tensor.double()).abs().max() <= bound, name
    assert found.settings == expected.settings


@pytest.mark.parametrize("name", ["carried_state", "few_lanes", "batch_norm_cumulative", "two_optimizers", "one_cycle"])
def test_a_state_goes_on_at_any_number_of_workers(name: str) -> None:
    workload = networks.cases[name](61)
    with by_value(networks):
        whole = on_ranks(go_on, 1, workload, [], 8)[0]
        first = on_ranks(go_on, 3, workload, [], 3)[2]
        second = on_ranks(go_on, 2, workload, [first], 2)[1]
        third = on_ranks(go_on, 1, workload, [second], 2)[0]
        last = on_ranks(go_on, 3, workload, [third], 1)[0]
    assert_same(last, whole, 1e-12)


# Metrics


class Recall:
    """Of class 1: no mean over examples."""

    def __init__(self) -> None:
        self.found = self.there = 0

    def update(self, outputs: Any, targets: Any) -> None:
        is_one = targets == 1
        self.there += int(is_one.sum())
        self.found += int((is_one & (outputs.argmax(1) == 1)).sum())

    def compute(self) -> float:
        return self.found / self.there


class Order:
    """Sees every row, in order."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def update(self, outputs: Any, targets: Any) -> None:
        assert len(outputs) == len(targets)
        self.seen += targets.tolist()

    def compute(self) -> float:
        return float(sum(place * value for place, value in enumerate(self.seen)))


def measured(world: World, workload: Workload, examples: int, batch_size: int) -> Mapping[str, float]:
    held_out = TensorDataset(networks.numbers(examples, 2, 4, 4, seed=8), networks.classes(examples, 3, seed=9))
    evaluation = Evaluation(
        data=lambda: held_out,
        metrics={
            "accuracy": accuracy,
            "loss": torch.nn.functional.cross_entropy,
            "recall": Recall,
            "order": lambda: Order(),
        },
        batch_size=batch_size,
    )
    workload = replace(workload, evaluation=evaluation)
    step = DataParallel().build(workload, world)
    source = BatchSource.of_evaluation(workload, dtype=torch.float64, rank=world.rank)
    before = dict(step.state_dict().tensors())
    results = evaluate(step, evaluation, source, world.group(), lambda: None)
    assert all(torch.equal(t, before[name]) for name, t in step.state_dict().tensors()), "evaluation changes nothing"
    return results


@pytest.mark.parametrize(
    ("examples", "batch_size"),
    [(65, 32), (1, 4), *(pytest.param(*at, marks=pytest.mark.slow) for at in ((100, 32), (7, 3)))],
)
@pytest.mark.parametrize("name", ["batch_norm_2d", "batch_norm_without_running_statistics"])
def test_metrics_are_the_same_at_any_number_of_workers(name: str, examples: int, batch_size: int) -> None:
    if "without" in name and examples % batch_size == 1:
        examples += 1
    workload = networks.cases[name](64)
    with by_value(networks):
        answers = [a for workers in (1, 2, 3) for a in on_ranks(measured, workers, workload, examples, batch_size)]
    for found in answers[1:]:
        assert found == pytest.approx(answers[0], rel=1e-13)
    assert list(answers[0]) == ["accuracy", "loss", "recall", "order"]


# What an update leaves behind


def leftovers(world: World) -> list[bool]:
    step = DataParallel().build(networks.cases["parameters_without_optimizer"](61), world)
    for number in range(3):
        assert step.data_shard is not None
        step(step.source.at(number, step.data_shard))
    return [p.grad is None for p in step.model.parameters()]


def test_no_gradient_is_left_even_of_parameters_that_no_optimizer_has() -> None:
    with by_value(networks):
        assert on_ranks(leftovers, 2) == [[True] * 4] * 2


def told_values(world: World, workload: Workload) -> list[dict[str, float]]:
    step = DataParallel().build(workload, world)
    assert step.data_shard is not None
    told = [step(step.source.at(number, step.data_shard)) for number in range(workload.steps or 0)]
    return [{name: value.item() for name, value in values.items()} for values in told]


@pytest.mark.parametrize(
    "name",
    ["counted_tokens", "a_shard_without_loss_terms", "update_with_a_shard_without_loss_terms", "coupled_examples",
     "class_weights", "two_optimizers", "loss_of_shape_one", "carried_state"],
)  # fmt: skip
def test_the_losses_told_are_those_of_one_device_on_every_rank(name: str) -> None:
    workload = networks.cases[name](61)
    with by_value(networks):
        alone = on_ranks(told_values, 1, workload)[0]
        for values in on_ranks(told_values, 3, workload):
            assert [pytest.approx(v, rel=1e-11) for v in values] == alone


def test_a_coupling_loss_does_not_go_with_an_update() -> None:
    with pytest.raises(ValueError, match="count=None goes with loss"):
        replace(networks.cases["two_optimizers"](61), count=None)
