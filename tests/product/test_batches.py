"""What a strategy would have to divide or to join is named before the first step, or trains as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import apportion

pytestmark = pytest.mark.filterwarnings("ignore:3 workers x 1 threads")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# A loss over the rows of all ranks, count=None


def sentences() -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(1, 12, (2 + i * 7 % 11,), generator=draws) for i in range(50)]


def padded(samples: list[torch.Tensor]) -> Any:
    return pad_sequence(samples, batch_first=True), pad_sequence([(s * 5 + 2) % 12 for s in samples], True, -100)


def padded_to_one_length(samples: list[torch.Tensor]) -> Any:
    inputs, targets = padded([*samples, torch.ones(12, dtype=torch.long)])
    return inputs[:-1], targets[:-1]


def hard_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Each token counts by its loss, in proportion to the whole batch."""
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * losses.detach()).sum() / losses.detach().sum()


def spread_rows(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Rows are told from the mean of all rows."""
    mine = outputs.mean(1)
    return token_loss(outputs, targets) - 0.01 * (mine - mine.mean(0)).square().mean()


def token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def tagger(collate: Any, loss: Any, **changes: Any) -> apportion.Workload:
    return apportion.Workload(
        model=lambda: nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12)), data=sentences, collate=collate, loss=loss,
        count=None, optimizer=sgd, batch_size=10, precision="float64", **changes,
    )  # fmt: skip


@pytest.mark.parametrize("loss", [hard_tokens, pytest.param(spread_rows, marks=pytest.mark.thorough)])
def test_rows_of_different_lengths_are_stated_where_a_loss_joins_them(loss: Any, trained: Any) -> None:
    with pytest.raises(Exception, match=r"different shapes or types: \(\d, \d+, 12\) .*pad to one length"):
        trained(tagger(padded, loss), "data_parallel", 2)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [hard_tokens, spread_rows])
def test_rows_of_one_length_train_as_on_one_device(loss: Any, trained: Any, furthest: Any) -> None:
    workload = tagger(padded_to_one_length, loss)
    one = trained(workload)
    for workers in (2, 3):
        assert furthest(one, trained(workload, "data_parallel", workers)) < 1e-9


# Targets that are lists


def pictures() -> list[Any]:
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    return [(x, {"boxes": x[:4].expand(1 + i % 5, 4), "name": str(i)}) for i, x in enumerate(inputs)]


def listed(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), [target for _, target in samples]


def in_columns(samples: list[Any]) -> Any:
    targets = [target for _, target in samples]
    return torch.stack([x for x, _ in samples]), {k: [target[k] for target in targets] for k in targets[0]}


def box_loss(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    boxes = targets["boxes"] if isinstance(targets, dict) else [target["boxes"] for target in targets]
    assert len(outputs) == len(boxes)
    return torch.stack([(row - own.to(row)).square().mean() for row, own in zip(outputs, boxes, strict=True)]).mean()


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["data_parallel(microbatches=2)", "pipeline_parallel", "layer_placement"])
@pytest.mark.parametrize("collate", [listed, in_columns])
def test_targets_that_are_lists_train_as_on_one_device(
    collate: Any, strategy: str, trained: Any, furthest: Any
) -> None:
    workload = apportion.Workload(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), data=pictures, collate=collate,
        loss=box_loss, optimizer=sgd, batch_size=9, precision="float64",
    )  # fmt: skip
    assert furthest(trained(workload), trained(workload, strategy, 2)) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize("collate", [listed, in_columns])
def test_targets_that_are_lists_are_named_where_a_loss_joins_them(collate: Any, trained: Any) -> None:
    workload = apportion.Workload(
        model=lambda: nn.Linear(6, 4), data=pictures, collate=collate, loss=box_loss, optimizer=sgd, batch_size=9,
        count=None,
    )  # fmt: skip
    with pytest.raises(Exception, match=r"targets(\['boxes'\])? is a list of \d entries"):
        trained(workload, "data_parallel", 2)
