"""Every way to cut a network follows its forward with one tracer: what one of them sees, all of them see."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import by_value
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload

pytestmark = pytest.mark.processes

EXACT = 1e-10


class Anneal(nn.Module):
    """Something else at every call: taken whole, where it gets whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {"so far": 0}
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * (1.0 - 0.01 * self.count)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.a, self.anneal, self.b = nn.Conv2d(2, 3, 3), nn.Linear(48, 4), Anneal(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.conv(x)).flatten(1)
        return self.b(self.anneal(self.a(h)))


class Sequences(nn.Module):
    """It makes the state that it begins in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.anneal, self.net, self.b = nn.Linear(4, 4), Anneal(), nn.GRU(4, 5, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        begun = torch.zeros(2, x.shape[1], 5, dtype=x.dtype)
        return self.b(self.net(self.anneal(self.a(x)), begun)[0][-1])


class Placed(nn.Module):
    """Makes places in the length that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.a, self.b = nn.Embedding(9, 4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("wave", torch.linspace(0, 1, 36).view(9, 4))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place(torch.arange(x.shape[1])) + self.wave[: x.shape[1]]
        return self.last((x + self.b(torch.relu(self.a(x)))).mean(1))


class Dictionary(nn.Module):
    """A layer where torch does not see it: it is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3)
        self.layers = {"hidden": nn.Linear(4, 4).double()}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers["hidden"](self.b(torch.relu(self.a(x)))).mean(1))


class InAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.out = nn.Linear(4, 4), Dictionary(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inside(self.first(x)))


class Partly(nn.Module):
    """A part of it has no gradient."""

    def __init__(self, *, kind: str = "") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.conv, self.net, self.last = nn.Conv2d(1, 1, 3, padding=1), nn.GRU(4, 4, 2), nn.Linear(4, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
        h = self.conv(h.unsqueeze(1))[:, 0] if self.kind == "conv" else self.net(h.transpose(0, 1))[0].transpose(0, 1)
        return self.last((h + self.b(x)).mean(1))


def workload(model: Callable[[], nn.Module], *shape: int) -> Workload:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, *shape, generator=generator)
    y = torch.randint(0, 3, (24,), generator=generator)
    return Workload(
        model=model,
        data=lambda: TensorDataset(x, y),
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        batch_size=8,
        precision="float64",
    )


def proved(model: Callable[[], nn.Module], strategy: str, *shape: int) -> Any:
    with by_value(sys.modules[__name__]):
        return apportion.check(workload(model, *shape), strategy, workers=2, steps=3).rounds[0].worst.absolute


@pytest.mark.parametrize(
    ("model", "strategy", "shape"),
    [
        (Images, "conv_parallel", (2, 6, 6)),
        (Sequences, "wavefront_parallel(chunk=2)", (5, 4)),
        (Placed, "layer_placement", (5, 4)),
        (Placed, "tensor_parallel(min_width=1)", (5, 4)),
        (InAModule, "layer_placement", (5, 4)),
        (InAModule, "tensor_parallel(min_width=1)", (5, 4)),
        # No graph tells these: every stage runs the network's own forward.
        (Dictionary, "layer_placement", (5, 4)),
        (lambda: Partly(kind="conv"), "pipeline_parallel(microbatches=2)", (5, 4)),
    ],
)
def test_it_is_the_same_network(model: Any, strategy: str, shape: tuple[int, ...]) -> None:
    assert proved(model, strategy, *shape) <= EXACT


@pytest.mark.parametrize(
    ("model", "strategy", "why"),
    [
        (lambda: Partly(kind="conv"), "conv_parallel", "turns gradients or autocast"),
        (Partly, "wavefront_parallel", "turns gradients or autocast"),
    ],
)
def test_it_is_refused(model: Any, strategy: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refusal:
        proved(model, strategy, 5, 4)
    assert "data_parallel" in str(refusal.value)
