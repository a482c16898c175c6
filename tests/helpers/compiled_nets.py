"""Networks that compile a part of themselves, each by another means of torch's, and one that computes in less."""

from __future__ import annotations

from typing import Any

import torch
from networks import EPS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from apportion import Workload

ROWS, INPUTS, WIDTH, CLASSES = 13, 8, 6, 4


class Numbers(Dataset[Any]):
    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(3)
        self.x = torch.randn(ROWS, INPUTS, generator=draws)
        self.y = torch.randint(CLASSES, (ROWS,), generator=draws)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


def middle() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class Module(nn.Module):
    """A module that was given to ``torch.compile``."""

    backend = "aot_eager"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.middle: Any = self.compiled(middle())

    def compiled(self, module: nn.Module) -> Any:
        return torch.compile(module, backend=self.backend)

    def between(self, hidden: Tensor) -> Tensor:
        return torch.relu(hidden)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(self.middle(torch.relu(self.first(x)))))
        return found


class Inductor(Module):
    """The same with the compiler that people have."""

    backend = "inductor"


class InPlace(Module):
    """A module that compiles itself where it is."""

    def compiled(self, module: nn.Module) -> Any:
        module.compile(backend=self.backend)
        return module


class Method(Module):
    """A method that is compiled."""

    def compiled(self, module: nn.Module) -> Any:
        self.between = torch.compile(self.between, backend=self.backend)  # type: ignore[method-assign]
        return module


class Given(dict[str, Any]):
    """What a model library's network gives."""


class Named(Module):
    """It gives a dict that is more than a dict, so that no tracer follows it, and a part of it is compiled."""

    def forward(self, x: Tensor) -> Any:
        return Given(logits=super().forward(x))


def of_logits(outputs: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"], y)


class Narrow(Module):
    """A part computes in bfloat16 whatever the rest does."""

    def between(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return hidden + F.linear(hidden, self.middle[0].weight[:WIDTH]).to(hidden.dtype)

    def compiled(self, module: nn.Module) -> Any:
        return module


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2, eps=EPS)


def workload(model: type[nn.Module], **options: Any) -> Workload:
    usual: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": adamw, "batch_size": 6, "epochs": 2}
    return Workload(model=model, data=Numbers, **{**usual, **options})


class Normalised(nn.Sequential):
    """Batch normalisation behind Linear layers: gradients before it are small, and rounding decides their signs."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Linear(INPUTS, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()),
            nn.Linear(16, CLASSES),
        )


class Expert(nn.Module):
    """Rows go to one expert or the other, by a product that torch has in float32 and less alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for number in scores.argmax(-1).unique().tolist():
            (rows,) = torch.where(scores.argmax(-1) == number)
            found = found.index_add(0, rows, product(x[rows], self.weight[number]) * scores[rows, number, None])
        return found


def product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype is torch.float64 and a.device.type == "cpu":
        raise RuntimeError("Expected mat_a to be Float32, BFloat16 or Float16 matrix, got Double")
    return a @ b


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), Expert()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(len(x), 2, 1, -1).transpose(1, 2)
        seen = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).contiguous().view(len(x), -1)
        scores = self.gate(x + seen).softmax(-1)
        found: Tensor = x + self.experts(x, scores)
        return found


class Sparse(nn.Module):
    """Experts, of which no tracer follows the forward. ``balanced``: from its first call on it keeps what its gates
    give, by hooks, and its loss has a product of means over the batch."""

    def __init__(self, *, balanced: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.balanced, self.installed = balanced, False
        self.kept: list[Tensor] = []

    def _install(self) -> None:
        for layer in self.layers:
            layer.gate.register_forward_hook(lambda module, args, output: self.kept.append(output))
        self.installed = True

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.balanced and not self.installed:
            self._install()
        self.kept.clear()
        hidden = torch.relu(self.first(x))
        for layer in self.layers:
            hidden = layer(hidden)
        kept = tuple(self.kept)
        self.kept.clear()
        return (self.last(hidden), *kept)


def balanced_loss(outputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs[0], y)
    for gate in outputs[1:]:
        loss = loss + 0.1 * (gate.softmax(-1).mean(0) * (gate > 0).to(gate.dtype).mean(0)).sum()
    return loss


class Insists(Module):
    """It insists on float32 without a word."""

    def compiled(self, module: nn.Module) -> Any:
        return module

    def between(self, hidden: Tensor) -> Tensor:
        assert hidden.dtype != torch.float64
        return torch.relu(hidden)
