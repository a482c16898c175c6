"""What every split network builds on: pieces, sums, clipping, and a state that any strategy takes up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import networks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import by_value, on_ranks
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Evaluation, Policy, Workload, accuracy
from apportion.batch import Batch, Batches
from apportion.comm.group import Group
from apportion.evaluate import evaluate
from apportion.launch.local import Local
from apportion.parallel.one_device import reference
from apportion.parallel.pieces import Layout
from apportion.parallel.replica import Replica
from apportion.parallel.split import Alike, Part, Piece, SplitStep
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.single_device import SingleDevice
from apportion.strategy import State, Step, Strategy
from apportion.world import World

EXACT = 1e-10


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
        "0.weight": Piece((16, 10), (units, range(10))),
        "0.bias": Piece((16,), (units,)),
        "2.weight": Piece((3, 16), (range(3), units)),
    }
    state = {key: pieces[key].of(t) if key in pieces else t for key, t in whole.state_dict().items()}
    part.load_state_dict(state)
    return Alike(part, pieces)


class Rows(Part):
    """Every rank has the whole network and computes rows of its own: every gradient is a term of a sum."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model, self.world = model, world
        self.pieces = {name: Piece(tuple(p.shape), partial=True) for name, p in model.named_parameters()}

    def backward(self, replica: Replica, batch: Batch) -> Tensor | None:
        rows = slice(
            self.world.rank * len(batch) // self.world.size, (self.world.rank + 1) * len(batch) // self.world.size
        )
        with replica.autocast():
            if rows.stop > rows.start:
                loss = replica.loss(replica.model(batch.inputs[rows]), batch.targets[rows])
                replica.backward(loss, (rows.stop - rows.start) / len(batch))
            with torch.no_grad():
                return replica.loss(replica.model(batch.inputs), batch.targets) if self.world.rank else None

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
            "whole": lambda model, sample: Alike(model),
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
    (found,) = proof.rounds
    assert found.disagreement is None
    assert found.worst.absolute <= EXACT, found
    assert proof.holds
    assert not proof.by_design


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "clipped": {"clip_grad_norm": 0.05},
    "adam": {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True), "clip_grad_norm": 0.5},
    "adagrad": {"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1)},
    "one_cycle": {"schedule": lambda o, steps: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, steps)},
}


@pytest.mark.parametrize("options", OPTIMIZERS)
@pytest.mark.parametrize(("how", "workers"), [("sliced", 2), ("disordered", 3), ("rows", 2)])
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
        self.pieces = {"out.weight" if world.rank else "embed.weight": Piece(shape, partial=True)}

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


def test_a_run_resumes_under_another_split_and_its_model_loads(tmp_path: Any) -> None:
    """Through checkpoints: the fingerprint is the plain model's."""
    workload = mlp(optimizer=lambda p: torch.optim.Adam(p, lr=0.01), schedule=OPTIMIZERS["one_cycle"]["schedule"])
    here = sys.modules[__name__]
    with by_value(networks), by_value(here):
        for strategy, workers, resume in ((Split("sliced"), 2, False), (InHalves(), 1, None), (Split("rows"), 2, True)):
            if resume is None:
                continue
            launcher = Local(workers=workers, threads=1)
            run = tmp_path / "run"
            policy = Policy(checkpoint_every="2 steps")
            apportion.train(workload, strategy, launcher=launcher, run_dir=run, resume=resume, policy=policy, steps=8)
