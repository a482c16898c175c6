"""Batch normalisation over several ranks against torch's own on the whole batch, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

from apportion.comm.world import World
from apportion.parallel.ops.sync_batch_norm import NonEmptyRanks, use_whole_batch

pytestmark = pytest.mark.processes

CHANNELS = 5
Answer = dict[str, Tensor]


def layer(kind: str, dtype: torch.dtype, options: dict[str, Any]) -> nn.Module:
    made = getattr(nn, kind)(CHANNELS, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.rand(p.shape, generator=generator) + 0.5)
    return made.to(dtype)


def through(norm: nn.Module, x: Tensor, dy: Tensor, steps: int = 2) -> Answer:
    """Forward and backward, more than once: running statistics add up."""
    for _ in range(steps):
        x = x.detach().requires_grad_()
        norm.zero_grad()
        y = norm(x)
        y.backward(dy)
    assert x.grad is not None
    answer = {"y": y.detach(), "dx": x.grad}
    answer |= {f"d {name}": p.grad for name, p in norm.named_parameters() if p.grad is not None}
    return answer | {name: b.clone() for name, b in norm.named_buffers()}


def share(rank: int, sizes: tuple[int, ...]) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def normalise(world: World, kind: str, options: Any, whole: tuple[Tensor, Tensor], sizes: tuple[int, ...]) -> Answer:
    rows, present = share(world.rank, sizes), sizes[world.rank] > 0
    norm = layer(kind, options.pop("weights", whole[0].dtype), options)
    use_whole_batch(norm, NonEmptyRanks(world.group(), present))
    if present:
        return through(norm, whole[0][rows], whole[1][rows])
    return through(norm, whole[0][:1], torch.zeros_like(whole[1][:1]))


def compare(kind: str, x: Tensor, sizes: tuple[int, ...], *, bound: float, **options: Any) -> None:
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(x.dtype)
    weights = options.get("weights", x.dtype)
    mine = {k: v for k, v in options.items() if k != "weights"}
    expected = through(layer(kind, weights, mine), x, dy)
    answers = on_ranks(normalise, len(sizes), kind, options, (x, dy), sizes)
    present = [a for a, size in zip(answers, sizes, strict=True) if size]
    for name, right in expected.items():
        if name in ("y", "dx"):
            found = torch.cat([a[name] for a in present])
        elif name.startswith("d "):  # each rank's part; data_parallel adds them up
            found = torch.stack([a[name] for a in answers]).sum(0)
        else:
            found = answers[0][name]
            assert all(torch.equal(a[name], found) for a in answers), name
        assert found.dtype == right.dtype
        error = (found.double() - right.double()).abs().max() / right.double().abs().max().clamp(min=1)
        assert error <= bound, (name, error)


def inputs(*shape: int, mean: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (x + mean).to(dtype)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("BatchNorm1d", (7, CHANNELS)),
        ("BatchNorm1d", (7, CHANNELS, 4)),
        ("BatchNorm2d", (7, CHANNELS, 3, 4)),
        ("BatchNorm3d", (7, CHANNELS, 2, 3, 2)),
    ],
)
@pytest.mark.parametrize("sizes", [(4, 3), (5, 0, 2), (1, 6)])
def test_equals_the_whole_batch(kind: str, shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    compare(kind, inputs(*shape), sizes, bound=1e-13)


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"momentum": 0.0}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.3}],
)
def test_every_option(options: dict[str, Any]) -> None:
    compare("BatchNorm2d", inputs(6, CHANNELS, 2, 2), (2, 3, 1), bound=1e-13, **options)


def test_a_channels_last_batch() -> None:
    x = inputs(6, CHANNELS, 3, 3).contiguous(memory_format=torch.channels_last)
    compare("BatchNorm2d", x, (4, 2), bound=1e-13)


def test_a_large_mean_loses_nothing_to_cancellation() -> None:
    """The mean square less the square of the mean would keep no digit at all here; a rank's mean in float32 keeps
    the variance to four."""
    x = inputs(64, CHANNELS, 4, 4, mean=1e4, dtype=torch.float32)
    exact, norm = x.double(), layer("BatchNorm2d", torch.float64, {})
    norm(exact)
    answers = on_ranks(normalise, 2, "BatchNorm2d", {}, (x, torch.ones_like(x)), (40, 24))
    variance = exact.var((0, 2, 3))
    found = (answers[0]["running_var"].double() - 0.9**2) / (0.1 + 0.09)
    assert ((found - variance) / variance).abs().max() < 5e-4
    y = torch.cat([a["y"] for a in answers]).double()
    whole = layer("BatchNorm2d", torch.float64, {}).train()(exact)
    assert (y - whole).abs().max() < 5e-3  # float32 holds 1e4 to about 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_keep_their_statistics_in_float32(dtype: torch.dtype) -> None:
    x = inputs(32, CHANNELS, 4, 4, mean=2.0, dtype=dtype)
    compare("BatchNorm2d", x, (17, 15), bound=4 * torch.finfo(dtype).eps, weights=torch.float32)


def lonely(world: World) -> str:
    norm = nn.BatchNorm1d(3)
    use_whole_batch(norm, NonEmptyRanks(world.group(), world.rank == 0))
    try:
        norm(torch.ones(1, 3))
    except ValueError as error:
        return str(error)
    return "no error"


def test_one_value_a_channel_is_refused_as_torch_does() -> None:
    assert all("more than one value per channel" in told for told in on_ranks(lonely, 2))


def test_evaluation_and_other_layers_are_left_alone() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return x

    from apportion.comm.group import Alone

    model = nn.Sequential(nn.BatchNorm1d(3), Own(3), nn.LayerNorm(3))
    names = list(model.state_dict())
    assert use_whole_batch(model, NonEmptyRanks(Alone())) == ["0"]
    assert list(model.state_dict()) == names
    assert isinstance(model[0], nn.BatchNorm1d)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    before = model[0].running_mean.clone()
    torch.testing.assert_close(model[0].eval()(x), nn.BatchNorm1d(3).eval()(x), rtol=0, atol=0)
    assert torch.equal(model[0].running_mean, before)
