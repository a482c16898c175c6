"""An embedding cut by its vocabulary: each rank looks up the words whose rows it holds, and the ranks add up.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from apportion.comm.group import Group
from apportion.parallel.tensor.linear import sum_terms
from apportion.parallel.tensor.slicing import Slicer


def can_be_sliced(layer: nn.Module) -> bool:
    """Return whether an embedding can be cut by words: its gradients are dense and of each word by itself, and a
    look-up does not change its weights (``max_norm``)."""
    plain = type(layer) is nn.Embedding and not layer.sparse and not layer.scale_grad_by_freq
    return plain and layer.max_norm is None


def slice_vocabulary(layer: nn.Embedding, slicer: Slicer) -> None:
    """Cut an embedding so that each rank holds the rows of some words. In place, by class."""
    own = slicer.own_units(layer.num_embeddings)
    sliced: Any = layer
    sliced.__class__, sliced.group, sliced.own = VocabularySlice, slicer.group, own
    slicer.cut(layer, "weight", own, None)


class VocabularySlice(nn.Embedding):
    """An embedding with the rows of some words: tokens (...) -> (..., dim), whole on every rank."""

    group: Group
    own: range

    def forward(self, tokens: Tensor) -> Tensor:
        if len(self.own) == self.num_embeddings:
            return sum_terms(super().forward(tokens), self.group)
        if not len(self.own):
            return sum_terms(self._nothing(tokens), self.group)
        elsewhere = self._elsewhere(tokens)
        rows = (tokens - self.own.start).masked_fill(elsewhere, 0)
        found = functional.embedding(rows, self.weight, self._padding(), None, 2.0, False, False)
        return sum_terms(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)

    def _elsewhere(self, tokens: Tensor) -> Tensor:
        """The mask of words that other ranks have. A word that no rank has is looked up by the first or the last:
        torch's own error."""
        if self.own.start == 0:
            return tokens >= self.own.stop
        if self.own.stop == self.num_embeddings:
            return tokens < self.own.start
        return (tokens < self.own.start) | (tokens >= self.own.stop)

    def _nothing(self, tokens: Tensor) -> Tensor:
        """The result of an empty slice: zeros that the slice has a gradient from, as it would have on one device."""
        zeros = self.weight.new_zeros((*tokens.shape, self.embedding_dim))
        return zeros + self.weight.sum(0)

    def _padding(self) -> int | None:
        """The word whose row gets no gradient, counted among the rank's own; None where another rank has it, or there
        is none."""
        padding = self.padding_idx
        return padding - self.own.start if padding is not None and padding in self.own else None
