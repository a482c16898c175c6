"""The beginnings of a data set's sequences, for a proof that has no time for whole ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from apportion.core.torch_private import pytree

LENGTH = 16
"""The number of tokens that a sequence is cut to."""
_TOKENS = (torch.int32, torch.int64)


def with_short_sequences(data: Dataset[Any]) -> Dataset[Any]:
    """Return the same examples with sequences of ``LENGTH`` tokens. Raises ValueError where no example has any.

    A sequence of tokens is an input of whole numbers with one dimension. What else in an example has a dimension of
    that length (labels, masks, features of each token) is cut to the same tokens.
    """
    if not any(_lengths(data[i]) for i in range(min(4, len(data)))):  # type: ignore[arg-type]
        raise ValueError(f"no example has a sequence of more than {LENGTH} tokens that could be cut")
    if type(data) is TensorDataset:
        lengths = _lengths(data[0])
        return TensorDataset(*(_cut(t, lengths, first=1) for t in data.tensors))
    return _Short(data) if getattr(data, "__getitems__", None) is None else _ShortTogether(data)


@dataclass(frozen=True)
class _Short(Dataset[Any]):
    data: Dataset[Any]

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, number: int) -> Any:
        return _shortened(self.data[number])


class _ShortTogether(_Short):
    """The shortened examples of a data set that is asked for many at once."""

    def __getitems__(self, numbers: list[int]) -> Any:
        together: Any = self.data
        return [_shortened(example) for example in together.__getitems__(numbers)]


def _shortened(example: Any) -> Any:
    lengths = _lengths(example)
    return pytree.tree_map(lambda leaf: _cut(leaf, lengths), example)


def _lengths(example: Any) -> set[int]:
    """Returns the lengths of an example's sequences that are to be cut."""
    inputs = example[0] if isinstance(example, tuple | list) and len(example) > 1 else example
    sequences = (leaf for leaf in pytree.tree_leaves(inputs) if _is_tokens(leaf))
    return {n for leaf in sequences if (n := int(leaf.shape[0])) > LENGTH}


def _is_tokens(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dtype in _TOKENS and leaf.ndim == 1
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind == "i" and leaf.ndim == 1


def _cut(leaf: Any, lengths: Collection[int], *, first: int = 0) -> Any:
    """Returns the beginning along every dimension of one of these lengths, from the dimension ``first`` on."""
    if not isinstance(leaf, Tensor | np.ndarray):
        return leaf
    found = leaf[tuple(slice(LENGTH if at >= first and n in lengths else None) for at, n in enumerate(leaf.shape))]
    return found.contiguous() if isinstance(found, Tensor) else found
