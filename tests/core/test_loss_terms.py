"""The number of loss terms that is derived from a loss: what torch's own mean divides by."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from apportion.core.data.source import BatchSource
from apportion.core.loss_terms import LabelTerms, derived_count, examples
from apportion.core.workload import Workload

WEIGHT = torch.tensor([1.0, 0.5, 40.0, 0.0], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 1, -100, 2, 0])
LOGITS = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LOSSES: dict[str, Any] = {
    "plain": functional.cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "weights": nn.CrossEntropyLoss(weight=WEIGHT),
    "smoothed": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2),
    "another ignored": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1),
    "partial": functools.partial(functional.cross_entropy, weight=WEIGHT, ignore_index=2),
    "partial of a partial": functools.partial(functools.partial(functional.cross_entropy, weight=WEIGHT)),
    "nll": nn.NLLLoss(weight=WEIGHT),
    "nll of a function": functools.partial(functional.nll_loss, ignore_index=0),
}


def adds_up(loss: Callable[[Any, Any], Tensor], logits: Tensor, targets: Tensor) -> None:
    count = derived_count(loss)
    parts = [slice(0, 3), slice(3, 8)]
    sums = [count(targets[rows]) * loss(logits[rows], targets[rows]) for rows in parts]
    torch.testing.assert_close(sum(sums), count(targets) * loss(logits, targets), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_the_terms_of_two_parts_are_those_of_the_whole(name: str) -> None:
    labels = LABELS.masked_fill(LABELS == -100, 1) if "another" in name or "function" in name else LABELS
    adds_up(LOSSES[name], LOGITS, labels if name != "partial" else labels.masked_fill(labels == -100, 2))


def test_labels_of_many_places_and_probabilities_are_counted_as_torch_does() -> None:
    many = torch.randn(8, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(4, (8, 5), generator=torch.Generator().manual_seed(2))
    adds_up(nn.CrossEntropyLoss(weight=WEIGHT), many, labels.masked_fill(labels == 3, -100))
    adds_up(nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), LOGITS, LOGITS.softmax(1))
    adds_up(nn.CrossEntropyLoss(), many, many.softmax(1))


def test_what_cannot_be_seen_counts_one_term_a_row() -> None:
    assert derived_count(lambda outputs, targets: functional.cross_entropy(outputs, targets)) is examples
    assert derived_count(nn.CrossEntropyLoss(reduction="sum")) is examples
    assert derived_count(nn.MSELoss()) is derived_count(None) is examples
    hooked = nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda module, given, found: found * 2)
    assert derived_count(hooked) is examples


def workload(labels: Tensor, **options: Any) -> Workload:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 4),
        "data": lambda: TensorDataset(LOGITS, labels),
        "loss": functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "batch_size": 4,
    }
    return Workload(**{**given, **options})


def test_rows_are_counted_without_looking_where_no_label_is_ignored() -> None:
    assert BatchSource(workload(LABELS.clamp(min=0))).count is examples
    assert isinstance(BatchSource(workload(LABELS)).count, LabelTerms)
    assert isinstance(BatchSource(workload(LABELS.clamp(min=0), loss=LOSSES["weights"])).count, LabelTerms)
    changed = workload(LABELS.clamp(min=0), augment=lambda batch, draws: batch)
    assert isinstance(BatchSource(changed).count, LabelTerms)


def test_a_count_that_is_given_is_obeyed_even_where_it_is_the_default() -> None:
    assert workload(LABELS, count=examples).terms is examples
    assert BatchSource(workload(LABELS, count=examples)).count is examples
    assert workload(LABELS, count=None).terms is None


def test_a_count_that_is_no_function_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(ValueError, match=r"count=3 must be a function of the targets, as count=lambda"):
        workload(LABELS, count=3)
