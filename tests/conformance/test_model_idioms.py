"""Networks in the idioms of the model libraries, against one device: normalisation and activation in one layer, gates
over channels, stochastic depth, layer scale, channels last, relative positions, depthwise convolutions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from networks import EPS
from proofs import assert_equal
from ranks import by_value
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.core.modes import evaluating
from apportion.parallel.pipeline.cut_points import Places, balanced, calls, named
from apportion.parallel.pipeline.stage_graph import trained_alone
from apportion.parallel.tracing.tracer import follow

SIZE, CLASSES, ROWS, BATCH = 8, 5, 13, 6


class BatchNormAct2d(nn.BatchNorm2d):
    """The normalisation by its function, and the activation after it."""

    def __init__(self, channels: int, *, activates: bool = True) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True) if activates else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        average = 0.0 if self.momentum is None else self.momentum
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        kept = not self.training or self.track_running_stats
        x = F.batch_norm(
            x,
            self.running_mean if kept else None,
            self.running_var if kept else None,
            self.weight,
            self.bias,
            of_batch,
            average,
            self.eps,
        )
        return self.act(self.drop(x))  # type: ignore[no-any-return]


class Counting(BatchNormAct2d):
    """As timm has it: the counter is replaced, and not written to."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked = self.num_batches_tracked + 1
        x = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.0,
            self.eps,
        )
        return self.act(x)  # type: ignore[no-any-return]


class ByHand(nn.Module):
    """No BatchNorm2d at all: its buffers are the layer's own."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, 1e-5)
        return x.relu()


class DropPath(nn.Module):
    """Whole examples are dropped; here with a probability of 0, as the first block of a network has it."""

    def __init__(self, probability: float = 0.0) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if self.probability == 0.0 or not self.training:
            return x
        keep = 1 - self.probability
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(keep).div_(keep)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.act = nn.Conv2d(channels, 2, 1), nn.SiLU(inplace=True)
        self.expand, self.gate = nn.Conv2d(2, channels, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.expand(self.act(self.reduce(pooled))))  # type: ignore[no-any-return]


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.fc1, self.act, self.fc2 = nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        self.gamma, self.drop_path = nn.Parameter(0.1 * torch.ones(channels)), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.conv_dw(x).permute(0, 2, 3, 1)
        x = self.fc2(self.act(self.fc1(self.norm(x)))).permute(0, 3, 1, 2)
        x = x.mul(self.gamma.reshape(1, -1, 1, 1))
        return self.drop_path(x) + shortcut  # type: ignore[no-any-return]


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), LayerNorm2d(4))
        self.stages = nn.Sequential(
            ConvNeXtBlock(4), nn.Sequential(LayerNorm2d(4), nn.Conv2d(4, 6, 2, stride=2)), ConvNeXtBlock(6)
        )
        self.norm, self.fc = LayerNorm2d(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stages(self.stem(x)).mean((2, 3), keepdim=True))
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


class InvertedResidual(nn.Module):
    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        wide = 2 * channels
        self.conv_pw, self.bn1 = nn.Conv2d(channels, wide, 1, bias=False), norm(wide)
        self.conv_dw, self.bn2 = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), norm(wide)
        self.se, self.conv_pwl = SqueezeExcite(wide), nn.Conv2d(wide, channels, 1, bias=False)
        self.bn3, self.drop_path = norm(channels), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.se(self.bn2(self.conv_dw(self.bn1(self.conv_pw(x)))))
        return self.drop_path(self.bn3(self.conv_pwl(x))) + shortcut  # type: ignore[no-any-return]


class EfficientNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = BatchNormAct2d) -> None:
        super().__init__()
        self.conv_stem, self.bn1 = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), norm(4)
        self.blocks = nn.Sequential(InvertedResidual(4, norm), InvertedResidual(4, norm))
        self.conv_head, self.act2 = nn.Conv2d(4, 8, 1), nn.Hardswish()
        self.global_pool, self.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.bn1(self.conv_stem(x)))
        x = self.act2(self.conv_head(self.global_pool(x)))
        return self.classifier(x.flatten(1))  # type: ignore[no-any-return]


class WindowAttention(nn.Module):
    """With a table of relative positions, as Swin has it."""

    relative_position_index: Tensor

    def __init__(self, width: int, side: int, heads: int) -> None:
        super().__init__()
        self.heads, self.area = heads, side * side
        self.relative_position_bias_table = nn.Parameter(0.1 * torch.randn((2 * side - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + side - 1
        self.register_buffer(
            "relative_position_index", apart[..., 0] * (2 * side - 1) + apart[..., 1], persistent=False
        )
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        bias = bias.view(self.area, self.area, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        weights = self.softmax(q * 0.5 @ k.transpose(-2, -1) + bias)
        return self.proj((weights @ v).transpose(1, 2).reshape(rows, tokens, -1))  # type: ignore[no-any-return]


class SwinBlock(nn.Module):
    """Images with their channels last, in windows that may be shifted."""

    def __init__(self, width: int, side: int, shift: int) -> None:
        super().__init__()
        self.side, self.shift = side, shift
        self.norm1, self.attn, self.drop_path1 = nn.LayerNorm(width), WindowAttention(width, side, 2), DropPath()
        self.norm2, self.ls2 = nn.LayerNorm(width), LayerScale(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def _attend(self, x: Tensor) -> Tensor:
        rows, height, wide, width = x.shape
        side = self.side
        shifted = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2)) if self.shift else x
        cut = shifted.view(rows, height // side, side, wide // side, side, width).permute(0, 1, 3, 2, 4, 5)
        cut = self.attn(cut.contiguous().view(-1, side * side, width))
        back = cut.view(-1, height // side, wide // side, side, side, width).permute(0, 1, 3, 2, 4, 5)
        shifted = back.contiguous().view(-1, height, wide, width)
        return torch.roll(shifted, shifts=(self.shift, self.shift), dims=(1, 2)) if self.shift else shifted

    def forward(self, x: Tensor) -> Tensor:
        rows, height, wide, width = x.shape
        x = x + self.drop_path1(self._attend(self.norm1(x)))
        x = x.reshape(rows, -1, width)
        x = x + self.ls2(self.mlp(self.norm2(x)))
        return x.reshape(rows, height, wide, width)


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 2, stride=2)
        self.layers = nn.Sequential(SwinBlock(8, 2, 0), SwinBlock(8, 2, 1))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.patch_embed(x).permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean((1, 2)))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """A class token, and positions that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, stride=4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(0.1 * torch.randn(1, 5, 8))
        self.pos_drop = nn.Dropout(0.0)
        self.norm1, self.qkv, self.proj, self.ls1 = (
            nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8), LayerScale(8),
        )  # fmt: skip
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.fc_norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = self.pos_drop(torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed)
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(rows, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, width)
        x = x + self.ls1(self.proj(mixed))
        x = x + self.mlp(x)
        return self.head(self.fc_norm(x[:, 0]))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ConvNeXt": ConvNeXt,
    "EfficientNet": EfficientNet,
    "EfficientNet that counts": lambda: EfficientNet(Counting),
    "EfficientNet by hand": lambda: EfficientNet(ByHand),
    "EfficientNet without activations": lambda: EfficientNet(partial(BatchNormAct2d, activates=False)),
    "Swin": Swin,
    "ViT": ViT,
}


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(ROWS, 3, SIZE, SIZE, generator=draws), torch.randint(CLASSES, (ROWS,), generator=draws)
    )


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3, eps=EPS)


def workload(name: str) -> Workload:
    return Workload(
        model=MODELS[name],
        data=data,
        loss=F.cross_entropy,
        optimizer=adamw,
        batch_size=BATCH,
        epochs=1,
        precision="float64",
    )


STRATEGIES = (
    "data_parallel", "layer_placement", "pipeline_parallel(microbatches=1)", "tensor_parallel", "conv_parallel",
    "hybrid_parallel",
)  # fmt: skip
REFUSED: dict[tuple[str, str], str] = {
    ("ConvNeXt", "conv_parallel"): r"layer_norm\(\) in stem.1 cannot be cut",
    ("EfficientNet", "conv_parallel"): r"batch_norm\(\) in bn1 cannot be cut",
    ("EfficientNet that counts", "conv_parallel"): r"batch_norm\(\) in bn1 cannot be cut",
    ("EfficientNet without activations", "conv_parallel"): r"batch_norm\(\) in bn1 cannot be cut",
    (
        "EfficientNet without activations",
        "hybrid_parallel",
    ): "the forward of bn1 cannot be followed: it changes its own",
    ("EfficientNet by hand", "conv_parallel"): r"batch_norm\(\) in bn1 cannot be cut",
    ("Swin", "conv_parallel"): r"view\(\) in layers.0 cannot be cut",
    ("ViT", "conv_parallel"): r"flatten\(\) in the network's forward cannot be cut",
    ("EfficientNet", "hybrid_parallel"): "the forward of bn1 cannot be followed: it changes its own",
    ("EfficientNet that counts", "hybrid_parallel"): "the forward of bn1 cannot be followed: it changes its own",
    ("Swin", "hybrid_parallel"): "a value of type int goes into layers.0.attn.qkv",
    ("ViT", "hybrid_parallel"): "a value of type int goes into qkv",
}
"""By network and strategy: what the sentence has."""


@pytest.mark.processes
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.cases(6)
def test_the_idioms_of_model_libraries_equal_one_device_or_are_refused_by_name(name: str, strategy: str) -> None:
    why = REFUSED.get((name, strategy.partition("(")[0]))
    with by_value(sys.modules[__name__]):
        if why is None:
            assert_equal(apportion.check(workload(name), strategy, workers=2, steps=3))
            return
        with pytest.raises(ValueError, match=why) as caught:
            apportion.check(workload(name), strategy, workers=2, steps=3)
    assert "use " in str(caught.value)


def test_no_stage_begins_with_what_is_called_in_training_alone() -> None:
    """Wherever a cut is the cheapest: the counters of the normalisations are moved in training alone."""
    model = EfficientNet(partial(BatchNormAct2d, activates=False))
    inputs = torch.randn(2, 3, SIZE, SIZE)
    graph = follow(model, inputs)
    with evaluating(model.modules()):
        evaluated = follow(model, inputs)
    order = calls(graph)
    alone = trained_alone(model, graph, evaluated)
    assert {order[i].name for i in alone} >= {node.name for node in order if node.target == "add_"}
    assert [node.target for i, node in enumerate(order) if i not in alone and node.op == "call_module"]
    places = Places(tuple(n.name for n in order), (1.0,) * len(order), (0.0,) * len(order)).without(alone)
    for stages in (2, 3, 4):
        assert not {*balanced(places, stages)} & {*alone}
    with pytest.raises(ValueError, match="evaluated"):
        named(places, [next(node.name for node in order if node.target == "add_")])
