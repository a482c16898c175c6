"""What every split network builds on: pieces, sums, clipping, and a state that any strategy takes up."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import networks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from proofs import EXACT, assert_equal
from ranks import by_value, on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Evaluation, Policy, Workload, accuracy
from apportion.comm.group import Group
from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.strategy import State, Step, Strategy
from apportion.parallel.partition.part import Part, ReplicatedPart
from apportion.parallel.partition.partitioned_step import SplitStep
from apportion.parallel.partition.tensor_shards import ShardLayout, TensorShard
from apportion.parallel.replica.replica import Replica
from apportion.parallel.replica.step import reference
from apportion.runtime.launch.local import Local
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.single_device import SingleDevice

pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]


class _Summed(Function):
    """Sum over ranks; the gradient of what follows, which all compute alike, is whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.clone()
        group.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Copied(Function):
    """The adjoint of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dy = dy.clone()
        ctx.group.all_reduce(dy).wait()
        return dy, None


class Sliced(nn.Module):
    """Every n-th hidden unit of a perceptron, so that positions are not contiguous; the last bias is everyone's."""

    def __init__(self, whole: nn.Sequential, group: Group, units: list[int]) -> None:
        super().__init__()
        self.group = group
        self.add_module("0", nn.Linear(10, len(units), dtype=torch.float64))
        self.add_module("2", nn.Linear(len(units), 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self._modules["0"], self._modules["2"]
        h = torch.tanh(first(_Copied.apply(x, self.group)))  # type: ignore[misc]
        return _Summed.apply(F.linear(h, second.weight), self.group) + second.bias  # type: ignore[union-attr, no-any-return, no-untyped-call]


def slices(whole: nn.Sequential, world: World, order: Callable[[list[int]], list[int]]) -> Part:
    units = order(list(range(world.rank, 16, world.size)))
    part = Sliced(whole, world.group(), units)
    pieces = {
        "0.weight": TensorShard((16, 10), (units, range(10))),
        "0.bias": TensorShard((16,), (units,)),
        "2.weight": TensorShard((3, 16), (range(3), units)),
    }
    state = {key: pieces[key].slice_of(t) if key in pieces else t for key, t in whole.state_dict().items()}
    part.load_state_dict(state)
    return ReplicatedPart(part, pieces)


class Rows(Part):
    """Every rank has the whole network and computes rows of its own: every gradient is a term of a sum."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model, self.world = model, world
        self.pieces = {name: TensorShard(tuple(p.shape), partial=True) for name, p in model.named_parameters()}

    def backward(self, replica: Replica, batch: Batch) -> Tensor | None:
        rows = slice(
            self.world.rank * len(batch) // self.world.size, (self.world.rank + 1) * len(batch) // self.world.size
        )
        with replica.autocast():
            if rows.stop > rows.start:
                loss = replica.loss(replica.model(batch.inputs[rows]), batch.targets[rows])
                replica.backward(loss, (rows.stop - rows.start) / len(batch))
            with torch.no_grad():
                return (
                    replica.loss(replica.model(batch.inputs), batch.targets)
                    if self.world.rank == self.world.size - 1
                    else None
                )

    def predict(self, replica: Replica, batch: Batch) -> Any | None:
        return replica.predict(batch) if self.world.rank == self.world.size - 1 else None


@final
@dataclass(frozen=True, repr=False)
class Split(Strategy):
    """Of these tests."""

    how: str = "whole"

    @property
    def exact(self) -> bool:
        return True

    def build(self, workload: Workload, world: World) -> Step:
        made: dict[str, Callable[[Any, Any], Part]] = {
            "whole": lambda model, sample: ReplicatedPart(model),
            "sliced": lambda model, sample: slices(model, world, lambda units: units),
            "disordered": lambda model, sample: slices(model, world, lambda units: [*units[2:], *units[:2]]),
            "rows": lambda model, sample: Rows(model, world),
        }
        return SplitStep(workload, world, made[self.how])

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))


def mlp(batch_size: int = 61, **options: Any) -> Workload:
    return networks.workload(smooth, networks.tabular(batch_size, 10), batch_size, **options)


def prove(workload: Workload, strategy: Strategy, workers: int, steps: int = 5) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, strategy, workers=workers, steps=steps)
    assert_equal(proof)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "clipped": {"clip_grad_norm": 0.05},
    "adam": {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True), "clip_grad_norm": 0.5},
    "adagrad": {"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1)},
    "one_cycle": {"schedule": lambda o, steps: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, steps)},
}


@pytest.mark.parametrize(
    ("how", "workers", "options"),
    [
        *(("disordered", 3, options) for options in OPTIMIZERS),
        *(("sliced", 2, options) for options in ("clipped", "adagrad")),
        *(("rows", 2, options) for options in ("momentum", "adam")),
    ],
)
def test_pieces_are_updated_as_the_whole_is(how: str, workers: int, options: str) -> None:
    prove(mlp(**OPTIMIZERS[options]), Split(how), workers)


@pytest.mark.parametrize("how", ["whole", "rows"])
def test_one_rank_has_all_of_it(how: str) -> None:
    prove(mlp(clip_grad_norm=0.1), Split(how), 1)


# What a network may have

ALIKE = (
    "batch_norm_2d", "batch_norm_cumulative", "tied_weights", "frozen_and_unused_parameters",
    "parameters_without_optimizer", "parameter_groups", "sparse_embeddings", "buffers", "coupled_examples",
    "class_weights", "dict_inputs", "two_optimizers", "carried_state", "few_lanes", "own_collate", "draws_in_the_data",
    "augmented",
)  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_what_every_rank_computes_alike_stays_alike(name: str) -> None:
    prove(networks.cases[name](7), Split("whole"), 2, 6)


@pytest.mark.parametrize(
    "name", ["tied_weights", "frozen_and_unused_parameters", "parameters_without_optimizer", "sparse_embeddings"]
)
def test_terms_of_a_gradient_are_summed_and_what_nobody_used_is_left_alone(name: str) -> None:
    """Three ranks, and a last batch of one row: two have no terms at all."""
    prove(networks.cases[name](7), Split("rows"), 3, 6)


class FirstHalf(nn.Module):
    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.embed = whole.embed

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.embed(tokens).mean(1))  # type: ignore[operator]


class SecondHalf(nn.Module):
    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.out = whole.out

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)  # type: ignore[no-any-return, operator]


class Halves(Part):
    """Two stages; the second one's weight is the first one's, under another name."""

    def __init__(self, whole: nn.Module, world: World) -> None:
        self.world, self.group = world, world.group()
        self.model = SecondHalf(whole) if world.rank else FirstHalf(whole)
        shape = tuple(whole.out.weight.shape)  # type: ignore[union-attr, arg-type]
        self.pieces = {"out.weight" if world.rank else "embed.weight": TensorShard(shape, partial=True)}

    def backward(self, replica: Replica, batch: Batch) -> Tensor | None:
        with replica.autocast():
            h = replica.model(batch.inputs) if not self.world.rank else torch.empty(len(batch), 8, dtype=torch.float64)
            self.group.broadcast(h.detach())
            if self.world.rank:
                loss = replica.loss(replica.model(h.requires_grad_()), batch.targets)
                replica.backward(loss, 1.0)
        gradient = h.grad if self.world.rank else torch.empty_like(h)
        assert gradient is not None
        self.group.broadcast(gradient, source=1)
        if self.world.rank:
            return loss.detach()
        h.backward(gradient)  # type: ignore[no-untyped-call]
        return None

    def predict(self, replica: Replica, batch: Batch) -> Any | None:
        h = replica.predict(batch) if not self.world.rank else torch.empty(len(batch), 8, dtype=torch.float64)
        self.group.broadcast(h)
        with torch.no_grad():
            return replica.model(h) if self.world.rank else None


@final
@dataclass(frozen=True, repr=False)
class InHalves(Strategy):
    @property
    def exact(self) -> bool:
        return True

    def build(self, workload: Workload, world: World) -> Step:
        return SplitStep(workload, world, lambda model, sample: Halves(model, world))

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


def tied(**options: Any) -> Workload:
    return replace(networks.cases["tied_weights"](7), **options)


@pytest.mark.parametrize("options", ["momentum", "clipped", "adam", "adagrad", "one_cycle"])
def test_a_weight_of_two_stages_under_two_names_stays_one(options: str) -> None:
    prove(tied(**OPTIMIZERS[options]), InHalves(), 2)


def test_an_optimizer_that_gets_nothing_of_a_stage_and_groups_by_shape_is_kept() -> None:
    """A factory that would refuse the part's parameters by themselves sees those of the plain model."""

    def optimizer(named: Any) -> torch.optim.Optimizer:
        wide = [p for _, p in named if p.shape[0] == 16]
        assert len(wide) == 2
        return torch.optim.SGD(wide, lr=0.1, momentum=0.5)

    prove(mlp(optimizer=optimizer, clip_grad_norm=0.05), Split("sliced"), 3)


# The state


def go_on(world: World, strategy: Strategy, workload: Workload, state: State | None, steps: int) -> State:
    step = strategy.build(workload, world)
    if state is not None:
        step.load_state_dict(state)
    for n in range(step.done, step.done + steps):
        assert step.data_shard is not None
        step(step.source.at(n, step.data_shard))
    return step.state_dict()


Journey = list[tuple[Strategy, int, int]]


def assert_same_journey(workload: Workload, journey: Journey) -> None:
    with by_value(networks):
        (whole,) = on_ranks(go_on, 1, SingleDevice(), workload, None, sum(steps for _, _, steps in journey))
        state = None
        for strategy, workers, steps in journey:
            states = on_ranks(go_on, workers, strategy, workload, state, steps)
            state = states[-1]
            for rank in states:
                assert all(torch.equal(a, b) for (_, a), (_, b) in zip(rank.tensors(), state.tensors(), strict=True))
                assert rank.settings == state.settings
    assert state is not None
    found, expected = dict(state.tensors()), dict(whole.tensors())
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].shape == tensor.shape
        assert (found[key].double() - tensor.double()).abs().max() <= 1e-12, key
    assert state.settings == whole.settings


@pytest.mark.parametrize("options", ["adam", "adagrad", "one_cycle"])
def test_a_state_goes_on_under_another_split(options: str) -> None:
    journey: Journey = [
        (Split("sliced"), 2, 2), (DataParallel(), 2, 1), (Split("disordered"), 3, 2), (Split("rows"), 2, 1),
        (SingleDevice(), 1, 1), (Split("whole"), 2, 1),
    ]  # fmt: skip
    assert_same_journey(mlp(**OPTIMIZERS[options]), journey)


@pytest.mark.parametrize("name", ["tied_weights", "carried_state", "two_optimizers"])
def test_ties_carried_states_and_several_optimizers_go_on_under_another_split(name: str) -> None:
    other = InHalves() if name == "tied_weights" else DataParallel()
    journey: Journey = [(Split("whole"), 2, 2), (other, 2, 2), (Split("whole"), 3, 1), (SingleDevice(), 1, 1)]
    assert_same_journey(networks.cases[name](7), journey)


def test_a_run_resumes_under_another_split_and_is_measured_as_one_device_is(tmp_path: Path) -> None:
    """Through checkpoints: the fingerprint is the plain model's."""
    held_out = TensorDataset(networks.numbers(9, 10, seed=8), networks.classes(9, 3, seed=9))
    evaluation = Evaluation(data=lambda: held_out, metrics={"accuracy": accuracy, "order": Order}, batch_size=4)
    workload = mlp(optimizer=lambda p: torch.optim.Adam(p, lr=0.01), evaluation=evaluation)
    policy = Policy(checkpoint_every="2 steps")

    def trained(name: str, strategy: Strategy, workers: int, **options: Any) -> apportion.Event:
        launcher = Local(workers=workers, threads=1)
        return apportion.train(
            workload, strategy, launcher=launcher, run_dir=tmp_path / name, policy=policy, **options
        )  # fmt: skip

    with by_value(networks), by_value(sys.modules[__name__]):
        expected = trained("whole", SingleDevice(), 1)
        trained("run", Split("sliced"), 2, steps=4)
        found = trained("run", Split("rows"), 2, resume=True)
    for left, right in zip(saved(tmp_path / "run"), saved(tmp_path / "whole"), strict=True):
        assert left.keys() == right.keys()
        assert all((left[key].double() - right[key].double()).abs().max() <= EXACT for key in right)
    assert found.data["metrics"] == pytest.approx(expected.data["metrics"], rel=1e-12)
    assert found.data["metrics"]["order"] > 0


def saved(run_dir: Path) -> list[dict[str, Tensor]]:
    folder = run_dir / "checkpoints" / "latest"
    return [load_file(folder / f"{part}.safetensors") for part in ("model", "optimizer")]


class Order:
    """Sees every row, in order."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def update(self, outputs: Any, targets: Any) -> None:
        assert len(outputs) == len(targets)
        self.seen += targets.tolist()

    def compute(self) -> float:
        return float(sum(place * value for place, value in enumerate(self.seen)))


def test_the_start_of_a_run_tells_the_plain_models_parameters(tmp_path: Path) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        launcher = Local(workers=3, threads=1)
        started = next(iter(apportion.run(mlp(), Split("sliced"), launcher=launcher, run_dir=tmp_path)))
    assert started.data["parameters"] == 10 * 16 + 16 + 16 * 3 + 3


def told(world: World, strategy: Strategy, workload: Workload) -> list[float]:
    step = strategy.build(workload, world)
    assert step.data_shard is not None
    return [step(step.source.at(n, step.data_shard))["loss"].item() for n in range(4)]


@pytest.mark.parametrize("strategy", [InHalves(), Split("whole")])
def test_the_loss_is_told_on_every_rank(strategy: Strategy) -> None:
    with by_value(networks):
        (alone,) = on_ranks(told, 1, SingleDevice(), tied())
        for losses in on_ranks(told, 2, strategy, tied()):
            assert losses == pytest.approx(alone, rel=1e-12)


def test_bfloat16_differs_by_its_own_rounding() -> None:
    made = mlp()
    narrow = lambda: TensorDataset(*(t.float() if t.is_floating_point() else t for t in made.data().tensors))  # type: ignore[attr-defined] # noqa: E731
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(replace(made, data=narrow, precision="bfloat16"), Split("rows"), workers=2, steps=5)
    assert proof.holds
    assert proof.rounds[1].worst.relative < 3e-2


# What goes wrong


def refused(workload: Workload, strategy: Strategy, rule: str, workers: int = 2) -> None:
    with pytest.raises(ValueError, match=rule), by_value(networks), by_value(sys.modules[__name__]):
        apportion.check(workload, strategy, workers=workers, steps=1)


class Own(torch.optim.SGD):
    """Who knows what it looks at."""


def test_what_cannot_be_split_is_refused_with_the_rule_and_the_cure() -> None:
    lbfgs = lambda p: torch.optim.LBFGS([q for _, q in p])  # noqa: E731
    adafactor = lambda p: torch.optim.Adafactor([q for _, q in p])  # noqa: E731
    own = lambda p: Own([q for _, q in p], lr=0.1)  # noqa: E731
    refused(mlp(optimizer=lbfgs), Split("sliced"), "LBFGS evaluates the loss several times an update: use map_reduce")
    refused(mlp(optimizer=adafactor), Split("sliced"), "Adafactor is not known to update each weight.*data_parallel")
    refused(mlp(optimizer=own), Split("disordered"), "Own is not known to update each weight.*data_parallel")
    refused(networks.cases["two_optimizers"](7), Split("rows"), "update= asks for the gradient.*use data_parallel")
    with pytest.raises(ValueError, match=r'float16" scales the loss.*use "bfloat16", or data_parallel'):
        Split().build(mlp(precision="float16"), World())
    with pytest.raises(ValueError, match="use compile=False, or data_parallel"):
        Split().build(mlp(compile=True), World())
    prove(mlp(optimizer=own), Split("whole"), 2)


# Pieces, by themselves

lengths = st.integers(1, 7)


@st.composite
def divided(draw: Any) -> tuple[tuple[int, ...], list[TensorShard]]:
    """A tensor's shape, and pieces that cover it once: along each dimension its positions are dealt out."""
    shape = draw(st.lists(lengths, min_size=1, max_size=3).map(tuple))
    dealt = []
    for length in shape:
        many = draw(st.integers(1, 3))
        owner = draw(st.lists(st.integers(0, many - 1), min_size=length, max_size=length))
        order = draw(st.permutations(range(length)))
        dealt.append([[at for at in order if owner[at] == part] for part in range(many)])
    kept = draw(st.integers(1, len(shape)))
    return shape, [TensorShard(shape, index) for index in itertools.product(*dealt[:kept])]


@given(divided(), st.randoms())
def test_pieces_put_together_are_the_whole(case: tuple[tuple[int, ...], list[TensorShard]], random: Any) -> None:
    shape, pieces = case
    whole = torch.randn(shape)
    found = torch.full(shape, torch.nan)
    told = [{"w": TensorShard.from_plain(json.loads(json.dumps(p.plain()))).plain()} for p in pieces * 2]
    layout = ShardLayout.from_plain(told)
    for rank, piece in layout.owners("w"):
        assert rank < len(pieces), "the lower of two that have the same"
        held = piece.slice_of(whole)
        assert held.shape == piece.local_shape
        piece.put(held, found)
    assert torch.equal(found, whole)
    assert sum(p.numel for _, p in layout.owners("w")) == whole.numel()


def test_who_sums_with_whom() -> None:
    half, all_of_it = TensorShard((4, 2), (range(2),), partial=True), TensorShard((4, 2), partial=True)
    other = TensorShard((4, 2), ([3, 2],), partial=True)
    told = [
        {"a": half, "b": all_of_it},
        {"a": other},
        {"a": half, "c": TensorShard((1,))},
        {"a": other, "b": all_of_it},
    ]
    layout = ShardLayout.from_plain([{name: piece.plain() for name, piece in rank.items()} for rank in told])
    found = [(name, ranks) for name, _, ranks in layout.sums()]
    assert found == [("a", [0, 2]), ("a", [1, 3]), ("b", [0, 3])]
    assert [rank for rank, _ in layout.owners("a")] == [0, 1]
    assert layout.owned(0) == {"a", "b"}
    assert layout.owned(3) == set()


def test_a_tensor_that_no_rank_has_whole_is_a_defect() -> None:
    layout = ShardLayout.from_plain([{"a": TensorShard((4,), (range(2),)).plain()}])
    with pytest.raises(AssertionError, match="hold 2 elements of a, which has 4"):
        layout.owners("a")
