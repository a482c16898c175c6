"""Whether an optimizer needs a closure is tried on copies that are small, and calls nothing of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apportion.parallel.optim import closure

shapes: list[tuple[int, ...]] = []
"""The shapes of the parameters that steps were made on."""


class Plain(torch.optim.Optimizer):
    """Descends, and notes the shapes that it has seen."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                shapes.append(tuple(p.shape))
                p.data.add_(p.grad, alpha=-group["lr"])


class Searching(Plain):
    """Evaluates the loss once more at every step."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        assert closure is not None, "a closure is needed"
        closure()
        super().step()


@pytest.mark.parametrize("wide", [3, 3_000_000])
@pytest.mark.parametrize(("kind", "needs"), [(Plain, False), (Searching, True)])
def test_whether_a_closure_is_needed_is_seen_on_a_network_of_any_size(
    kind: type[Plain], needs: bool, wide: int
) -> None:
    layer = nn.Linear(wide, 2)
    before = [p.detach().clone() for p in layer.parameters()]
    shapes.clear()
    assert closure.needs_closure(kind(layer.parameters())) is needs
    assert {*shapes} == {(2, 3 if wide == 3 else 2), (2,)}
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_a_trial_does_not_call_step_hooks() -> None:
    calls = []
    optimizer = Plain(nn.Linear(3, 2).parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    closure.needs_closure(optimizer)
    assert calls == []
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    assert calls == ["before", "after"]
