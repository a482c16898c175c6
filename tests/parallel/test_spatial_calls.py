"""What a model's own Python code does to strips is what it does to the whole image, or it is refused: outputs and every
gradient, in training, on real processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from apportion.comm.world import World
from apportion.parallel.spatial.forward import cut_network

pytestmark = pytest.mark.processes

EXACT = 1e-10
RANKS = 3


class Calls(nn.Module):
    """A convolution, and what is done to what it makes."""

    def __init__(self, then: Callable[..., Any], *layers: nn.Module, channels: int = 4) -> None:
        super().__init__()
        self.conv, self.then, self.layers = nn.Conv2d(2, channels, 3, padding=1), then, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Any:
        return self.then(self.conv(x), *self.layers)


Model = Callable[[], nn.Module]
SHAPE = (2, 2, 7, 5)


def tied(y: Tensor) -> Tensor:
    """Few values, with y's gradient."""
    return y - y.detach() + (2 * y.detach()).round().clamp(max=1.0)


def outcome(world: World, model: Model, shape: tuple[int, ...], split: str) -> str:
    """ "right", "refused: why", or what is wrong."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).round(decimals=1)
    torch.manual_seed(0)
    plain, ours = model().double(), model().double()
    ours.load_state_dict(plain.state_dict())
    try:
        pieces = cut_network(ours, x, world.group(), split)
    except ValueError as error:
        return f"refused: {error}"
    given, cut = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.manual_seed(3)
    expected = plain(given)
    torch.manual_seed(3)
    y = ours(cut)
    if y.shape != expected.shape:
        return f"wrong: shape {tuple(y.shape)}, not {tuple(expected.shape)}"
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected.backward(dy)
    y.backward(dy)
    off = {"y": y - expected, "dx": cut.grad - given.grad}  # type: ignore[operator]
    own = dict(ours.named_parameters())
    for name, p in plain.named_parameters():
        right = p.grad if p.grad is not None else torch.zeros_like(p)
        found, piece = own[name].grad, pieces.get(name)
        found = torch.zeros_like(own[name]) if found is None else found.clone()
        if piece is not None and piece.index is not None:
            right = right[
                torch.meshgrid(*(torch.tensor(list(i), dtype=torch.int64) for i in piece.index), indexing="ij")
            ]
        elif piece is not None and piece.partial:
            world.group().all_reduce(found).wait()
        off[f"d {name}"] = found - right
    for (name, b), right in zip(ours.named_buffers(), plain.buffers(), strict=True):
        if b.shape == right.shape:
            off[name] = (b - right).double()
    worst = {
        name: float(e.detach().abs().max())
        for name, e in off.items()
        if e.numel() and not bool((e.abs() <= EXACT).all())
    }
    return f"wrong: {worst}" if worst else "right"


def outcomes(world: World, models: list[tuple[Model, tuple[int, ...], str]]) -> list[str]:
    return [_tried(world, *of) for of in models]


def _tried(world: World, *of: Any) -> str:
    try:
        return outcome(world, *of)
    except Exception as error:  # a rank's own: the others go on
        return f"crash: {type(error).__name__}: {error}"


def of(then: Callable[..., Any], *layers: Callable[[], nn.Module], channels: int = 4) -> Model:
    return lambda: Calls(then, *(layer() for layer in layers), channels=channels)


CALLS: dict[str, tuple[Model, str, str]] = {}
"""By name: the model, on which splits it is right, and on which it is refused, by their first letters."""


def case(name: str, model: Model, right: str = "", refused: str = "") -> None:
    CALLS[name] = model, right, refused


case("softmax with a dtype", of(lambda y: tied(y).float().softmax(1, dtype=torch.float64)), "hw")
case("log_softmax with a dtype", of(lambda y: F.log_softmax(tied(y).float(), 1, dtype=torch.float64)), "hw")
case("mean by axis", of(lambda y: y.mean(axis=1)), "hw")
case("mean by axis over the cut", of(lambda y: y.mean(axis=2, keepdims=True) + y), "hw")
case("sum with dtype", of(lambda y: y.sum(1, dtype=torch.float64)), "", "hw")
case("GroupNorm of what lies across", of(lambda y, n: n(y.permute(0, 2, 3, 1)), lambda: nn.GroupNorm(7, 7)), "hw")
case("GroupNorm columns", of(lambda y, n: n(y.permute(0, 3, 1, 2)), lambda: nn.GroupNorm(5, 5)), "hw")
case(
    "InstanceNorm of what lies across",
    of(lambda y, n: n(y.permute(0, 2, 3, 1)), lambda: nn.InstanceNorm2d(7, affine=True)),
    "hw",
)
case("InstanceNorm columns", of(lambda y, n: n(y.permute(0, 3, 1, 2)), lambda: nn.InstanceNorm2d(5)), "hw")
case("GroupNorm of the flat image", of(lambda y, n: n(y.flatten(1)), lambda: nn.GroupNorm(7, 140)), "hw")
case(
    "GroupNorm(1) of the flat image without weights",
    of(lambda y, n: n(y.flatten(1)), lambda: nn.GroupNorm(4, 140, affine=False)),
    "hwc",
)
case(
    "BatchNorm of what lies across",
    of(lambda y, n: n(y.permute(0, 2, 3, 1)), lambda: nn.BatchNorm2d(7, affine=False)),
    "hw",
)
case("BatchNorm1d of rows", of(lambda y, n: n(y.mean((1, 3))), lambda: nn.BatchNorm1d(7)), "hw")
case("BatchNorm1d of the flat image", of(lambda y, n: n(y.flatten(1)), lambda: nn.BatchNorm1d(140)), "hwc")
case(
    "one norm twice",
    of(
        lambda y, n: n(y).mean((2, 3), keepdim=True) + n(y.mean((2, 3), keepdim=True)),
        lambda: nn.BatchNorm2d(4, affine=False),
    ),
    "",
    "hw",
)
case("prelu by channel", of(lambda y, p: F.prelu(y, p.weight), lambda: nn.PReLU(5), channels=5), "hwc")
case("prelu by channel 7", of(lambda y, p: F.prelu(y, p.weight), lambda: nn.PReLU(7), channels=7), "hwc")
case("prelu of one", of(lambda y, p: F.prelu(y, p.weight), lambda: nn.PReLU()), "hwc")
case("PReLU of the flat image", of(lambda y, p: p(y.flatten(1)), lambda: nn.PReLU(140)), "", "hwc")
case("torch.adaptive_max_pool1d", of(lambda y: torch.adaptive_max_pool1d(y.mean(3), 1)[0]), "", "h")
case("torch.adaptive_max_pool1d to 3", of(lambda y: torch.adaptive_max_pool1d(y.mean(3), 3)[0]), "", "h")
case("F.max_pool2d with ceil_mode by place", of(lambda y: F.max_pool2d(y, 2, 2, 0, 1, True)), "hwc")
case("F.avg_pool2d by place", of(lambda y: F.avg_pool2d(y, 2, 1, 1, True, False, 3)), "hwc")
case("maxima that tie", of(lambda y: F.adaptive_max_pool2d(tied(y), 1)), "hw")
case("maxima that tie, some", of(lambda y: F.adaptive_max_pool2d(tied(y), (1, 2))), "hw")
case("maxima that tie, others", of(lambda y: F.adaptive_max_pool2d(tied(y), (2, 1))), "hw")
case("maxima that tie in windows", of(lambda y: F.max_pool2d(tied(y), 3, 1, 1)), "hw")
case(
    "flattened batch of rows",
    of(lambda y, linear: linear(y.mean(0).permute(1, 0, 2).flatten(1)), lambda: nn.Linear(20, 3)),
    "h",
)
case(
    "viewed batch of rows",
    of(lambda y, linear: linear(y.mean(0).permute(1, 0, 2).reshape(7, -1)), lambda: nn.Linear(20, 3)),
    "h",
)
case("flat and flat", of(lambda y: y.flatten(1) + y.permute(0, 3, 2, 1).flatten(1)), "", "h")
case("flat and flat, alike", of(lambda y: y.flatten(1) + (2 * y).flatten(1)), "hwc")
case("circular padding with a crop", of(lambda y: F.pad(y, (2, -1, -1, 2), mode="circular")), "hw")
case("reflect padding with a crop", of(lambda y: F.pad(y, (2, -1, -1, 2), mode="reflect")), "hw")
case("replicate padding with a crop", of(lambda y: F.pad(y, (2, -1, -1, 2), mode="replicate")), "hw")
case("constant padding with a crop", of(lambda y: F.pad(y, (2, -1, -2, 1, 0, 1), value=1.5)), "hw")
case("reflect padding of one image", of(lambda y: F.pad(y.mean(0), (1, 2, 1, 0), mode="reflect")), "hw")
case(
    "cat with one row",
    of(lambda y: torch.cat([y[:, :, :1], torch.ones(1).double() * y.detach().mean((2,), keepdim=True)], 1)),
    "h",
)
case("cat by axis", of(lambda y: torch.cat([y, y * 2], axis=1)), "hw")
case("cat over the cut", of(lambda y: torch.cat([y, y], 2)), "w", "h")
case("stack", of(lambda y: torch.stack([y, y * 2], 1)), "", "h")
case("chunk by name", of(lambda y: torch.cat(torch.chunk(input=y, chunks=2, dim=1)[::-1], 1)), "", "")
case("split in sizes", of(lambda y: torch.cat(y.split([1, 3], dim=1)[::-1], dim=1)), "hw")
case("chunk of the cut", of(lambda y: y.chunk(2, 2)[0]), "", "h")
case("sum of tuples", of(lambda y: torch.cat(y.chunk(2, 1) + y.chunk(2, 1), 1)), "", "hw")
case("by name", of(lambda y: torch.relu(input=y)), "hw")
case("add by name", of(lambda y: torch.add(y, other=y, alpha=2)), "hw")
case("a mask", of(lambda y: torch.ones(7, 5).double()[y[0, 0] > 0]), "", "hw")
case("a mask of itself", of(lambda y: y[y > 0]), "", "hw")
case("an index", of(lambda y: y[:, :, torch.tensor([0, 2])]), "", "hw")
case("a new dimension", of(lambda y: y[:, None]), "", "hw")
case("slices", of(lambda y: y[..., 1:-1, ::2][:1, 1:]), "hw")
case("few rows", of(lambda y: y[:, :, 2:3, 4:] * 2), "hw")
case("Softmax2d of one image", of(lambda y, s: s(y.mean(0)), lambda: nn.Softmax2d()), "hw")
case("interpolate down and up", of(lambda y: F.interpolate(y, scale_factor=(2.0, 0.6), mode="nearest")), "h")
case("interpolate to a size", of(lambda y: F.interpolate(y, size=(14, 3), mode="nearest")), "h", "w")
case("interpolate, bilinear by size", of(lambda y: F.interpolate(y, (14, 9), mode="bilinear")), "h", "w")
case("interpolate of a batch of rows", of(lambda y: F.interpolate(y.permute(2, 0, 1, 3), scale_factor=2)), "hw")
case("interpolate across", of(lambda y: F.interpolate(y.permute(0, 2, 1, 3), scale_factor=2)), "hw")
case("bicubic", of(lambda y: F.interpolate(y, scale_factor=1.5, mode="bicubic", align_corners=True)), "c", "hw")
case(
    "recompute_scale_factor",
    of(lambda y: F.interpolate(y, scale_factor=2.0, mode="bilinear", recompute_scale_factor=True)),
    "hwc",
)
case("PixelShuffle across", of(lambda y, s: s(y[:, :, :4].permute(0, 2, 1, 3)), lambda: nn.PixelShuffle(2)), "w", "h")
case("dropout in place before a sum", of(lambda y, d: d(y) + y, lambda: nn.Dropout(0.5, inplace=True)), "hwc")
case("F.dropout in place before a sum", of(lambda y: F.dropout(y, 0.5, True, True) + y), "hwc")
case("Dropout2d of the flat image", of(lambda y, d: d(y.flatten(1)), lambda: nn.Dropout2d(0.5)), "", "hw")
case("dropout of what lies across", of(lambda y: F.dropout(y.permute(0, 2, 3, 1), 0.5)), "hwc")
case("dropout of columns first", of(lambda y: F.dropout(y.permute(3, 0, 2, 1), 0.5)), "hwc")
case("dropout of slices", of(lambda y: F.dropout(y[:, 1:, ::3, 1:], 0.5)), "hw")
case("dropout of the flat image", of(lambda y: F.dropout(y.flatten(1), 0.5)), "hwc")
case("dropout of everything", of(lambda y: F.dropout(y, 1.0)), "hwc")
case("dropout1d", of(lambda y: F.dropout1d(y.mean(3), 0.5)), "hwc")
case("a slice written in place", of(lambda y: (y[:, :, 1:4].mul_(2), y)[1] * 1.0), "", "h")
case("a part written in place", of(lambda y: (y[:, :2].mul_(2), y)[1] * 1.0), "", "hw")
case("written after a slice", of(lambda y: (lambda a: (y.mul_(2), a)[1])(y[:, :, 1:4]) * 1.0), "", "h")
case("a slice of its own written in place", of(lambda y: y[:, :, 1:4].mul_(2)), "hw")
case("a slice taken of what was written", of(lambda y: y[:, :, 1:].relu_()[:, :, 1:] * 2), "hw")
case("relu in place and again", of(lambda y: F.relu(y, inplace=True) + y), "hwc")
case("out=", of(lambda y: (torch.mul(y.detach(), 2, out=(z := y.detach() * 1)), z)[1] + y), "", "hw")
case("einsum", of(lambda y: torch.einsum("nchw,nchw->n", y, y)), "", "hw")
case("bmm", of(lambda y: torch.bmm(y[:, 0], y[:, 1])), "", "hw")
case("max", of(lambda y: y.max(2)[0]), "", "hw")
case("max of all", of(lambda y: torch.max(y)), "", "hw")
case("std", of(lambda y: y.std((2, 3))), "", "hw")
case("norm", of(lambda y: F.normalize(y, dim=2)), "", "hw")
case("F.conv2d with images for weights", of(lambda y: F.conv2d(y, y)), "", "hw")
case("Conv2d of one image", of(lambda y, c: c(y.mean(0)), lambda: nn.Conv2d(4, 2, 3)), "", "hw")
case("Conv2d across", of(lambda y, c: c(y.permute(0, 2, 3, 1)), lambda: nn.Conv2d(7, 6, 3, padding=1)), "w", "hc")
case("Conv2d turned", of(lambda y, c: c(y.transpose(2, 3)), lambda: nn.Conv2d(4, 6, 3, padding=1)), "hwc")
case("transpose by name", of(lambda y: y.transpose(dim0=2, dim1=3)), "", "")
case("MaxPool2d across", of(lambda y, p: p(y.permute(0, 2, 3, 1)), lambda: nn.MaxPool2d(2)), "w", "hc")
case("AvgPool2d across", of(lambda y, p: p(y.permute(0, 2, 3, 1)), lambda: nn.AvgPool2d(2)), "w", "hc")
case("AdaptiveAvgPool2d across", of(lambda y, p: p(y.permute(0, 2, 3, 1)), lambda: nn.AdaptiveAvgPool2d(1)), "w", "hc")
case("LRN of the flat", of(lambda y, n: n(y.flatten(1)[:, None]), lambda: nn.LocalResponseNorm(3)), "", "hw")
case("LRN across", of(lambda y, n: n(y.permute(0, 2, 3, 1)), lambda: nn.LocalResponseNorm(3, 0.5)), "hwc")
case("LayerNorm across", of(lambda y, n: n(y.permute(0, 2, 3, 1)), lambda: nn.LayerNorm(4)), "hw")
case("LayerNorm over the cut", of(lambda y, n: n(y), lambda: nn.LayerNorm((7, 5))), "hwc")
case("Linear across", of(lambda y, linear: linear(y.permute(0, 2, 3, 1)), lambda: nn.Linear(4, 3)), "hwc")
case("Linear over columns", of(lambda y, linear: linear(y), lambda: nn.Linear(5, 3)), "hwc")
case(
    "ConvTranspose with output_size",
    of(lambda y, c: c(y, output_size=(14, 10)), lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1)),
    "",
    "hw",
)
case(
    "pool then relu in place, few rows",
    of(lambda y, p, r: r(p(p(y))), lambda: nn.MaxPool2d(2), lambda: nn.ReLU(inplace=True)),
    "hwc",
)
case(
    "conv then relu in place, few rows",
    of(
        lambda y, p, c, r: r(c(p(y))),
        lambda: nn.MaxPool2d(3),
        lambda: nn.Conv2d(4, 4, 1),
        lambda: nn.ReLU(inplace=True),
    ),
    "hwc",
)
case(
    "transposed then relu in place",
    of(
        lambda y, p, c, r: r(c(p(y))),
        lambda: nn.MaxPool2d((7, 5)),
        lambda: nn.ConvTranspose2d(4, 4, 1),
        lambda: nn.ReLU(inplace=True),
    ),
    "hwc",
)
case("average then add in place", of(lambda y, p: p(y).add_(1.0), lambda: nn.AvgPool2d(5)), "hwc")
case("one pixel", of(lambda y, p, n: n(p(y)), lambda: nn.MaxPool2d((7, 5)), lambda: nn.BatchNorm2d(4)), "hwc")
case(
    "one pixel without running statistics",
    of(lambda y, p, n: n(p(y)), lambda: nn.MaxPool2d((7, 5)), lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    "hw",
)
case("mean over the batch", of(lambda y: y.mean(0) * 2), "hwc")
case("mean over all", of(lambda y: y.mean() + y.sum(())), "hw")
case("mean over the flat", of(lambda y: y.flatten(1).mean(1, keepdim=True)), "hwc")
case("view of one example", of(lambda y: y.view(-1, 35)), "", "hw")
case("positions", of(lambda y: y + torch.arange(y.shape[2]).view(1, 1, -1, 1) / y.size(2)), "hwc")
case(
    "gates",
    of(lambda y, linear: y * torch.sigmoid(linear(y.mean((2, 3))))[:, :, None, None], lambda: nn.Linear(4, 4)),
    "hwc",
)
case("where", of(lambda y: torch.where(y > 0, y, torch.exp(y) - 1)), "hwc")
case("a square root of shapes", of(lambda y: y / (y.shape[-1] * y.size(2)) ** 0.5), "hwc")
case("roll", of(lambda y: y.roll(1, 2)), "", "hw")
case("flip", of(lambda y: y.flip(3)), "", "hw")
case("unfold", of(lambda y: F.unfold(y, 2)), "", "hw")
case("matmul", of(lambda y: y @ y.transpose(2, 3)), "", "hw")
case("expand", of(lambda y: y.unsqueeze(1).expand(-1, 2, -1, -1, -1)), "", "hw")
case("zip of strips", of(lambda y: sum(a + b for a, b in zip((y, y), (y, y), strict=True))), "hwc")


LETTERS = {"h": "height", "w": "width", "c": "channel"}


def trials(letter: str) -> list[tuple[str, str]]:
    """(name, what is expected) of one split."""
    wanted = [(name, right, refused) for name, (_, right, refused) in CALLS.items() if letter in right + refused]
    return [(name, "right" if letter in right else "refused") for name, right, refused in wanted]


@pytest.mark.parametrize("letter", LETTERS)
@pytest.mark.thorough
def test_a_call_on_strips_is_the_call_or_is_refused(letter: str) -> None:
    expected = trials(letter)
    found = on_ranks(outcomes, RANKS, [(CALLS[name][0], SHAPE, LETTERS[letter]) for name, _ in expected])
    for rank in found:
        off = {name: told for (name, wanted), told in zip(expected, rank, strict=True) if told.split(":")[0] != wanted}
        assert off == {}


def in_bfloat16(world: World) -> tuple[torch.dtype, torch.dtype, float]:
    """More ranks than rows: what a rank without any makes must be of the type of the others'."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 2, 2)
    plain = nn.Sequential(first, nn.MaxPool2d(3), nn.Conv2d(4, 4, 3, padding=1), second, nn.Upsample(None, 2))
    ours = copy.deepcopy(plain)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    cut_network(ours, x, world.group(), "height")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, y = plain(x), ours(x)
    y.sum().backward()
    return y.dtype, expected.dtype, float((y - expected).abs().max())


def test_ranks_without_rows_make_the_type_that_the_others_make() -> None:
    for found, expected, off in on_ranks(in_bfloat16, 4):
        assert found == expected
        assert off < 0.05
