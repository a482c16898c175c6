"""Networks that are exported to StableHLO, in a process of its own with .venv/tpu on its path:

    python stablehlo_cases.py FOLDER CASE...

prints a line of JSON for each case: what was written, or why it was refused.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TPU = Path(sys.prefix) / "tpu"


@dataclass(frozen=True)
class Case:
    """A network, its inputs and its targets; without targets there is no training step."""

    net: Callable[[], nn.Module]
    inputs: Any
    targets: Any = None
    loss: Callable[[Any, Any], Any] = F.cross_entropy
    target: str = "stablehlo"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(20, 6), nn.LSTM(6, 8, batch_first=True)
        self.out = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.out(self.lstm(self.embedding(tokens))[0][:, -1])
        return found


class Tied(nn.Module):
    """An embedding whose weights are those of the last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("places", torch.linspace(-1, 1, 5)[:, None].repeat(1, 8), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.embedding(tokens) + self.places).mean(1))
        return found


class TwoInTwoOut(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"sum": left + right, "product": left * right}


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[x > 0].sum()


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + len(torch.unique(x))


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Odd(nn.Linear):
    """A network that asks for the number of examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1 if len(x) % 2 else 1 + x)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(80, 4))


def within(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), layer))


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
CLASSES = torch.tensor([0, 2, 1, 2])
CASES: Mapping[str, Case] = {
    "dense": Case(dense, X, CLASSES),
    "convolutional": Case(convolutional, torch.randn(4, 3, 12, 12), CLASSES),
    "recurrent": Case(Recurrent, torch.randint(0, 20, (4, 5)), CLASSES),
    "transformer": Case(transformer, torch.randn(4, 5, 16), CLASSES),
    "tied": Case(Tied, torch.randint(0, 12, (4, 5)), CLASSES),
    "two inputs": Case(TwoInTwoOut, {"right": torch.randn(4, 3), "left": torch.randn(4, 3)}),
    "one batch size": Case(lambda: Odd(6, 6), X, torch.randn(4, 6), F.mse_loss),
    "nothing to train": Case(lambda: nn.Linear(6, 3).requires_grad_(False), X, CLASSES),
    "regression": Case(dense, X, torch.randn(4, 3), F.mse_loss, "stablehlo(platforms=('tpu', 'cuda'))"),
    "fast": Case(dense, X, CLASSES, target="stablehlo(precision='default')"),
    "deciding": Case(within(Deciding()), X),
    "selecting": Case(within(Selecting()), X),
    "counting": Case(within(Counting()), X),
    "noisy": Case(within(Noisy()), X),
    "float64": Case(lambda: dense().double(), X.double()),
    "loss decides": Case(dense, X, CLASSES, lambda y, t: F.cross_entropy(y, t) if y.sum() > 0 else y.mean()),
    "loss of each": Case(dense, X, CLASSES, lambda y, t: F.cross_entropy(y, t, reduction="none")),
}


def exported(case: Case, folder: Path) -> dict[str, Any]:
    """Export a case, and say how it went."""
    from apportion.exporting.exporter import Data, export
    from apportion.exporting.target import Examples

    torch.manual_seed(0)
    net = case.net().train()
    before = {name: x.clone() for name, x in net.state_dict().items()}
    data = None if case.targets is None else Data(calibration=Examples(case.inputs, case.targets), loss=case.loss)
    path = folder / "net.stablehlo"
    try:
        made = export(net, case.inputs, path, target=case.target, data=data, check=[more(case.inputs)])
    except ValueError as error:
        return {"refused": str(error), "left": [file.name for file in folder.iterdir()]}
    told = asdict(made)
    told["path"] = str(path)
    told["left_as_it_was"] = all(part.training for part in net.modules()) and all(
        torch.equal(x, before[name]) for name, x in net.state_dict().items()
    )
    told["opened"], told["in_float32"] = by_jax_alone(path, case.inputs)
    told["fast_path"] = torch.backends.mha.get_fastpath_enabled()
    path.unlink()
    return told


def more(inputs: Any) -> Any:
    """Seven examples of the same, of which the last differ from the first."""
    if isinstance(inputs, Mapping):
        return {name: more(x) for name, x in inputs.items()}
    return inputs[torch.arange(7) * len(inputs) // 7]


def by_jax_alone(path: Path, inputs: Any) -> tuple[list[list[int]], bool]:
    """What docs/stablehlo.md tells to do with a file: the shapes of the outputs, and whether a product in it is to be
    computed in float32 on a TPU too."""
    import jax
    import numpy

    x = [each.numpy() for each in (inputs.values() if isinstance(inputs, Mapping) else [inputs])]
    file = numpy.load(path)
    weights = {name.removeprefix("weights/"): file[name] for name in file if name.startswith("weights/")}
    forward = jax.export.deserialize(bytearray(file["forward"]))
    y = forward.call(weights, *x)
    text = str(forward.mlir_module())
    assert str(Path(__file__).parent) not in text, "paths of this machine are in no file"
    return [list(each.shape) for each in (y if isinstance(y, tuple | list) else [y])], "HIGHEST" in text


def main() -> None:
    """Export the cases that are named."""
    sys.path.append(str(TPU))
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        try:
            told = exported(CASES[name], folder)
        except Exception:
            told = {"failed": traceback.format_exc()}
        print(json.dumps({"case": name, **told}), flush=True)


if __name__ == "__main__":
    main()
