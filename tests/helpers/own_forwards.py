"""Networks whose forward is written as model libraries write them, which no tracer follows."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import networks
import torch
from networks import adam
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from apportion import Workload

WORDS, LENGTH, WIDTH = 13, 6, 8


@dataclass
class Output(OrderedDict[str, Any]):
    """Fields that are the keys of a dict, too."""

    loss: Any = None
    logits: Any = None
    states: Any = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is not None:
                self[each.name] = getattr(self, each.name)


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return call


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, hidden: Tensor, mask: Any = None, cache: Any = None, **kwargs: Any) -> tuple[Tensor, ...]:
        q, k, v = self.mix(self.norm(hidden)).chunk(3, -1)
        if cache is not None:
            cache.append((k, v))
        hidden = hidden + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return (hidden + self.down(F.gelu(self.up(hidden))),)


class Body(nn.Module):
    """Masks from shapes, positions, optional arguments, a parameter between the layers, a loop over them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.scale, self.norm = nn.Parameter(torch.full((WIDTH,), 1.5)), nn.LayerNorm(WIDTH)

    @decorated
    def forward(self, ids: Any = None, mask: Any = None, cache: Any = None, **kwargs: Any) -> Output:
        if ids is None or ids.shape[1] > LENGTH:
            raise ValueError("too long")
        hidden = self.words(ids)
        full = torch.ones(len(ids[0]), ids.shape[1], dtype=torch.bool, device=hidden.device).tril()
        if mask is not None:
            full = full & mask[:, None].bool()
        hidden += self.places(torch.arange(ids.shape[1], device=hidden.device))
        states = []
        for i, layer in enumerate(self.layers):
            states.append(hidden)
            if self.kind == "checkpointed" and self.training:
                hidden = checkpoint(layer, hidden, full, use_reentrant=False)[0]
            else:
                hidden = layer(hidden, mask=full, cache=cache, **kwargs)[0]
            hidden = hidden * self.scale
            if self.kind == "in place" and i % 2:
                hidden[:, 0] *= 0.5
                hidden.add_(states[0])
        return Output(logits=self.norm(hidden), states=tuple(states) if self.kind == "states" else None)


class Language(nn.Module):
    """A head that is tied to the embedding, and the loss within."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.head, self.kind = Body(kind), nn.Linear(WIDTH, WORDS, bias=False), kind
        if kind != "by hand":
            self.head.weight = self.body.words.weight

    @decorated
    def forward(self, ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        found = self.body(ids, cache=[] if self.kind == "cache" else None, **kwargs)
        weight = self.body.words.weight if self.kind == "by hand" else self.head.weight
        logits = F.linear(found.logits, weight) if self.kind == "by hand" else self.head(found.logits)
        if self.kind == "unused":
            logits = logits + 0
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if found.states is not None:
            loss = loss + 0.01 * sum(state.square().mean() for state in found.states)
        return Output(loss=loss, logits=logits)


class Text(Dataset[Any]):
    def __init__(self, *, mask: bool) -> None:
        self.ids, self.mask = networks.classes(13, WORDS, LENGTH), mask

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Any:
        mask = {"mask": (torch.arange(LENGTH) < 3 + i % 4).long()} if self.mask else {}
        return {"ids": self.ids[i], "labels": self.ids[i], **mask}, 0


def loss_within(outputs: Any, _: Any) -> Tensor:
    loss: Tensor = outputs.loss
    return loss


KINDS = ("plain", "states", "in place", "cache", "checkpointed", "by hand", "mask")


def language(kind: str) -> Workload:
    return networks.workload(
        lambda: Language(kind), lambda: Text(mask=kind == "mask"), 6, loss=loss_within, optimizer=adam
    )
