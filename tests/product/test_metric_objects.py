"""A metric object gives the same figure, to the last digit, on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

import apportion

pytestmark = pytest.mark.filterwarnings("ignore:3 workers x 1 threads")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def same_on(
    workload: apportion.Workload, tmp_path: Path, *workers: int, strategy: str = "data_parallel"
) -> dict[str, float]:
    """Trains one network by one process, and evaluates it by this many workers as well. The weights are those of the
    same checkpoint, so that figures are compared and not trainings."""
    first = tmp_path / "one"
    found = dict(
        apportion.train(workload, launcher=apportion.local(1), strategy="single_device", run_dir=first).metrics
    )
    for many in workers:
        launcher = apportion.local(workers=many)
        again = apportion.train(workload, strategy, launcher=launcher, run_dir=tmp_path / str(many), check=False)
        assert dict(again.metrics) == found, many
    return found


# Padded sequences


def sentences() -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(1, 12, (2 + i * 7 % 11,), generator=draws) for i in range(47)]


def padded(samples: list[torch.Tensor]) -> Any:
    return pad_sequence(samples, batch_first=True), pad_sequence([(s * 5 + 2) % 12 for s in samples], True, -100)


class TokenAccuracy:
    """Adds up over tokens, so that parts of a batch give the figure of the whole."""

    def __init__(self) -> None:
        self.right = self.all = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        kept = targets != -100
        self.right += int((outputs.argmax(-1) == targets)[kept].sum())
        self.all += int(kept.sum())

    def compute(self) -> float:
        return self.right / self.all


class LongestRow:
    """Takes the mean of a figure of each batch, which no parts of a batch give."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.lengths.append(targets.shape[1])

    def compute(self) -> float:
        return sum(self.lengths) / len(self.lengths)


class Rounded:
    """Adds numbers of which the sum depends on the order."""

    def __init__(self) -> None:
        self.sum = torch.zeros(())

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.sum = self.sum + F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())

    def compute(self) -> torch.Tensor:
        return self.sum


def token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Tagger(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(12, 8), nn.Linear(8, 12))


class ContextTagger(nn.Module):
    """Pads are among what it looks at, so that its outputs depend on how long a batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(16, 8), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(self.mix(torch.cat([x, x.mean(1, keepdim=True).expand_as(x)], -1)).tanh())


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Tagger, ContextTagger])
def test_padded_sequences(model: Any, tmp_path: Path) -> None:
    metrics: Any = {"tokens": TokenAccuracy, "longest": LongestRow, "rounded": Rounded}
    workload = apportion.Workload(
        model=model, data=sentences, collate=padded, loss=token_loss, batch_size=10, steps=1, precision="float64",
        count=lambda targets: float((targets != -100).sum()), optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        evaluation=apportion.Evaluation(data=sentences, metrics=metrics, every=None),
    )  # fmt: skip
    found = same_on(workload, tmp_path, 2, 3)
    assert found["longest"] == pytest.approx(11.6)


# Lists, captions and dicts


def pictures() -> list[Any]:
    inputs = torch.randn(25, 6, generator=torch.Generator().manual_seed(1))
    return [(x, x[:4].expand(1 + i % 5, 4), f"a picture, the {i}th") for i, x in enumerate(inputs)]


def with_boxes(samples: list[Any]) -> Any:
    inputs, boxes, captions = zip(*samples, strict=True)
    return torch.stack(inputs), {"boxes": list(boxes), "captions": captions, "count": len(samples)}


class Detector(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 4)


class ListingDetector(nn.Module):
    """Gives a list of dicts, one a picture, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, images: torch.Tensor) -> Any:
        return [{"boxes": row.expand(1 + int(row[0] > 0), 4)} for row in self.layer(images)]


def box_loss(outputs: Any, targets: Any) -> torch.Tensor:
    rows = [row["boxes"][0] if isinstance(row, dict) else row for row in outputs]
    return torch.stack([(r - b.to(r)).square().mean() for r, b in zip(rows, targets["boxes"], strict=True)]).mean()


class OwnBoxes:
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def update(self, outputs: Any, targets: Any) -> None:
        assert len(outputs) == len(targets["boxes"]) == len(targets["captions"])
        for boxes, caption in zip(targets["boxes"], targets["captions"], strict=True):
            self.seen.append(len(boxes) == 1 + int(caption.split()[-1][:-2]) % 5)

    def compute(self) -> int:
        return sum(self.seen)


class Order(OwnBoxes):
    """The order of the pictures, as a number."""

    def compute(self) -> float:
        return float(len(self.seen))

    def update(self, outputs: Any, targets: Any) -> None:
        for caption in targets["captions"]:
            number = int(caption.split()[-1][:-2])
            assert number == len(self.seen), "the pictures come in order"
            self.seen.append(True)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Detector, ListingDetector])
def test_lists_of_boxes_and_captions(model: Any, tmp_path: Path) -> None:
    workload = apportion.Workload(
        model=model, data=pictures, collate=with_boxes, loss=box_loss, batch_size=8, steps=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        evaluation=apportion.Evaluation(data=pictures, metrics={"own": OwnBoxes, "order": Order}, every=None),
    )  # fmt: skip
    assert same_on(workload, tmp_path, 2, 3) == {"own": 25.0, "order": 25.0}


# Rows of other numbers, and many bytes


def broken() -> list[Any]:
    inputs = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    return [(x * (torch.nan if i % 7 in (2, 3) else 1.0), x[:3].argmax()) for i, x in enumerate(inputs)]


def unbroken(samples: list[Any]) -> Any:
    inputs, labels = (torch.stack(each) for each in zip(*samples, strict=True))
    kept = ~inputs.isnan().any(1)
    return inputs[kept], {"label": labels[kept]}


class Confusion:
    def __init__(self) -> None:
        self.table = torch.zeros(3, 3, dtype=torch.int64)
        self.updates = 0

    def update(self, outputs: torch.Tensor, targets: Any) -> None:
        labels = targets["label"] if isinstance(targets, dict) else targets
        self.updates += 1
        for predicted, label in zip(outputs[:, :3].argmax(1).tolist(), labels.tolist(), strict=True):
            self.table[label, predicted] += 1

    def compute(self) -> float:
        return float((self.table * torch.tensor([[1, 3, 5], [7, 11, 13], [17, 19, 23]])).sum()) + self.updates / 1024


@pytest.mark.thorough
@pytest.mark.parametrize("many", [2, 3])
def test_rows_that_were_left_out(many: int, tmp_path: Path) -> None:
    workload = apportion.Workload(
        model=lambda: nn.Linear(6, 3), data=broken, collate=unbroken, steps=1, batch_size=7,
        loss=lambda outputs, targets: F.cross_entropy(outputs, targets["label"]),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        evaluation=apportion.Evaluation(data=broken, metrics={"confusion": Confusion}, every=None),
    )  # fmt: skip
    same_on(workload, tmp_path, many)


@pytest.mark.thorough
@pytest.mark.parametrize("ragged", [False, True])
def test_outputs_of_many_bytes(ragged: bool, tmp_path: Path) -> None:
    def data() -> TensorDataset:
        return TensorDataset(torch.randn(66, 6, generator=torch.Generator().manual_seed(2)), torch.arange(66) % 3)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            width = 80_000 if not ragged else 80_000 + 40_000 * (len(x) % 3)
            return F.pad(self.layer(x), (0, 0 if self.training else width))

    workload = apportion.Workload(
        model=Wide, data=data, loss=lambda o, t: F.cross_entropy(o[:, :3], t), steps=1, batch_size=64,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        evaluation=apportion.Evaluation(data=data, metrics={"confusion": Confusion}, every=None),
    )  # fmt: skip
    same_on(workload, tmp_path, 2, 3)
