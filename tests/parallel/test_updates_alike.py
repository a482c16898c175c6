"""Pushes by rules that count: all shards at once where every piece has as many updates, and else piece by piece."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from apportion.parallel.optim.hyperparameters import rule_of
from apportion.parallel.parameter_store.memory.shard_layout import StoreLayout, updates_alike
from apportion.parallel.parameter_store.memory.store_spec import StoreRegions, StoreSpec
from apportion.parallel.parameter_store.store import Contents, Store

RULES: dict[str, Callable[[Sequence[nn.Parameter]], Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.5),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
}
USED = ([True, True], [True, False], [True, True], [False, True], [True, True])
"""Which of two parameters have a gradient in each push."""


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("used", [USED, ([True, True],) * 4], ids=["some", "all"])
def test_a_push_is_what_torch_does(name: str, used: Sequence[Sequence[bool]]) -> None:
    """Also after a push in which one parameter had no gradient: it has one update fewer behind it from then on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 5, bias=False), nn.Linear(5, 7, bias=False)).double()
    parameters = list(model.parameters())
    optimizer = RULES[name](parameters)
    layout = StoreLayout({p: n for n, p in model.named_parameters()}, optimizer, shards=3)
    extent = StoreSpec(layout=layout, workers=1, buffers=0, batches=16)
    memory = mmap.mmap(-1, StoreRegions(extent).nbytes)
    store = Store(extent, memoryview(memory), worker=0, check=lambda: None)
    weights = torch.zeros(layout.total, dtype=torch.float64)
    for view, p in zip(layout.views(weights), parameters, strict=True):
        view.copy_(p.detach())
    slots = [torch.zeros(layout.total, dtype=torch.float64) for _ in layout.rule.slots]
    counts = [np.zeros(len(pieces)) for pieces in layout.pieces]
    begin = Contents([weights, *slots], counts, np.zeros(2, dtype=bool), torch.zeros(0, dtype=torch.float64))
    store.settle(lambda: store.put(begin, done=0), first=True)
    hyper = [layout.rule.hyper_of(group) for group in optimizer.param_groups]
    for some in used:
        gradients = [torch.randn_like(p) for p in parameters]
        for view, p, gradient, has in zip(layout.views(store.gradient), parameters, gradients, some, strict=True):
            view.copy_(gradient if has else torch.zeros_like(gradient))
            p.grad = gradient if has else None
        store.push(hyper, used=None if all(some) else some)
        optimizer.step()
        for view, p in zip(layout.views(store.read().data[0]), parameters, strict=True):
            torch.testing.assert_close(view, p.detach(), rtol=1e-12, atol=1e-12)


def test_equal_counts_are_one_number_and_others_none() -> None:
    adam = rule_of(torch.optim.Adam([nn.Parameter(torch.zeros(2))]))
    assert updates_alike(adam, [np.array([3.0, 3.0]), np.array([3.0])]) == 3.0
    assert updates_alike(adam, [np.array([3.0, 2.0]), np.array([3.0])]) is None
    plain = rule_of(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0))
    assert updates_alike(plain, [np.array([3.0, 2.0])]) == 0.0
