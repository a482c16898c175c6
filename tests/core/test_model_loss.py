"""A loss that takes the loss of its model is known by what it reads, and is not called where it does more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from apportion.core.loss_terms import ModelLabelTerms, ModelTerms, examples, resolved, takes_loss_of_model

CALLS: list[Any] = []


def of_attribute(outputs: Any, _: Any) -> Any:
    loss = outputs.loss
    return loss


class Criterion(nn.Module):
    def forward(self, outputs: Any, targets: Any) -> Any:
        return outputs["loss"]


class Chosen:
    def __call__(self, outputs: Any, targets: Any) -> Any:
        return outputs[0]

    def counted(self, outputs: Any, targets: Any) -> Any:
        self.calls = 1
        return outputs.loss


def counts(outputs: Any, targets: Any) -> Any:
    CALLS.append(1)
    return outputs.loss


@pytest.mark.parametrize(
    "loss",
    [
        of_attribute,
        Criterion(),
        Chosen(),
        lambda outputs, labels: outputs,
        lambda outputs, labels: outputs.get("loss"),
        lambda outputs, labels: outputs.loss.mean(),
    ],
)
def test_a_loss_that_takes_the_loss_of_its_model(loss: Any) -> None:
    assert takes_loss_of_model(loss)


@pytest.mark.parametrize(
    "loss",
    [
        counts,
        Chosen().counted,
        functional.cross_entropy,
        nn.CrossEntropyLoss(),
        lambda outputs, labels: outputs.logits,
        lambda outputs, labels: outputs.loss + outputs.other,
        lambda outputs, labels: outputs.loss * 2,
        lambda outputs, labels: functional.cross_entropy(outputs.logits, labels),
        None,
    ],
)
def test_another_loss_is_not_called(loss: Any) -> None:
    assert not takes_loss_of_model(loss)
    assert not CALLS


def test_the_terms_of_a_model_that_is_none_of_transformers_are_its_rows() -> None:
    assert resolved(ModelTerms(), nn.Linear(2, 2)) is examples
    assert resolved(examples, nn.Linear(2, 2)) is examples
    assert resolved(None, nn.Linear(2, 2)) is None


def test_labels_are_counted_where_the_targets_are_labels_or_have_them() -> None:
    labels = torch.tensor([[1, 2, -100, 4], [-100, 2, 3, -100]])
    assert ModelLabelTerms()(labels) == 5
    assert ModelLabelTerms(shifted=True)(labels) == 4
    assert ModelLabelTerms(shifted=True)({"labels": labels, "other": labels[:1]}) == 4
    assert ModelLabelTerms()(torch.ones(3, 2)) == 3
