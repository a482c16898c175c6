"""What a file loses beside its network, and whether the examples prove it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from apportion.core.workload import accuracy
from apportion.exporting.paired_loss import ComparedOutputs, PairedLoss, paired_loss


def answers(right: list[bool]) -> Tensor:
    """Outputs of two classes for targets of class 1."""
    return torch.nn.functional.one_hot(torch.tensor(right).long(), 2).float()


def classes(examples: int, lost: int, gained: int, most_lost: float) -> PairedLoss:
    before = [number >= gained for number in range(examples)]
    after = [number < examples - lost for number in range(examples)]
    computed = ComparedOutputs(
        targets=torch.ones(examples).long(), before=answers(before), after=answers(after), examples=examples
    )
    return paired_loss("accuracy", accuracy, [computed], most_lost=most_lost, classes=True)


@pytest.mark.parametrize(
    ("examples", "lost", "gained", "most_lost", "proved"),
    [
        (1, 1, 0, 0.003, False),
        (150, 1, 0, 0.003, False),
        (600, 2, 0, 0.0, False),
        (150, 6, 0, 0.003, True),
        (150, 6, 0, 0.05, False),
        (10_000, 60, 0, 0.003, True),
        (10_000, 60, 55, 0.003, False),
        (40, 40, 0, 0.003, True),
        (40, 40, 0, 1.0, False),
    ],
)
def test_a_loss_of_answers_is_proved_beyond_the_interval_alone(
    examples: int, lost: int, gained: int, most_lost: float, proved: bool
) -> None:
    found = classes(examples, lost, gained, most_lost)
    assert found.proved is proved
    assert found.lost == pytest.approx((lost - gained) / examples)
    assert f"{examples:,} examples" in found.sentence
    assert "most_lost=" in found.sentence


def numbers(error: float, examples: int = 1000, *, score: bool = False, most_lost: float = 0.01) -> PairedLoss:
    drawn = torch.Generator().manual_seed(0)
    targets = torch.randn(examples, 1, generator=drawn)
    before = targets + 0.5 * torch.randn(examples, 1, generator=drawn)
    after = before + error * torch.randn(examples, 1, generator=drawn)

    def determined(outputs: Tensor, wanted: Tensor) -> Tensor:
        return 1 - (outputs - wanted).square().mean() / (wanted - wanted.mean()).square().mean()

    both = [
        ComparedOutputs(targets=targets[part], before=before[part], after=after[part], examples=examples // 2)
        for part in (slice(0, examples // 2), slice(examples // 2, examples))
    ]
    metric = determined if score else nn.functional.mse_loss
    return paired_loss("metric", metric, both, most_lost=most_lost, classes=False)


@pytest.mark.parametrize("score", [False, True])
def test_in_regression_a_share_of_an_error_or_of_a_score_may_be_lost(score: bool) -> None:
    assert not numbers(0.01, score=score).proved
    worse = numbers(0.4, score=score)
    assert worse.proved
    assert worse.lost > 0.1
    assert "worse" in worse.sentence


def test_a_file_whose_metric_is_no_number_has_lost() -> None:
    x = torch.ones(20, 1)
    computed = ComparedOutputs(targets=x, before=x + 1, after=x / 0, examples=20)
    assert paired_loss("mse", nn.functional.mse_loss, [computed], most_lost=1.0, classes=False).proved
