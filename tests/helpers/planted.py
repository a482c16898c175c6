"""Mistakes that a proof has to find: in a strategy, in a model, in a workload. And an honest approximate strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import networks
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apportion import Workload
from apportion.comm.world import World
from apportion.core.fault_points import plant
from apportion.core.sampler import DataShard
from apportion.core.strategy import State, Step, Strategy
from apportion.parallel.replica.step import OneDeviceStep
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.parameter_server import ParameterServer


@dataclass(frozen=True, repr=False)
class Faulty(Strategy):
    """data_parallel with a mistake."""

    fault: str = "none"

    @property
    def exact(self) -> bool:
        return True

    def build(self, workload: Workload, world: World) -> Step:
        if self.fault == "seed" and world.rank == 1:
            workload = replace(workload, seed=workload.seed + 1)
        step = DataParallel().build(workload, world)
        if self.fault in FAULTS:
            FAULTS[self.fault](step, world)
        return step

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return DataParallel().reference(workload, world_size, log)


@dataclass(frozen=True, repr=False)
class LosesAnUpdate(Strategy):
    """Downpour SGD in which rank 1's third push gets into all shards but the first."""

    @property
    def exact(self) -> bool:
        return False

    def replays(self, workers: int) -> bool:
        return True

    def build(self, workload: Workload, world: World) -> Step:
        step: Any = ParameterServer().build(workload, world)
        if world.rank == 1:
            right = step.store.applier.update

            def update(push: Any, first: int, count: int, copy: int) -> Any:
                stretch = right(push, first, count, copy)
                if push.number == 3 and first == 0:
                    end = step.store.layout.bounds[1]
                    for new, old in zip(stretch.new, stretch.old, strict=True):
                        new[:end] = old[:end]
                return stretch

            step.store.applier.update = update
        return step  # type: ignore[no-any-return]

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return ParameterServer().reference(workload, world_size, log)


def mean_of_means(step: Any, world: World) -> None:
    """Every rank weighs the same, however many rows it has."""
    step._share.total = lambda batch: batch.count * world.size or 1.0


def a_little_too_much(step: Any, world: World) -> None:
    """One rank's gradient is a ten-millionth too large."""
    right = step._share.total
    if world.rank == 1:
        step._share.total = lambda batch: right(batch) * (1 - 1e-7)


def dropped_shard(step: Any, world: World) -> None:
    """The last rank's rows count for nothing."""
    right = step._share.weighted_loss
    if world.rank == world.size - 1:
        step._share.weighted_loss = lambda part, **how: (right(part, **how)[0], 0.0)


def stale_parameter(step: Any, world: World) -> None:
    """One rank keeps an old bias."""
    bias = step.model[2].bias
    before = bias.detach().clone()

    def keep(point: str) -> None:
        if point == "bound":
            bias.data = before

    if world.rank == 1:
        plant(keep)


FAULTS: dict[str, Callable[[Any, World], None]] = {
    "mean_of_means": mean_of_means,
    "a_little_too_much": a_little_too_much,
    "dropped_shard": dropped_shard,
    "stale_parameter": stale_parameter,
}


@dataclass(frozen=True, repr=False)
class Averaging(Strategy):
    """Each worker steps on whole batches of its own, then all take the mean of their weights: not the one-device step,
    and it says so."""

    forget: str = ""
    """A parameter that is left out of the mean: a mistake."""

    @property
    def exact(self) -> bool:
        return False

    def build(self, workload: Workload, world: World) -> Step:
        return AveragingStep(workload, world, self.forget)  # type: ignore[abstract]

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        steps = [OneDeviceStep(workload, torch.device("cpu")) for _ in range(world_size)]
        for number in range(steps[0].source.total):
            for rank, step in enumerate(steps):
                step(step.source.at(number, DataShard(rank, world_size, whole_batches=True)))
            with torch.no_grad():
                for together in zip(*(step.model.parameters() for step in steps), strict=True):
                    mean = torch.stack(list(together)).mean(0)
                    for p in together:
                        p.copy_(mean)
            yield steps[0].state_dict()


class AveragingStep(Step):
    def __init__(self, workload: Workload, world: World, forget: str) -> None:
        self._step, self._group, self._forget = OneDeviceStep(workload, world.device), world.group(), forget
        self.rank, self.device, self.model = world.rank, world.device, self._step.model
        self.optimizers, self.source = self._step.optimizers, self._step.source
        self.data_shard = DataShard(world.rank, world.size, whole_batches=True)

    def __call__(self, batch: Any) -> Any:
        values = self._step(batch)
        for name, p in self.model.named_parameters():
            if name != self._forget:
                self._group.all_reduce(p.data).wait()
                p.data /= self._group.size
        return values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


for _name in ("predict", "backward", "update", "minimize", "state_dict", "load_state_dict", "spent", "close"):
    setattr(AveragingStep, _name, lambda self, *given, _name=_name, **more: getattr(self._step, _name)(*given, **more))
AveragingStep.done = property(lambda self: self._step.done)  # type: ignore[assignment,method-assign]
AveragingStep.__abstractmethods__ = frozenset()


# Models that are not the same on every rank, or draw, or fix a precision


class ReadsRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = networks.perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (1.0 + 0.1 * int(os.environ.get("RANK", "0")))


class OwnBatchNorm(nn.BatchNorm1d):
    """With a forward of its own, which sees the rows of one rank: by a function that is not intercepted, and only of
    more rows than a look at the network gives it."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.momentum is not None
        training = self.training and len(x) > 8
        moments = self.running_mean, self.running_var
        return torch.native_batch_norm(x, self.weight, self.bias, *moments, training, self.momentum, self.eps)[0]


class Drops(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(10, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.25 if how == "lstm" else 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(getattr(self, "via_" + self.how)(h))

    def via_module(self, h: Tensor) -> Tensor:
        return self.drop(h)

    def via_function(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.4, self.training)

    def via_multihead(self, h: Tensor) -> Tensor:
        h = h.unsqueeze(1).expand(-1, 3, -1)
        return self.attention(h, h, h)[0].mean(1)

    def via_lstm(self, h: Tensor) -> Tensor:
        return self.lstm(h.unsqueeze(1).expand(-1, 3, -1))[0][:, -1]

    def via_attention(self, h: Tensor) -> Tensor:
        h = h.view(-1, 1, 2, 4)
        return F.scaled_dot_product_attention(h, h * 0.5, h, dropout_p=0.15).flatten(1)

    def via_noise(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn(h.shape, dtype=h.dtype)


class Narrow(nn.Module):
    """Computes in float32 whatever it is given."""

    def __init__(self, *, quietly: bool) -> None:
        super().__init__()
        self.quietly, self.first, self.last = quietly, nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.quietly:
            return self.last(torch.tanh(self.first(x.float())))
        h = F.linear(x.float(), self.first.weight.float(), self.first.bias.float())
        return self.last(torch.tanh(h).to(self.last.weight.dtype))


class Chaos(nn.Module):
    """With ``chaotic_loss`` and a learning rate of 1 every step iterates the logistic map on the weights: each
    iteration doubles a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.11, 0.89, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), -1)


def chaotic_loss(iterations: int) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        later = w = outputs.detach()
        for _ in range(iterations):
            later = 4 * later * (1 - later)
        return (outputs * (w - later)).sum(1).mean()

    return loss
