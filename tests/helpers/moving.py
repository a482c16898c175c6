"""Networks whose forward pass changes something, or draws from a generator that is not torch's."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from apportion import Workload

WIDTH, CLASSES = 8, 3


class Plain(nn.Module):
    """What the others begin with: in training ``moved`` is asked once a pass, and multiplies what is hidden."""

    shape: tuple[int, ...] = (5,)
    """Of an example."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.inner = self.below()
        self.outer = nn.Linear(WIDTH, CLASSES)
        self.pause = pause

    def below(self) -> nn.Module:
        return nn.Linear(5, WIDTH)

    def moved(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause)
        return self.outer(torch.tanh(self.inner(x)) * self.moved())


class InPlace(Plain):
    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(pause)
        self.register_buffer("seen", torch.zeros(()))

    def moved(self) -> Any:
        if self.training:
            self.seen.add_(1)
        return 1 / (1 + 0.01 * self.seen)


class Reassigned(InPlace):
    def moved(self) -> Any:
        if self.training:
            self.seen = self.seen + 1
        return 1 / (1 + 0.01 * self.seen)


class Hidden(InPlace):
    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(pause)
        del self.seen
        self.register_buffer("seen", torch.zeros(()), persistent=False)


class HiddenReassigned(Hidden):
    def moved(self) -> Any:
        if self.training:
            self.seen = self.seen * 0.9 + 1
        return 1 / (1 + 0.01 * self.seen)


class Aliased(Plain):
    """Two buffers that begin at one address, and a third in the middle of them."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(pause)
        table = torch.ones(3, WIDTH)
        self.register_buffer("table", table)
        self.register_buffer("first", table[0])
        self.register_buffer("last", table[2])

    def moved(self) -> Any:
        if self.training:
            self.first.mul_(0.99)
            self.last.add_(0.01)
        return self.table.mean(0)


class Teacher(Plain):
    """A momentum encoder."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(pause)
        self.teacher = nn.Linear(5, WIDTH)
        self.teacher.load_state_dict(self.inner.state_dict())
        self.teacher.requires_grad_(False)

    def follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.inner.parameters(), strict=True):
            slow.lerp_(fast, 0.05)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause)
        if self.training:
            with torch.no_grad():
                self.follow()
        return self.outer(torch.tanh(self.inner(x)) - 0.5 * torch.tanh(self.teacher(x)))


class TeacherByData(Teacher):
    def follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.inner.parameters(), strict=True):
            slow.data = slow.data * 0.95 + fast.data * 0.05


class LateTeacher(Teacher):
    """Moved from the third pass on."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(pause)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def follow(self) -> None:
        self.passes.add_(1)
        if self.passes >= 3:
            super().follow()


class ByRandom(Plain):
    """Layers that are left out by Python's generator."""

    def moved(self) -> Any:
        return 0.5 + (random.random() > 0.3) if self.training else 1.0


class ByNumpy(Plain):
    def moved(self) -> Any:
        return float(np.random.uniform(0.5, 1.5)) if self.training else 1.0


NETS: list[type[Plain]] = [
    *(Reassigned, Hidden, HiddenReassigned, Aliased, Teacher, TeacherByData, LateTeacher, ByRandom, ByNumpy)
]


class Everything(Teacher):
    """All of it in one network, for tests that kill it."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(pause)
        self.parts = nn.ModuleList(
            [Reassigned(), HiddenReassigned(), Aliased(), TeacherByData(), ByRandom(), ByNumpy()]
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        for part in self.parts:
            outputs = outputs + part(x)
        return outputs


class Gate(nn.Module):
    """What one of the others does to what is hidden, as a layer."""

    def __init__(self, net: type[Plain]) -> None:
        super().__init__()
        self.net = net()
        del self.net.inner, self.net.outer

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.net.moved()


class Draws(Plain):
    """In layers of their own; ``below`` may be anything."""

    gates: tuple[type[Plain], ...] = (ByRandom, ByNumpy)

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(pause)
        self.gated = nn.Sequential(*map(Gate, self.gates))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause)
        return self.outer(self.gated(torch.tanh(self.inner(x))))


class Gates(Draws):
    """Whatever else moves, too."""

    gates = (Reassigned, Hidden, HiddenReassigned, Aliased, ByRandom, ByNumpy)


class ImageGates(Gates):
    shape = (1, 8, 5)

    def below(self) -> nn.Module:
        convolutions = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(4 * 8 * 5, WIDTH))


class SequenceGates(Gates):
    shape = (8, 5)

    def below(self) -> nn.Module:
        return LastOutput()


class LastOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(5, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0][:, -1]


class Scaled(nn.Module):
    def __init__(self, scales: Tensor, *, moves: bool) -> None:
        super().__init__()
        self.register_buffer("scales", scales)
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.moves:
            self.scales.mul_(0.99)
        return x * self.scales.mean()


class OneMemory(SequenceGates):
    """One layer moves what another one, after the recurrent layers, looks at."""

    gates = ()

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(pause)
        scales = torch.ones(3, 5)
        self.first, self.last = Scaled(scales[0], moves=True), Scaled(scales, moves=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.last(self.inner(self.first(x))))


class TwoNames(OneMemory):
    """One layer, by two names."""

    gates = ()

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(pause)
        self.last = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.last(x)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def nadam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=0.01)


def workload(net: type[Plain], *, steps: int = 6, pause: float = 0.0, **changes: Any) -> Workload:
    def data() -> TensorDataset:
        x = torch.randn(40, *net.shape, generator=torch.Generator().manual_seed(3))
        return TensorDataset(x, x.flatten(1)[:, :CLASSES].argmax(1))

    def model() -> nn.Module:
        return net(pause)

    given: dict[str, Any] = {"precision": "float64", "optimizer": sgd, "batch_size": 12, "steps": steps} | changes
    loss: Callable[..., Tensor] = nn.functional.cross_entropy
    return Workload(model=model, data=data, loss=loss, **given)
