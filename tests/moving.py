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

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(5, WIDTH)
        self.outer = nn.Linear(WIDTH, CLASSES)
        self.pause = pause

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


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def nadam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=0.01)


def workload(net: type[Plain], *, steps: int = 6, pause: float = 0.0, **changes: Any) -> Workload:
    def data() -> TensorDataset:
        x = torch.randn(40, 5, generator=torch.Generator().manual_seed(3))
        return TensorDataset(x, x[:, :CLASSES].argmax(1))

    def model() -> nn.Module:
        return net(pause)

    given: dict[str, Any] = {"precision": "float64", "optimizer": sgd, "batch_size": 12, "steps": steps} | changes
    loss: Callable[..., Tensor] = nn.functional.cross_entropy
    return Workload(model=model, data=data, loss=loss, **given)
