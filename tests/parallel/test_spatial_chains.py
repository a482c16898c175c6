"""Layers and calls one after the other, drawn: on strips and by channels they are the plain network, or are refused."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import by_value, on_ranks
from test_spatial_calls import outcomes
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.processes

Spec = tuple[Any, ...]


class Chain(nn.Module):
    """Layers and calls, one after the other."""

    def __init__(self, specs: list[Spec], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.specs, self.layers = specs, nn.ModuleList()
        x = torch.zeros(shape, dtype=torch.float64)
        for at, (kind, *arguments) in enumerate(specs):
            self.layers.append(_layer(kind, arguments, x).double())
            x = self.one(at, x)

    def one(self, at: int, x: Tensor) -> Tensor:
        kind, *arguments = self.specs[at]
        layer = self.layers[at]
        if kind == "slice":
            dim, start, step = arguments
            return x[:, :, start::step] if dim == 2 else x[..., start::step]
        if kind == "pad":
            return F.pad(x, arguments[0], arguments[1])
        if kind == "double":
            return torch.cat([x, x * 0.5], 1)
        if kind == "skip":
            return layer(x) + x
        if kind == "gate":
            return x * torch.sigmoid(layer(x.mean((2, 3), keepdim=True)))
        return layer(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for at in range(len(self.specs)):
            x = self.one(at, x)
        return x


def _layer(kind: str, arguments: list[Any], x: Tensor) -> nn.Module:
    channels = x.shape[1]
    if kind in ("conv", "up"):
        outputs, kernel, stride, padding, dilation, groups, mode = arguments
        groups = groups if channels % groups == 0 else 1
        if kind == "up":
            return nn.ConvTranspose2d(channels, outputs, kernel, stride, padding, 0, groups, True, dilation)
        return nn.Conv2d(channels, outputs, kernel, stride, padding, dilation, groups, True, mode)
    if kind in ("skip", "gate"):
        return nn.Conv2d(channels, channels, 3 if kind == "skip" else 1, padding=1 if kind == "skip" else 0)
    if kind == "norm":
        return {
            "batch": lambda: nn.BatchNorm2d(channels),
            "group": lambda: nn.GroupNorm(2 if channels % 2 == 0 else 1, channels),
            "instance": lambda: nn.InstanceNorm2d(channels, affine=True),
            "layer": lambda: nn.LayerNorm(tuple(x.shape[2:])),
            "response": lambda: nn.LocalResponseNorm(3, 0.5),
        }[arguments[0]]()
    if kind == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 3))
    return getattr(nn, kind)(*arguments) if hasattr(nn, kind) else nn.Identity()


def _two(draw: st.DrawFn, low: int, high: int) -> tuple[int, int]:
    return draw(st.integers(low, high)), draw(st.integers(low, high))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    kind = draw(st.sampled_from(["conv"] * 4 + ["up", "Max", "Avg", "norm", "norm", "other", "other", "ReLU"]))
    if kind == "conv":
        mode = draw(st.sampled_from(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]))
        groups = draw(st.sampled_from([1, 1, 2]))
        return "conv", 4, _two(draw, 1, 4), _two(draw, 1, 5), _two(draw, 0, 2), _two(draw, 1, 2), groups, mode
    if kind == "up":
        return "up", 4, _two(draw, 1, 4), _two(draw, 1, 3), _two(draw, 0, 1), _two(draw, 1, 2), 1, "zeros"
    if kind in ("Max", "Avg"):
        kernel = _two(draw, 1, 3)
        padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
        rest = (1, False, draw(st.booleans())) if kind == "Max" else (draw(st.booleans()), draw(st.booleans()))
        return f"{kind}Pool2d", kernel, _two(draw, 1, 4), padding, *rest
    if kind == "norm":
        return "norm", draw(st.sampled_from(["batch", "group", "instance", "layer", "response"]))
    if kind == "ReLU":
        return "ReLU", draw(st.booleans())
    return draw(
        st.one_of(
            st.tuples(st.just("slice"), st.sampled_from([2, 3]), st.integers(0, 3), st.integers(1, 2)),
            st.tuples(
                st.just("pad"),
                st.tuples(*[st.integers(-1, 2)] * 4),
                st.sampled_from(["constant", "reflect", "replicate", "circular"]),
            ),
            st.sampled_from([("double",), ("skip",), ("gate",), ("PixelShuffle", 2), ("Upsample", None, 2)]),
            st.tuples(st.just("AdaptiveMaxPool2d"), st.tuples(st.integers(1, 3), st.integers(1, 3))),
            st.tuples(st.just("AdaptiveAvgPool2d"), st.tuples(st.integers(1, 3), st.integers(1, 3))),
            st.tuples(st.just("Upsample"), st.none(), st.integers(1, 2), st.just("bilinear")),
        )
    )


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Spec], tuple[int, ...]]:
    """A network that the plain model computes."""
    shape = (draw(st.integers(1, 2)), draw(st.sampled_from([2, 4])), *_two(draw, 1, 14))
    found: list[Spec] = [("conv", 4, (3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros")]
    found += draw(st.lists(specs(), min_size=1, max_size=5))
    found += draw(st.sampled_from([[], [], [("linear",)]]))
    while not _works(found, shape):
        found.pop(draw(st.integers(1, len(found) - 1)) if len(found) > 1 else 0)
        if not found:
            return [("conv", 4, (1, 1), (1, 1), (0, 0), (1, 1), 1, "zeros")], shape
    return found, shape


def _works(found: list[Spec], shape: tuple[int, ...]) -> bool:
    if sum(s[0] == "double" for s in found) > 2:
        return False
    if any(s[0] == "pad" and s[2] == "circular" and min(s[1]) < 0 for s in found):  # torch reads what nobody wrote
        return False
    try:
        with warnings.catch_warnings(action="ignore"):
            y = Chain(found, shape)(torch.ones(shape).double())
        y.sum().backward()  # torch refuses some that write in place
        return bool(y.numel()) and y.numel() < 20000 and bool(y.isfinite().all())
    except (RuntimeError, ValueError, ZeroDivisionError):
        return False


def prove(drawn: list[tuple[list[Spec], tuple[int, ...]]], split: str, ranks: int) -> None:
    with by_value(sys.modules[__name__]):
        told_by_rank = on_ranks(outcomes, ranks, [(partial(Chain, *chain), chain[1], split) for chain in drawn])
    for found in told_by_rank:
        for chain, told in zip(drawn, found, strict=True):
            assert told == "right" or told.startswith("refused: "), (chain, told)


PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SPLITS = ("height", "width", "channel", "group")


@pytest.mark.parametrize("split", SPLITS)
@settings(max_examples=2, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(chains(), min_size=8, max_size=8), ranks=st.integers(2, 4))
def test_a_chain_of_layers_on_strips_is_the_chain(
    split: str, drawn: list[tuple[list[Spec], tuple[int, ...]]], ranks: int
) -> None:
    prove(drawn, split, ranks)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("split", SPLITS)
@settings(max_examples=30, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(chains(), min_size=16, max_size=16), ranks=st.integers(2, 4))
def test_many_chains_on_strips(split: str, drawn: list[tuple[list[Spec], tuple[int, ...]]], ranks: int) -> None:
    prove(drawn, split, ranks)
