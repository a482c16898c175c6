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
from apportion import Evaluation, Workload, accuracy
from apportion.batch import Batch, Batches
from apportion.comm.group import Group
from apportion.evaluate import evaluate
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
        rows = slice(self.world.rank * len(batch) // self.world.size, (self.world.rank + 1) * len(batch) // self.world.size)
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
