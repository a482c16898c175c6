"""``nn.MultiheadAttention`` cut by heads: each rank projects to, and attends with, its own heads; the output projection
adds up what they give.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from apportion.comm.differentiable import copy_to, gather_from
from apportion.comm.group import Group
from apportion.parallel.tensor.linear import OwnDraws, sum_terms
from apportion.parallel.tensor.slicing import Slicer, shares


def can_be_sliced(layer: nn.Module) -> bool:
    """Return whether attention can be cut by heads: it has no keys and values that are added to every sequence
    (``add_bias_kv``, ``add_zero_attn``)."""
    return type(layer) is nn.MultiheadAttention and layer.bias_k is None and not layer.add_zero_attn


def slice_heads(layer: nn.MultiheadAttention, slicer: Slicer, number: int) -> None:
    """Cut an attention so that each rank computes some of the heads. ``number``: which of the model's layers it is. In
    place, by class."""
    width, embed = layer.head_dim, layer.embed_dim
    heads = slicer.own_units(layer.num_heads)
    own = range(heads.start * width, heads.stop * width)
    every_third = [i + part * embed for part in range(3) for i in own]
    sliced: Any = layer
    sliced.__class__, sliced.group, sliced.heads = HeadsSlice, slicer.group, shares(layer.num_heads, slicer.group.size)
    sliced.draws = OwnDraws(slicer.group.rank, number)
    slicer.cut(layer, "in_proj_weight", every_third, None)
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        slicer.cut(layer, name, own, None)
    slicer.cut(layer, "in_proj_bias", every_third)
    slicer.cut(layer.out_proj, "weight", None, own)
    slicer.first_only(layer.out_proj, "bias")
    sliced.packed, layer._qkv_same_embed_dim = layer._qkv_same_embed_dim, False  # torch's own kernels want it whole


class HeadsSlice(nn.MultiheadAttention):
    """An attention over this rank's heads: whole queries, keys and values -> whole outputs. It takes torch's options,
    except those that ``can_be_sliced`` excludes."""

    group: Group
    heads: list[range]
    draws: OwnDraws
    packed: bool

    def forward(  # noqa: PLR0913 (torch's)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # torch's own words
        batched, heads = query.dim() == 3, self.heads[self.group.rank]
        q, k, v = self._projected(query, key, value)
        q, k, v = (self._by_head(t if batched else t.unsqueeze(0 if self.batch_first else 1)) for t in (q, k, v))
        mask = _mask(key_padding_mask, attn_mask, q.shape[0], heads, self.num_heads, q.dtype)
        weights, dropped = None, self.dropout if self.training else 0.0
        with self.draws(q.device) if dropped else torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad():
            if need_weights:
                weights = (q * (1.0 / math.sqrt(self.head_dim))) @ k.transpose(-2, -1)
                weights = torch.softmax(weights if mask is None else weights + mask, -1)
                weights = functional.dropout(weights, dropped) if dropped else weights
                found = weights @ v
            else:
                found = functional.scaled_dot_product_attention(q, k, v, mask, dropped)
        found = found.permute(0, 2, 1, 3) if self.batch_first else found.permute(2, 0, 1, 3)
        bias = self.out_proj.bias if self.group.rank == 0 else None
        out = sum_terms(functional.linear(found.flatten(2), self.out_proj.weight, bias), self.group)
        out = out if batched else out.squeeze(0 if self.batch_first else 1)
        return out, None if weights is None else self._returned_weights(weights, average_attn_weights, batched)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Project queries, keys and values by the weights of this rank's heads; where several are one tensor, its
        gradient is summed once."""
        if self.packed and query is key and key is value:
            return list(
                functional.linear(copy_to(query, self.group), self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            )
        if self.packed:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None,) * 3
        copies = {id(t): copy_to(t, self.group) for t in (query, key, value)}
        given = (copies[id(t)] for t in (query, key, value))
        return [functional.linear(*both) for both in zip(given, weights, biases, strict=True)]

    def _by_head(self, t: Tensor) -> Tensor:
        """The tensor by heads: (batch, own heads, length, head_dim)."""
        split: Tensor = t.unflatten(-1, (len(self.heads[self.group.rank]), self.head_dim))
        return split.permute(0, 2, 1, 3) if self.batch_first else split.permute(1, 2, 0, 3)

    def _returned_weights(self, weights: Tensor, average: bool, batched: bool) -> Tensor:
        if average:
            gathered = sum_terms(weights.sum(1) / self.num_heads, self.group)
        else:
            gathered = gather_from(weights, self.group, 1, [len(share) for share in self.heads])
        return gathered if batched else gathered.squeeze(0)


def _mask(
    padding: Tensor | None, attention: Tensor | None, batch: int, own: range, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """The tensor that is added to the scores (batch, own heads, length, length) before the softmax."""
    mask = None
    if attention is not None:
        mask = _additive(attention, dtype)
        if mask.dim() == 3:  # (batch * heads, ...)
            mask = mask.unflatten(0, (batch, heads))[:, own.start : own.stop]
    if padding is not None:
        hidden = _additive(padding, dtype).view(batch, 1, 1, -1)
        mask = hidden if mask is None else mask + hidden
    return mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
