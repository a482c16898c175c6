"""grouped: batches of examples of similar lengths, so that little of a batch is padding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from apportion.core.order import Index, Order, generator

BATCHES = 50
"""The batches whose examples are sorted together, as in the ``group_by_length`` of transformers' Trainer: of fewer,
more would be padding; of more, batches would be more alike in every epoch."""


@final
@dataclass(frozen=True, repr=False, eq=False)
class Grouped(Order):
    """Every example once an epoch: a permutation drawn from (seed, epoch), sorted by length within 50 batches at a
    time; then the batches are shuffled."""

    lengths: Any = None
    """The length of each example, in the order of the data set; None: the size of dimension 0 of its first input, for
    which every example is read once when the data set is opened."""

    def __post_init__(self) -> None:
        if self.lengths is None:
            return
        try:
            lengths = np.asarray(self.lengths, dtype=np.float64)
        except (TypeError, ValueError):
            lengths = np.empty((0, 0))
        if lengths.ndim != 1 or not len(lengths) or not np.isfinite(lengths).all():
            raise ValueError(
                f"lengths= must be a number for each example, and this is a {type(self.lengths).__name__} of shape "
                f"{np.shape(self.lengths)}: grouped([12, 40, ...]), or grouped() to read them from the data set"
            )
        object.__setattr__(self, "lengths", lengths)

    def __str__(self) -> str:
        if self.lengths is None:
            return "grouped"
        return f"grouped({len(self.lengths)} lengths {hashlib.sha256(self.lengths.tobytes()).hexdigest()[:12]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grouped) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def length(self, examples: int) -> int:
        return examples

    def check(self, examples: int) -> None:
        if self.lengths is not None and len(self.lengths) != examples:
            raise ValueError(
                f"order=grouped(...) has {len(self.lengths):,} lengths, and the data set has {examples:,} examples: "
                "give one for each"
            )

    def opened(self, dataset: Any) -> Order:
        return self if self.lengths is not None else Grouped([_length(dataset[i], i) for i in range(len(dataset))])

    def epoch(self, examples: int, batch_size: int, seed: int, epoch: int) -> Index:
        assert self.lengths is not None, "opened() has read them"
        drawn = generator(seed, epoch, 0x3E93)
        permutation: Index = torch.randperm(examples, generator=drawn).numpy()
        together = batch_size * BATCHES
        groups = [permutation[at : at + together] for at in range(0, examples, together)]
        # The longest first; a stable sort, so that examples of one length stay in the order that was drawn.
        ordered = np.concatenate([group[np.argsort(-self.lengths[group], kind="stable")] for group in groups])
        whole = examples // batch_size
        shuffled = torch.randperm(whole, generator=drawn).numpy()
        batches = [ordered[at * batch_size : (at + 1) * batch_size] for at in shuffled]
        return np.concatenate([*batches, ordered[whole * batch_size :]])  # a short batch is the last one

    def of_rows(self, rows: Sequence[int]) -> Order:
        return self if self.lengths is None else Grouped(self.lengths[np.asarray(rows, dtype=np.int64)])


def _length(example: Any, number: int) -> int:
    """The size of dimension 0 of an example's first input, or the length of a text or list."""
    inputs = example[0] if isinstance(example, tuple | list) and len(example) > 1 else example
    while isinstance(inputs, Mapping) or (isinstance(inputs, tuple) and inputs):
        inputs = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs[0]
    try:
        return len(inputs)
    except TypeError:
        raise ValueError(
            f"order=grouped: example {number} has a {type(inputs).__name__} as its first input, which has no length: "
            "give grouped([12, 40, ...]), one length for each example"
        ) from None
