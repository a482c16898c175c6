"""What tracing does not see: a network that is cut is the same one all the same, or it is refused."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from ranks import by_value, on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import apportion
from apportion import Strategy, Workload, World
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.single_device import SingleDevice

pytestmark = pytest.mark.processes

EXACT = 1e-10


class OptionalArgument(nn.Module):
    """An argument that nobody gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        y = self.a(x)
        y = y if skip is None else self.b(y)
        return self.last(y.mean((2, 3)))


class SoftmaxWhereNoneIsGiven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, temperature: Tensor | None = None) -> Tensor:
        h = self.a(x)
        if temperature is None:
            h = torch.softmax(h, -1)
        return self.b(h)


class TiedByHand(nn.Module):
    """Logits from the transposed embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x.long()[:, 0].abs() % 7) @ self.embedding.weight.T


class HookedPair(nn.Module):
    """A hook that looks at all units."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)
        self.a.register_forward_hook(lambda m, i, y: y - y.mean(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0


class OwnLayerInABlock(nn.Module):
    """A block of torch's with a layer of another class in it, which torch's own kernel for evaluation leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.block.linear1 = OwnLinear(8, 16)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(x.unsqueeze(1))[:, 0])


class Checkpointed(nn.Module):
    """Computed again in the backward pass, with its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda t: self.b(self.drop(torch.relu(self.a(t)))), x, use_reentrant=False)
        return y


class InPlaceBeforeTheLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(4, 4), nn.LSTM(4, 5, 2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.mul_(2.0)
        return self.last(self.lstm(y)[0][:, -1])


class HookedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 5, 2, batch_first=True), nn.Linear(5, 3)
        self.lstm.register_forward_hook(lambda m, i, o: (o[0] * 0.5, o[1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0][:, -1])


class SharedRecurrentWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 4, 2, batch_first=True), nn.Linear(4, 3)
        self.lstm.weight_hh_l1 = self.lstm.weight_hh_l0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0][:, -1])


class Counting(nn.Module):
    """Its forward changes a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.last, self.calls = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.a(x).mean((2, 3)))


class Anneal(nn.Module):
    """Something else at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1.0 - 0.01 * self.calls)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.anneal, self.b = nn.Linear(8, 8), Anneal(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.anneal(self.a(x)))


class OthersInEvaluation(nn.Module):
    """Functions whose numbers shift where it does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            h = h + 0.0 * torch.ones_like(h)
        h = torch.relu(self.b(h)) + h
        h = self.c(h)
        return self.last(self.d(h) + h)


class Sorted(nn.Module):
    """A named tuple between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        values, places = torch.sort(self.a(x))
        return self.b(values + 0.1 * places)


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.a(x).chunk(2, 1)
        return self.last((value * torch.sigmoid(gate)).mean((2, 3)))


ROWS = 32
SHAPES: dict[Any, tuple[int, ...]] = {
    OptionalArgument: (2, 6, 6), Counting: (2, 6, 6), Chunked: (2, 6, 6),
    InPlaceBeforeTheLSTM: (5, 4), HookedLSTM: (5, 4), SharedRecurrentWeights: (5, 4),
}  # fmt: skip


def workload(model: Any) -> Workload:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, *SHAPES.get(model, (8,)), generator=generator)
    y = torch.randint(0, 3, (ROWS,), generator=generator)
    return Workload(
        model=model,
        data=lambda: TensorDataset(x, y),
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        batch_size=8,
        precision="float64",
    )


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (OptionalArgument, "conv_parallel"),
        (OptionalArgument, "pipeline_parallel(microbatches=2)"),
        (SoftmaxWhereNoneIsGiven, "tensor_parallel(min_width=1)"),
        (HookedPair, "tensor_parallel(min_width=1)"),
        (Checkpointed, "tensor_parallel(min_width=1)"),
        (Annealed, "layer_placement"),
        (Sorted, "pipeline_parallel(microbatches=2)"),
        (Chunked, "conv_parallel"),
    ],
)
def test_it_is_the_same_network(model: Any, strategy: str) -> None:
    with by_value(sys.modules[__name__]):
        proof = apportion.check(workload(model), strategy, workers=2, steps=4)
    (found,) = proof.rounds
    assert found.worst.absolute <= EXACT, found


@pytest.mark.parametrize(
    ("model", "strategy", "why"),
    [
        (TiedByHand, "tensor_parallel(min_width=1)", "no layer that it can slice"),
        (OwnLayerInABlock, "tensor_parallel(min_width=1)", "gives other outputs"),
        (InPlaceBeforeTheLSTM, "wavefront_parallel", "changes a tensor in place"),
        (HookedLSTM, "wavefront_parallel", "has a hook"),
        (SharedRecurrentWeights, "wavefront_parallel", "are one weight"),
        (Counting, "conv_parallel", "changes its own calls"),
        (Annealed, "pipeline_parallel(microbatches=2)", "anneal.calls more than once a step"),
    ],
)
def test_it_is_refused(model: Any, strategy: str, why: str) -> None:
    with by_value(sys.modules[__name__]), pytest.raises(ValueError, match=why) as refusal:
        apportion.check(workload(model), strategy, workers=2, steps=4)
    assert "data_parallel" in str(refusal.value)


def trained_and_evaluated(world: World, strategy: Strategy, given: Workload) -> Any:
    """The outputs of the first batch after three steps, from the rank that has them; or the refusal."""
    try:
        step = strategy.build(given, world)
    except ValueError as refusal:
        return str(refusal)
    assert step.data_shard is not None
    for number in range(3):
        step(step.source.at(number, step.data_shard))
    return step.predict(step.source.at(0, step.data_shard))


@pytest.mark.parametrize("cuts", [("relu",), ("add_1",), ("c",), ("add_2",), None])
def test_what_is_evaluated_is_what_was_trained(cuts: tuple[str, ...] | None) -> None:
    """Or refused: with other functions in evaluation, a stage has other layers."""
    given = workload(OthersInEvaluation)
    (expected,) = on_ranks(trained_and_evaluated, 1, SingleDevice(), given)
    found = on_ranks(trained_and_evaluated, 2, PipelineParallel(microbatches=2, cuts=cuts), given)
    if isinstance(found[0], str):
        assert re.search("data_parallel|one may begin with .*c", found[0])
        assert found[1] == found[0]
        return
    (outputs,) = [outputs for outputs in found if outputs is not None]
    assert (outputs - expected).abs().max() <= EXACT
