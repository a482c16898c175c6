"""Losses and networks that couple the rows of a batch, and those that only seem to: the first are refused before the
first step where a strategy divides the batch, the second train as one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import apportion

Loss = Callable[[Any, Any], Tensor]


def rows(targets: Callable[[Tensor], Any], many: int = 480) -> TensorDataset:
    inputs = torch.randn(many, 10, generator=torch.Generator().manual_seed(1))
    made = targets(inputs)
    return TensorDataset(inputs, *(made if isinstance(made, tuple) else (made,)))


def workload(loss: Loss, targets: Callable[[Tensor], Any], outputs: int, **changes: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, outputs)),
        "data": lambda: rows(targets),
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        "batch_size": 48,
        "steps": 12,
        "precision": "float64",
    }
    return apportion.Workload(**{**given, **changes})


def signs(inputs: Tensor) -> Tensor:
    return (inputs[:, 0] > inputs[:, 1]).double() * 2 - 1


def classes(inputs: Tensor) -> Tensor:
    return inputs[:, :3].argmax(1)


def tripled(inputs: Tensor) -> Tensor:
    return inputs[:, :3] * 2


def hinge_of_the_active(outputs: Tensor, targets: Tensor) -> Tensor:
    missing = (1 - outputs[:, 0] * targets).clamp(min=0)
    return missing.sum() / (missing > 0).sum().clamp(min=1)


def confident_only(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the rows whose largest probability is below 0.95, as in self-training: at first all of them."""
    each = functional.cross_entropy(outputs, targets, reduction="none")
    kept = outputs.softmax(1).amax(1) < 0.95
    return (each * kept).sum() / kept.sum().clamp(min=1)


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs @ targets.T, torch.arange(len(outputs)))


def hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none").topk(max(1, len(outputs) // 4)).values.mean()


COUPLED: dict[str, tuple[Loss, Any, int]] = {
    "rows within a margin": (hinge_of_the_active, signs, 1),
    "rows that are not sure": (confident_only, classes, 3),
    "contrastive": (contrastive, tripled, 3),
    "the hardest rows": (hardest, classes, 3),
}


def refusal(of: apportion.Workload, strategy: str = "data_parallel", **options: Any) -> str:
    with pytest.raises((apportion.Disproved, ValueError)) as found:
        apportion.train(of, strategy, launcher=apportion.local(workers=2), **options)
    return str(found.value)


@pytest.mark.thorough
@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_rows_is_refused_with_the_remedy_which_is_right(
    name: str, trained: Any, furthest: Any, tmp_path: Any
) -> None:
    made = workload(*COUPLED[name])
    said = refusal(made, run_dir=tmp_path / "refused")
    assert "the loss couples the rows of a batch" in said
    assert "count=None" in said
    mended = workload(*COUPLED[name], count=None)
    assert furthest(trained(mended), trained(mended, "data_parallel", 2)) < 1e-9


@pytest.mark.thorough
def test_a_strategy_that_divides_no_batch_trains_it(trained: Any, furthest: Any) -> None:
    made = workload(*COUPLED["the hardest rows"])
    assert furthest(trained(made), trained(made, "tensor_parallel", 2)) < 1e-9


class AgainstTheFirst(nn.Module):
    """Holds the rows beyond the first 40 of a batch against the mean of those."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.cat([x[:40], x[40:] - x[:40].mean(0)]))


class LargeBatches(nn.Module):
    """Scales large batches by their own largest value, as a guard against overflow might."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().max() if len(x) > 36 else x / 3


@pytest.mark.thorough
@pytest.mark.parametrize("layer", [AgainstTheFirst, LargeBatches])
def test_rows_that_a_layer_couples_in_large_batches_alone_are_refused(layer: type[nn.Module], tmp_path: Any) -> None:
    made = workload(
        functional.cross_entropy,
        classes,
        3,
        model=lambda: nn.Sequential(nn.Linear(10, 16), layer(), nn.Linear(16, 3)),
        batch_size=96,
    )
    assert "does not train the same network" in refusal(made, run_dir=tmp_path / "refused")


class Computes(nn.Module):
    """A network that computes its loss by itself, and normalises by the batch."""

    def __init__(self, loss: Loss, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, outputs))
        self.loss = loss

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        outputs = self.layers(x)
        return {"loss": self.loss(outputs, targets), "outputs": outputs}


class Labelled(Dataset[Any]):
    """Rows whose inputs have the targets, too."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        x, target = self._data[index]
        return (x, target), target


def computed(loss: Loss, targets: Callable[[Tensor], Any], outputs: int) -> apportion.Workload:
    return workload(
        lambda outputs, _: outputs["loss"],
        targets,
        outputs,
        model=lambda: Computes(loss, outputs),
        data=lambda: Labelled(rows(targets)),
    )


def hardest_of_many(outputs: Tensor, targets: Tensor) -> Tensor:
    each = functional.cross_entropy(outputs, targets, reduction="none")
    return (each.topk(len(each) // 3).values if len(each) > 8 else each).mean()


def without_outliers(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the rows within a limit, which at first are all."""
    kept = outputs.detach().abs().amax(1) < 4.0
    return (functional.cross_entropy(outputs, targets, reduction="none") * kept).sum() / kept.sum().clamp(min=1)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [hardest_of_many, without_outliers])
def test_a_loss_that_couples_rows_within_the_model_is_refused(loss: Loss, tmp_path: Any) -> None:
    said = refusal(computed(loss, classes, 3), run_dir=tmp_path / "refused")
    assert "the loss couples the rows of a batch" in said or "count=None where the loss couples" in said


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [functional.cross_entropy, nn.MultiMarginLoss()])
def test_a_correct_loss_within_the_model_is_not_refused(loss: Loss, trained: Any, furthest: Any) -> None:
    made = computed(loss, classes, 3)
    assert furthest(trained(made), trained(made, "data_parallel", 2)) < 1e-9


def two_heads(outputs: Tensor, targets: Any) -> Tensor:
    return functional.cross_entropy(outputs[:, :3], targets.argmax(1)) + 0.3 * functional.mse_loss(outputs, targets)


CORRECT: dict[str, tuple[Loss, Any, int]] = {
    "mse": (nn.MSELoss(), tripled, 3),
    "l1": (nn.L1Loss(), tripled, 3),
    "huber": (nn.HuberLoss(), tripled, 3),
    "binary": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(9.0)), lambda x: (x[:, :3] > 1).double(), 3),
    "kl": (
        lambda outputs, targets: functional.kl_div(outputs.log_softmax(1), targets, reduction="batchmean"),
        lambda x: x[:, :3].softmax(1),
        3,
    ),
    "gaussian": (
        lambda outputs, targets: functional.gaussian_nll_loss(outputs[:, 0], targets, outputs[:, 1].exp()),
        lambda x: x[:, 0],
        2,
    ),
    "poisson": (nn.PoissonNLLLoss(), lambda x: x[:, :1].abs().floor(), 1),
    "margin": (nn.MultiMarginLoss(), classes, 3),
    "soft margin": (lambda outputs, targets: functional.soft_margin_loss(outputs[:, 0], targets), signs, 1),
    "two heads": (two_heads, tripled, 3),
    "triplet": (
        lambda outputs, targets: functional.triplet_margin_loss(outputs[:, :3], targets, targets.flip(1)),
        tripled,
        3,
    ),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), classes, 3),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_loss_is_not_refused(name: str, trained: Any, furthest: Any) -> None:
    made = workload(*CORRECT[name], steps=6)
    assert furthest(trained(made), trained(made, "data_parallel", 2)) < 1e-9
