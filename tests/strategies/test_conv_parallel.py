"""conv_parallel computes the network of one device, on real processes; what it cannot cut it refuses by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import networks
import pytest
import slots
import torch
from networks import adam, numbers, tabular, workload
from proofs import assert_equal
from ranks import by_value, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.comm.world import World
from apportion.core.address import load_workload
from apportion.parallel.replica.step import OneDeviceStep
from apportion.strategies.conv_parallel import ConvParallel

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"


def prove(made: Workload, strategy: ConvParallel, workers: int) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(made, strategy, workers=workers, steps=8)
    assert assert_equal(proof, by_design=True).steps == 8


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.LocalResponseNorm(4),
        nn.Conv2d(6, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.0),
        nn.Linear(4 * 2 * 2, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


@pytest.mark.parametrize(("workers", "optimizer"), networks.sizes())
@pytest.mark.parametrize("split", ["height", "width", "channel"])
def test_equals_one_device(split: Any, workers: int, optimizer: Any) -> None:
    made = workload(normalised, tabular(6, 2, 11, 9), 6, optimizer=optimizer, clip_grad_norm=1.0)
    prove(made, ConvParallel(split=split), workers)


# Whole networks


def resnet(blocks: int = 1) -> nn.Module:
    """The example's, with few blocks: skip connections, slices and channels of zeros in between."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from resnet20_cifar10 import ResNet
    finally:
        sys.path.pop(0)
    return ResNet(blocks)  # type: ignore[no-any-return]


class Segmenter(nn.Module):
    """An image in, an image out: up and down again, with what was on the way put beside it, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding="same", dilation=2)
        self.norm, self.up = nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1)
        self.squeeze, self.gate = nn.Conv2d(4, 2, 1), nn.Linear(2, 4)
        self.last = nn.Conv2d(6, 3, 3, padding=1, padding_mode="reflect")
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - 0.1) / 0.9
        inner = F.gelu(self.norm(self.down(x)))
        inner = inner + torch.tanh(self.middle(inner)) * self.scale
        seen = F.adaptive_avg_pool2d(self.squeeze(inner), 1).flatten(1)
        inner = inner * torch.sigmoid(self.gate(seen))[:, :, None, None]
        outer = self.up(F.pad(inner, (0, 0, 1, 0))[:, :, 1:])
        return F.log_softmax(self.last(torch.cat([outer, x], 1)), 1)


def pixels(n: int, height: int, width: int) -> Callable[[], TensorDataset]:
    targets = torch.randint(0, 3, (n, height, width), generator=torch.Generator().manual_seed(4))
    return lambda: TensorDataset(numbers(n, 2, height, width), targets)


def towers() -> nn.Module:
    """AlexNet in small: two towers, which the third layer connects."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.LocalResponseNorm(5, alpha=0.1), nn.MaxPool2d(3, 2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.PReLU(6), nn.AdaptiveAvgPool2d(3),
        nn.Flatten(), nn.Dropout(0.0), nn.Linear(54, 10), nn.ReLU(), nn.Linear(10, 3),
    )  # fmt: skip


def along() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 5, padding=2, padding_mode="circular"), nn.BatchNorm1d(4), nn.ReLU(),
        nn.AvgPool1d(2, ceil_mode=True),
        nn.Conv1d(4, 4, 3, groups=2), nn.SiLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def solid() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(3, 2, 2), nn.ReLU(),
        nn.Flatten(1), nn.Linear(2 * 2 * 1 * 1, 3),
    )  # fmt: skip


def segmenting(batch_size: int) -> Workload:
    return workload(Segmenter, pixels(3 * batch_size + 1, 10, 8), batch_size, loss=F.nll_loss, optimizer=adam)


NETWORKS: dict[str, tuple[Callable[[], Workload], tuple[str, ...]]] = {
    "resnet": (lambda: workload(resnet, tabular(4, 3, 12, 12, last=2), 4), ("height", "width", "channel")),
    "segmenter": (lambda: segmenting(2), ("height", "width")),
    "towers": (lambda: workload(towers, tabular(4, 3, 13, 11), 4), ("height", "width", "channel", "group")),
    "along": (lambda: workload(along, tabular(4, 2, 13), 4), ("height", "width", "channel")),
    "solid": (lambda: workload(solid, tabular(4, 1, 6, 5, 4), 4), ("height", "width", "channel")),
    "one image": (lambda: segmenting(1), ("height",)),
}


def everything() -> list[object]:
    """Each network in each way once, strips of rows on three workers and the others on two; on all when asked for."""
    made: list[object] = []
    for name, (_, splits) in NETWORKS.items():
        for split in splits:
            for workers in (1, 2, 3, 4):
                if split == "group" and workers > 2:
                    continue
                always = workers == (3 if split == "height" else 2)
                made.append(pytest.param(name, split, workers, marks=() if always else pytest.mark.slow))
    return made


@pytest.mark.parametrize(("name", "split", "workers"), everything())
def test_whole_networks_equal_one_device(name: str, split: Any, workers: int) -> None:
    prove(NETWORKS[name][0](), ConvParallel(split=split), workers)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("split", ["height", "channel"])
@pytest.mark.parametrize("name", ["cifar10", "resnet20_cifar10"])
def test_the_examples_equal_one_device(name: str, split: Any) -> None:
    example = load_workload(str(EXAMPLES / f"{name}.py") + ":workload")
    images = torch.randint(0, 256, (25, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    made = replace(
        example,
        data=lambda: TensorDataset(images.float(), networks.classes(25, 10)),
        batch_size=8,
        evaluation=None,
        steps=8,
        precision="float64",
    )
    with by_value(sys.modules[example.optimizer.__module__]):
        prove(made, ConvParallel(split=split), 2)


# What a rank holds


def held(world: World, made: Workload, split: Any) -> dict[str, tuple[int, ...]]:
    step = ConvParallel(split=split).build(made, world)
    for _ in range(2):
        batch = step.take()
        assert batch is not None
        step(batch)
    return {name: tuple(p.shape) for name, p in step.model.named_parameters()}


def test_channels_and_groups_and_the_first_linear_are_held_in_parts() -> None:
    made = workload(towers, tabular(4, 3, 13, 11), 4)
    with by_value(networks):
        by_height, by_group = (on_ranks(held, 2, made, split)[0] for split in ("height", "group"))
    assert by_height["4.weight"] == (8, 4, 3, 3)
    assert by_height["12.weight"] == (10, 36)  # two of three rows
    assert by_group["4.weight"] == (4, 4, 3, 3)
    assert by_group["5.weight"] == (4,)
    assert by_group["12.weight"] == (10, 27)
    assert by_group["14.weight"] == (3, 10)


def losses(world: World, made: Workload) -> list[float]:
    step = ConvParallel().build(made, world) if world.size > 1 else OneDeviceStep(made, world.device)
    told = []
    for _ in range(3):
        batch = step.take()
        assert batch is not None
        told.append(float(step(batch)["loss"]))
    return told


def test_dropout_draws_what_one_device_draws() -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Dropout(0.3), nn.ReLU(), nn.Dropout2d(0.4), nn.Conv2d(4, 4, 3), nn.Flatten(),
            nn.Dropout(0.5), nn.Linear(4 * 4 * 3, 3), nn.Dropout(0.1),
        )  # fmt: skip

    made = workload(model, tabular(4, 2, 8, 7), 4)
    with by_value(networks):
        alone = on_ranks(losses, 1, made)[0]
        for told in on_ranks(losses, 3, made):
            assert told == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("split", ["height", "channel"])
@pytest.mark.thorough
def test_killed_workers_change_no_bit(split: Any) -> None:
    made = workload(normalised, tabular(6, 2, 11, 9), 6, optimizer=adam, steps=60)
    with by_value(networks), by_value(sys.modules[__name__]):
        undisturbed, disturbed = (
            slots.on_slots(slots.train, 2, ConvParallel(split=split), made, killed=killed)
            for killed in ([], slots.kills(3, 60, 2, seed=5))
        )
    assert disturbed.kills == 3
    expected = dict(undisturbed.results[0][0].tensors())
    for state, _ in disturbed.results:
        assert state.step == 60
        found = dict(state.tensors())
        assert found.keys() == expected.keys()
        assert [name for name, t in expected.items() if not torch.equal(found[name], t)] == []


# What is refused


class Strange(nn.Module):
    """A convolution, and what is done to what it makes."""

    def __init__(self, then: Callable[[Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.then, self.layer = nn.Conv2d(2, 4, 3, padding=1), then, layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y = self.layer(y) if self.layer is not None else y
        return self.then(y).flatten(1).mean(1)


class Own(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_layer_of_ones_own_is_seen_through() -> None:
    made = workload(
        lambda: Strange(torch.relu, Own(4, 4, 3)), tabular(4, 2, 8, 8), 4, loss=lambda y, _: y.square().mean()
    )
    prove(made, ConvParallel(), 2)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y.mean((1, 2, 3)) if bool(y.sum() > 0) else y.amax((1, 2, 3))


def hooked() -> nn.Module:
    made = Strange(torch.relu)
    made.conv.register_forward_hook(lambda *_: None)
    return made


def tied() -> nn.Module:
    first, second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


@dataclass
class Answer:
    logits: Tensor


class Wrapped(nn.Module):
    """No tracer follows it, and there is nothing to divide either; the layer has the name of a convolution."""

    class Conv1D(nn.Linear):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.layer = Wrapped.Conv1D(128, 3)

    def forward(self, x: Tensor) -> Any:
        total: Any = x.sum() if isinstance(x, Tensor) else 0
        return Answer(self.layer(x.flatten(1)) + total.to(x.device))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "cumsum": (lambda: Strange(lambda y: y.cumsum(2)), "height", r"cumsum\(\).* is not known to be right"),
    "flip": (lambda: Strange(lambda y: torch.flip(y, (2,))), "height", r"flip\(\)"),
    "roll": (lambda: Strange(lambda y: y.roll(1, 2)), "height", r"roll\(\)"),
    "matmul": (lambda: Strange(lambda y: y @ y.transpose(2, 3)), "height", r"matmul\(\)"),
    "softmax over rows": (lambda: Strange(lambda y: y.softmax(2)), "height", "looks along the dimension"),
    "view": (lambda: Strange(lambda y: y.view(-1, 8)), "height", "may mix rows"),
    "index": (lambda: Strange(lambda y: y[:, :, 3]), "height", "only slices"),
    "max over rows": (lambda: Strange(lambda y: y.amax((2, 3))), "height", r"amax\(\)"),
    "corners": (
        lambda: Strange(torch.relu, nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)),
        "height",
        "layer cannot be cut .*align_corners",
    ),
    "indices": (
        lambda: Strange(lambda y: F.max_pool2d(y, 2, return_indices=True)[0]),
        "height",
        r"is not known to be right|numbers the pixels",
    ),
    "bicubic": (lambda: Strange(torch.relu, nn.Upsample(scale_factor=2, mode="bicubic")), "height", "bicubic"),
    "fold": (lambda: Strange(torch.relu, nn.Unfold(2)), "width", "layer cannot be cut .*Unfold is not known"),
    "hook": (hooked, "height", "conv cannot be cut .*hook"),
    "branch": (Branching, "height", "cannot be traced"),
    "recurrent": (lambda: Strange(lambda y: y, nn.LSTM(8, 3)), "height", "LSTM is not known"),
    "tied slices": (tied, "channel", "0.weight and 2.weight are one tensor"),
    "nothing to cut": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 3)), "height", "no convolution"),
    "nothing to cut, and not followed": (
        Wrapped,
        "height",
        "Wrapped has no convolution .*conv_parallel.*: use data_parallel, fully_sharded, tensor_parallel, layer_plac",
    ),
    "no groups": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten()), "group", "no convolution with groups"),
}


def _square(outputs: Any, _: Any) -> Tensor:
    return (outputs.logits if isinstance(outputs, Answer) else outputs).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(name: str) -> None:
    model, split, why = REFUSED[name]
    made = workload(model, tabular(4, 2, 8, 8), 4, loss=_square)
    with (
        pytest.raises(ValueError, match=why) as raised,
        by_value(networks),
        by_value(sys.modules[__name__]),
    ):
        apportion.check(made, ConvParallel(split=split), workers=2, steps=1)
    assert "use " in str(raised.value)


def test_an_update_of_ones_own_is_refused() -> None:
    """It may call a layer that is cut, and not the network."""

    def update(step: Any, batch: Any) -> dict[str, Tensor]:
        outputs = step.model(batch.inputs)
        return {"loss": step.minimize(F.cross_entropy(outputs, batch.targets), batch)}

    made = workload(towers, tabular(4, 3, 13, 11), 4, loss=None, update=update)
    with (
        pytest.raises(ValueError, match=r"update= calls the network as it likes.* use data_parallel"),
        by_value(networks),
        by_value(sys.modules[__name__]),
    ):
        apportion.check(made, ConvParallel(), workers=2, steps=1)


def test_a_split_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="split='depth' must be one of 'height', 'width', 'channel', 'group'"):
        ConvParallel(split="depth")  # type: ignore[arg-type]


def test_groups_that_are_fewer_than_the_workers_are_refused() -> None:
    made = workload(towers, tabular(4, 3, 13, 11), 4)
    with (
        pytest.raises(ValueError, match=r"4 cannot be cut .*groups=2 cannot be shared by 3 workers: use workers<=2"),
        by_value(networks),
        by_value(sys.modules[__name__]),
    ):
        apportion.check(made, ConvParallel(split="group"), workers=3, steps=1)


# A trap that this is not


def dtensor_and_ours(world: World, path: str) -> tuple[float, float]:
    """The error of a convolution over a spatial shard: torch's DTensor's, and ours."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    from apportion.parallel.spatial.forward import cut_network

    image = torch.randn(1, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, padding=1).double()
    expected = layer(image).detach()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=world.rank, world_size=world.size)
    try:
        mesh = init_device_mesh("cpu", (world.size,))
        with torch.no_grad():
            y = distribute_module(layer, mesh)(distribute_tensor(image, mesh, [Shard(2)])).full_tensor()
        theirs = float((y - expected).abs().max()) if y.shape == expected.shape else float("inf")
    finally:
        dist.destroy_process_group()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1).double())
    cut_network(plain, image, world.group(), "height")
    with torch.no_grad():
        ours = float((plain(image) - expected).abs().max())
    return theirs, ours


def test_dtensor_convolves_a_spatial_shard_wrongly_without_a_word_and_strips_do_not(tmp_path: Path) -> None:
    for theirs, ours in on_ranks(dtensor_and_ours, 2, str(tmp_path / "store")):
        assert theirs > 0.1
        assert ours <= 1e-12
