"""with_replacement: every draw is any example, each as likely as the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from apportion.core.order import Index, Order, generator, must_be_draws


@final
@dataclass(frozen=True, repr=False)
class WithReplacement(Order):
    """Draws uniformly from all examples, as ``torch.utils.data.RandomSampler(replacement=True)`` does: in an epoch of
    as many draws as there are examples, 37 % of them are not drawn."""

    positional: ClassVar[tuple[str, ...]] = ("draws",)

    draws: int | None = None
    """The examples that are drawn in an epoch; None: as many as the data set has."""

    def __post_init__(self) -> None:
        must_be_draws(self.draws)

    def length(self, examples: int) -> int:
        return examples if self.draws is None else self.draws

    def epoch(self, examples: int, batch_size: int, seed: int, epoch: int) -> Index:
        drawn: Index = torch.randint(
            examples, (self.length(examples),), generator=generator(seed, epoch, 0x3E91)
        ).numpy()
        return drawn

    def of_rows(self, rows: object) -> Order:
        return WithReplacement()
