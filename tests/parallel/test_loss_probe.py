"""A loss tried by itself: a wrong number of terms and coupled rows are found, and a correct loss is not suspected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from apportion.core.loss_terms import derived_count, examples
from apportion.parallel.batch_coupling.loss_probe import ModelValue, probe_loss, probe_model

ROWS = 12


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(3)


X = torch.randn(ROWS, 5, dtype=torch.float64, generator=draws())
Y = torch.randn(ROWS, 5, dtype=torch.float64, generator=draws()) + 1
LABELS = torch.randint(5, (ROWS,), generator=draws())
TOKENS = torch.randn(ROWS, 7, 5, dtype=torch.float64, generator=draws())
WORDS = torch.randint(5, (ROWS, 7), generator=draws())
RARE_WORDS = WORDS.masked_fill(torch.rand(ROWS, 7, generator=draws()) < 0.1, -100)
MASK = torch.rand(ROWS, 7, generator=draws()) < 0.8
HEAVY = torch.tensor([1.0, 1, 1, 1, 40], dtype=torch.float64)
WEIGHTS = torch.ones(ROWS, dtype=torch.float64).index_fill(0, torch.tensor([4]), 50.0)


def flat(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    each = functional.cross_entropy(outputs, targets, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def masked_smooth(outputs: Tensor, targets: Any) -> Tensor:
    values, mask = targets
    return functional.smooth_l1_loss(outputs.mean(-1), values, reduction="none")[mask].mean()


def masked_binary(outputs: Tensor, targets: Any) -> Tensor:
    each = functional.binary_cross_entropy_with_logits(
        outputs.mean(-1), targets["labels"], pos_weight=HEAVY[4], reduction="none"
    )
    return (each * targets["mask"]).sum() / targets["mask"].sum()


def weighted_rows(outputs: Tensor, targets: Any) -> Tensor:
    labels, weights = targets
    return (functional.cross_entropy(outputs, labels, reduction="none") * weights).sum() / weights.sum()


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    missing = (1 - outputs[:, 0] * targets).clamp(min=0)
    return missing.sum() / (missing > 0).sum().clamp(min=1)


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs @ targets.T, torch.arange(len(outputs)))


def hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none").topk(max(1, len(outputs) // 4)).values.mean()


def standardised(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss((outputs - outputs.mean(0)) / outputs.std(0), targets)


def ctc(outputs: Tensor, targets: Any) -> Tensor:
    words, lengths = targets
    given = torch.full((len(outputs),), outputs.shape[1])
    return functional.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), words, given, lengths)


def triplet(outputs: Any, targets: Tensor) -> Tensor:
    return functional.triplet_margin_loss(*outputs)


def several(outputs: Any, targets: Any) -> Tensor:
    return functional.cross_entropy(outputs["a"], targets[0]) + 0.1 * functional.mse_loss(outputs["b"], targets[1])


def dice(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1 - 2 * (outputs * targets).sum(1) / (outputs + targets).sum(1)).mean()


SHORT = (WORDS.clamp(min=1)[:, :3], torch.randint(1, 4, (ROWS,), generator=draws()))
CORRECT: dict[str, tuple[Any, Any, Any, Any]] = {
    "mse": (functional.mse_loss, examples, X, Y),
    "l1": (nn.L1Loss(), examples, X, Y),
    "huber": (nn.HuberLoss(), examples, X, Y),
    "bce of probabilities": (nn.BCELoss(), examples, X.sigmoid(), Y.sigmoid()),
    "bce with logits": (nn.BCEWithLogitsLoss(pos_weight=HEAVY), examples, X, Y.sigmoid()),
    "kl": (nn.KLDivLoss(reduction="batchmean"), examples, X.log_softmax(1), Y.softmax(1)),
    "gaussian": (lambda o, t: functional.gaussian_nll_loss(o[0], t, o[1].exp()), examples, (X, Y), Y),
    "gaussian with a variance": (lambda o, t: functional.gaussian_nll_loss(o[0], t, o[1]), examples, (X, Y.exp()), Y),
    "poisson": (nn.PoissonNLLLoss(), examples, X, Y.abs()),
    "triplet": (triplet, examples, (X, Y, X.flip(0)), LABELS),
    "ctc": (ctc, examples, TOKENS, SHORT),
    "tokens": (flat, torch.numel, TOKENS, WORDS),
    "tokens, rows": (flat, examples, TOKENS, WORDS),
    "ignored": (flat, lambda t: float((t != -100).sum()), TOKENS, RARE_WORDS),
    "shifted": (shifted, lambda t: float((t[:, 1:] != -100).sum()), TOKENS, RARE_WORDS),
    "focal": (focal, examples, X, LABELS),
    "several": (several, examples, {"a": X, "b": Y}, (LABELS, X)),
    "class weights": (loss := nn.CrossEntropyLoss(weight=HEAVY), derived_count(loss), X, LABELS),
    "smoothed": (loss := nn.CrossEntropyLoss(weight=HEAVY, label_smoothing=0.1), derived_count(loss), X, LABELS),
    "row weights": (weighted_rows, lambda t: float(t[1].sum()), X, (LABELS, WEIGHTS)),
    "cosine": (lambda o, t: functional.cosine_embedding_loss(o[0], o[1], t), examples, (X, Y), LABELS.sign() * 2.0 - 1),
    "in float32": (lambda o, t: functional.mse_loss(o.float(), t.float()), examples, X, Y),
    "margin": (nn.MultiMarginLoss(), examples, X, LABELS),
    "soft margin": (nn.SoftMarginLoss(), examples, X, Y.sign()),
    "dice of each row": (dice, examples, X.sigmoid(), Y.sigmoid()),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_loss_is_not_suspected(name: str) -> None:
    found = probe_loss(*CORRECT[name])
    assert found.problem is None
    assert found.left is None


COUNTS: dict[str, tuple[Callable[..., Tensor], Any, Any, str]] = {
    "ignored": (flat, TOKENS, RARE_WORDS, "count=lambda targets: float((targets != -100).sum())"),
    "shifted": (shifted, TOKENS, RARE_WORDS, "count=lambda targets: float((targets[:, 1:] != -100).sum())"),
    "row weights": (weighted_rows, X, (LABELS, WEIGHTS), "count=lambda targets: float(targets[1].sum())"),
    "a mask": (masked_smooth, TOKENS, (Y[:, :1].expand(-1, 7), MASK), "count=lambda targets: float(targets[1].sum())"),
    "a mask in a dict": (
        masked_binary,
        TOKENS,
        {"labels": Y[:, :1].sigmoid().expand(-1, 7), "mask": MASK},
        "count=lambda targets: float(targets['mask'].sum())",
    ),
    "class weights": (
        lambda outputs, targets: functional.cross_entropy(outputs, targets, HEAVY),
        X,
        LABELS,
        "float(weight[targets].sum())",
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_wrong_count_is_found_with_the_line_to_write(name: str) -> None:
    loss, outputs, targets, line = COUNTS[name]
    problem = probe_loss(loss, examples, outputs, targets).problem
    assert problem is not None
    assert problem.startswith("the mean of the loss does not divide by count=")
    assert line in problem


COUPLED: dict[str, tuple[Callable[..., Tensor], Any, Any]] = {
    "rows within a margin": (margin, X * 0.1, LABELS.sign() * 2.0 - 1),
    "contrastive": (contrastive, X, Y),
    "the hardest rows": (hardest, X, LABELS),
    "standardised": (standardised, X, Y),
    "each row with the next": (lambda o, t: functional.mse_loss(o, t.roll(1, 0)), X, Y),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_rows_is_found(name: str) -> None:
    problem = probe_loss(COUPLED[name][0], examples, *COUPLED[name][1:]).problem
    assert problem is not None
    assert "couples the rows" in problem
    assert "count=None" in problem


def test_a_sum_is_found() -> None:
    problem = probe_loss(nn.MSELoss(reduction="sum"), examples, X, Y).problem
    assert problem is not None
    assert problem.startswith("the loss is a sum over the rows where a mean is expected")


def test_what_cannot_be_tried_is_left_and_said() -> None:
    noisy = lambda outputs, targets: functional.mse_loss(outputs + torch.randn_like(outputs), targets)  # noqa: E731
    assert "draws random numbers" in (probe_loss(noisy, examples, X, Y).left or "")
    assert "as many rows" in (probe_loss(functional.mse_loss, examples, X.mean(), Y).left or "")
    assert "made up" in (probe_loss(lambda outputs, targets: outputs.loss, examples, X, Y).left or "")


def through(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[list[int]], ModelValue]:
    """The loss of some rows, and its gradient by a weight, of a network that computes the loss by itself."""
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)

    def value(rows: list[int]) -> ModelValue:
        found = loss(TOKENS[rows] * weight, RARE_WORDS[rows])
        return ModelValue(float(found.detach()), torch.autograd.grad(found, weight)[0], wide=True)

    return value


def test_a_wrong_count_a_sum_and_coupled_rows_are_found_through_the_model() -> None:
    problem = probe_model(through(shifted), examples, RARE_WORDS, rows=ROWS).problem
    assert problem is not None
    assert "count=lambda targets: float((targets[:, 1:] != -100).sum())" in problem
    right = probe_model(through(shifted), lambda t: float((t[:, 1:] != -100).sum()), RARE_WORDS, rows=ROWS)
    assert right.problem is None
    coupled = through(lambda outputs, targets: flat(outputs - outputs.mean(0), targets))
    assert "couples the rows" in (probe_model(coupled, examples, RARE_WORDS, rows=ROWS).problem or "")
    added = through(lambda outputs, targets: functional.cross_entropy(outputs[:, 0], targets[:, 1], reduction="sum"))
    assert "is a sum over the rows" in (probe_model(added, examples, RARE_WORDS, rows=ROWS).problem or "")
