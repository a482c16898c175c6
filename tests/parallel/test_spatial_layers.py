"""Layers on strips of an image against torch's own on the whole: outputs and every gradient, on real processes."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor, nn

from apportion.comm.world import World
from apportion.parallel.spatial.geometry import Bounds, strip
from apportion.parallel.spatial.layers import LAYERS, ask_all_ranks
from apportion.parallel.spatial.placements import SpatialPlan
from apportion.parallel.spatial.strip import SpatialShard, cut, gathered

pytestmark = pytest.mark.processes

EXACT = 1e-10
CASES = 12
"""Layers that a group of processes is made for."""
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""Each case says what it is of: a smaller one of twelve is not worth so many processes."""


@dataclass
class Case:
    """A layer, an image, and how it is cut."""

    kind: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    shape: tuple[int, ...]
    dim: int
    cuts: tuple[float, ...]
    fresh: bool = False
    """Do all ranks have the whole image?"""

    def layer(self) -> nn.Module:
        torch.manual_seed(0)
        return getattr(nn, self.kind)(*self.arguments, **self.options).double()

    def image(self) -> Tensor:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return x.round(decimals=1)  # so that maxima tie

    def bounds(self, ranks: int) -> Bounds:
        length = self.shape[self.dim]
        return (0, *sorted(round(c * length) for c in self.cuts[: ranks - 1]), length)

    def works(self) -> bool:
        with contextlib.suppress(RuntimeError, ValueError), warnings.catch_warnings(action="ignore"):
            y = self.layer()(self.image())
            # Where a dilated window sees nothing but padding, torch's own backward pass writes beyond its memory.
            return bool(y.numel()) and bool(y.isfinite().all())
        return False


def weights(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def errors(world: World, cases: list[Case]) -> list[dict[str, float]]:
    return [error(world, case) for case in cases]


def error(world: World, case: Case) -> dict[str, float]:
    """The largest differences, on this rank."""
    group = world.group()
    whole, layer = case.image().requires_grad_(), case.layer()
    expected = layer(whole)
    dy = weights(expected)
    expected.backward(dy)
    expected_gradients = [p.grad for p in layer.parameters()]
    buffers = [b.clone() for b in layer.buffers()]

    layer = case.layer()
    bounds = case.bounds(world.size)
    rows = strip(bounds, world.rank)
    plan = SpatialPlan(layer, group, "height")
    plan.planning = False
    plan.image_dim = lambda dims: case.dim  # type: ignore[method-assign]
    with contextlib.suppress(AttributeError):
        ask_all_ranks(layer, plan.attendance)  # type: ignore[arg-type]
    x: Any
    if case.fresh:
        source = case.image().requires_grad_()
        x = source if case.kind.startswith(("Conv", "Max", "Avg", "Adaptive")) else cut(source, case.dim, group)
    else:
        source = case.image().narrow(case.dim, rows.start, rows.n).contiguous().requires_grad_()
        x = SpatialShard(source, case.dim, bounds)
    found = LAYERS[type(case.layer())](plan, layer, x)
    y = gathered(found, group) if isinstance(found, SpatialShard) else found
    if y.shape != expected.shape:
        return {f"shape {tuple(y.shape)}, not {tuple(expected.shape)}": 1.0}
    y.backward(dy)
    assert source.grad is not None, "every rank takes part"
    assert whole.grad is not None
    own = whole.grad if case.fresh else whole.grad.narrow(case.dim, rows.start, rows.n)
    found_errors = {"y": y - expected, "dx": source.grad - own}
    for (name, p), right in zip(layer.named_parameters(), expected_gradients, strict=True):
        assert right is not None
        total = p.grad.clone() if p.grad is not None else torch.zeros_like(p)
        group.all_reduce(total).wait()
        found_errors[f"d {name}"] = total - right
    for (name, b), right in zip(layer.named_buffers(), buffers, strict=True):
        found_errors[name] = (b - right).double()
    return {name: float(e.detach().abs().max()) if e.numel() else 0.0 for name, e in found_errors.items()}


def compare(cases: list[Case], ranks: int) -> None:
    for found in on_ranks(errors, ranks, cases):
        for case, of in zip(cases, found, strict=True):
            assert all(e <= EXACT for e in of.values()), (ranks, case, case.bounds(ranks), of)


@st.composite
def images(draw: st.DrawFn, channels: int) -> tuple[tuple[int, ...], int, tuple[float, ...]]:
    """Shape, the dimension that is cut, and where."""
    dims = draw(st.sampled_from([1, 2, 2, 2, 3]))
    lengths = [draw(st.integers(1, 13 if dims < 3 else 6)) for _ in range(dims)]
    cuts = tuple(draw(st.floats(0, 1)) for _ in range(3))
    shape = (draw(st.integers(1, 2)), channels, *lengths)
    return shape, draw(st.integers(2, dims + 1)), cuts


def some(draw: st.DrawFn, dims: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(low, high)) for _ in range(dims))


@st.composite
def convolutions(draw: st.DrawFn) -> Case:
    groups = draw(st.sampled_from([1, 1, 2]))
    shape, dim, cuts = draw(images(2 * groups))
    dims = len(shape) - 2
    mode = draw(st.sampled_from(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]))
    padding: Any = some(draw, dims, 0, 3)
    options = {
        "dilation": some(draw, dims, 1, 2),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": mode,
        "stride": some(draw, dims, 1, 3),
    }
    if draw(st.integers(0, 5)) == 0:
        padding, options["stride"] = "same", 1
    kernel = some(draw, dims, 1, 4)
    options["padding"] = padding
    case = Case(f"Conv{dims}d", (2 * groups, 2 * groups, kernel), options, shape, dim, cuts)
    case.fresh = draw(st.booleans())
    return case


@st.composite
def transposed(draw: st.DrawFn) -> Case:
    groups = draw(st.sampled_from([1, 2]))
    shape, dim, cuts = draw(images(2 * groups))
    dims = len(shape) - 2
    stride, dilation = some(draw, dims, 1, 3), some(draw, dims, 1, 2)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    options = {"stride": stride, "dilation": dilation, "padding": some(draw, dims, 0, 2), "output_padding": extra}
    options |= {"groups": groups, "bias": draw(st.booleans())}
    kernel = some(draw, dims, 1, 4)
    return Case(f"ConvTranspose{dims}d", (2 * groups, 2 * groups, kernel), options, shape, dim, cuts)


@st.composite
def pools(draw: st.DrawFn) -> Case:
    shape, dim, cuts = draw(images(2))
    dims = len(shape) - 2
    kind = draw(st.sampled_from(["Max", "Avg"]))
    kernel = some(draw, dims, 1, 4)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    options: dict[str, Any] = {"stride": draw(st.sampled_from([None, some(draw, dims, 1, 3)])), "padding": padding}
    options["ceil_mode"] = draw(st.booleans())
    if kind == "Max":
        options["dilation"] = some(draw, dims, 1, 2)
    else:
        options["count_include_pad"] = draw(st.booleans())
        if dims > 1 and draw(st.booleans()):
            options["divisor_override"] = draw(st.integers(1, 5))
    return Case(f"{kind}Pool{dims}d", (kernel,), options, shape, dim, cuts, draw(st.booleans()))


@st.composite
def adaptive(draw: st.DrawFn) -> Case:
    shape, dim, cuts = draw(images(2))
    dims = len(shape) - 2
    kind = draw(st.sampled_from(["Max", "Avg"]))
    size: Any = tuple(draw(st.sampled_from([1, 2, 3, 5, None])) for _ in range(dims))
    if dims == 1 or draw(st.booleans()):
        size = draw(st.integers(1, 6))
    return Case(f"Adaptive{kind}Pool{dims}d", (size,), {}, shape, dim, cuts)


@st.composite
def norms(draw: st.DrawFn) -> Case:
    shape, dim, cuts = draw(images(4))
    dims = len(shape) - 2
    kind = draw(st.sampled_from(["Batch", "Group", "Instance", "Layer", "Response"]))
    arguments: tuple[Any, ...] = (4,)
    options: dict[str, Any] = {}
    if kind == "Group":
        arguments = (draw(st.sampled_from([1, 2, 4])), 4)
    elif kind == "Layer":
        arguments = (shape[draw(st.integers(1, dims + 1)) :],)
    elif kind == "Instance":
        options = {"affine": draw(st.booleans())}
    name = {
        "Batch": f"BatchNorm{dims}d",
        "Group": "GroupNorm",
        "Instance": f"InstanceNorm{dims}d",
        "Layer": "LayerNorm",
    }
    if kind == "Response":
        return Case("LocalResponseNorm", (draw(st.integers(1, 5)),), {"alpha": 0.5}, shape, dim, cuts)
    name = f"{kind}Norm" + (f"{dims}d" if kind in ("Batch", "Instance") else "")
    return Case(name, arguments, options, shape, dim, cuts)


@st.composite
def others(draw: st.DrawFn) -> Case:
    shape, dim, cuts = draw(images(4))
    dims = len(shape) - 2
    kind = draw(st.sampled_from(["pad", "upsample", "shuffle"]))
    if kind == "shuffle":
        return Case("PixelShuffle", (2,), {}, (*shape[:2], *(shape[2:] * 2)[:2]), 2 + dim % 2, cuts)
    if kind == "upsample":
        mode = draw(st.sampled_from(["nearest", {1: "linear", 2: "bilinear", 3: "trilinear"}[dims]]))
        return Case("Upsample", (), {"scale_factor": draw(st.integers(1, 3)), "mode": mode}, shape, dim, cuts)
    mode = draw(st.sampled_from(["Zero", "Constant", "Reflection", "Replication", "Circular"]))
    pads = some(draw, 2 * dims, 0, 2)
    return Case(f"{mode}Pad{dims}d", (pads, 1.5) if mode == "Constant" else (pads,), {}, shape, dim, cuts)


KINDS = {
    "convolutions": convolutions,
    "transposed convolutions": transposed,
    "pooling": pools,
    "adaptive pooling": adaptive,
    "normalisation": norms,
    "padding and upsampling": others,
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(data=st.data(), ranks=st.integers(1, 4))
def test_a_layer_on_strips_is_the_layer(kind: str, data: st.DataObject, ranks: int) -> None:
    compare([data.draw(KINDS[kind]().filter(Case.works)) for _ in range(CASES)], ranks)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(data=st.data(), ranks=st.integers(2, 4))
def test_many_layers_on_strips(kind: str, data: st.DataObject, ranks: int) -> None:
    compare([data.draw(KINDS[kind]().filter(Case.works)) for _ in range(2 * CASES)], ranks)
