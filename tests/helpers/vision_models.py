"""Networks of timm and torchvision in small: their own classes, with random weights, few channels and few blocks.

Both libraries are imported where a network is made, from .venv/vision.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from real_models import CLASSES, Pictures, workload
from torch import nn
from torch.nn import functional as F

from apportion import Workload

FOLDER = Path(sys.prefix) / "vision"
SIZE = 8
"""Pixels of a side of ``Pictures``."""
_kept: list[Any] = []


def libraries() -> None:
    """Put both on the path. torchvision's own build for CUDA lacks its operators beside torch's build for the CPU; no
    network here calls one, so that their names are enough."""
    if str(FOLDER) in sys.path:
        return
    sys.path.append(str(FOLDER))
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(operators)  # they go with it


# torchvision


def resnet18() -> nn.Module:
    libraries()
    from torchvision.models.resnet import BasicBlock, ResNet

    class Narrow(ResNet):
        def _make_layer(self, block: Any, planes: int, blocks: int, stride: int = 1, dilate: bool = False) -> Any:
            return super()._make_layer(block, planes // 16, blocks, stride, dilate)

    model = Narrow(BasicBlock, [2, 2, 1, 1], num_classes=CLASSES, width_per_group=64)
    # With it the last stage would see images of one pixel, for which torch's own gradient of a convolution with stride
    # 2 is wrong in bfloat16: it holds what was in memory before.
    model.maxpool = nn.Identity()
    model.fc = nn.Linear(512 // 16, CLASSES)
    return model


def torchvision_vgg() -> nn.Module:
    libraries()
    from torchvision.models.vgg import VGG, make_layers

    features = make_layers([6, "M", 8, "M"])
    with torch.device("meta"):  # its own classifier has 120 million weights
        model = VGG(features, init_weights=False)
    sides = 7 * 7
    model.classifier = nn.Sequential(
        nn.Linear(8 * sides, 20), nn.ReLU(True), nn.Dropout(), nn.Linear(20, 20), nn.ReLU(True), nn.Dropout(),
        nn.Linear(20, CLASSES),
    )  # fmt: skip
    return model  # type: ignore[no-any-return]


def mobilenet_v3() -> nn.Module:
    libraries()
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    blocks = [
        InvertedResidualConfig(8, 3, 8, 8, True, "RE", 1, 1, 1.0),
        InvertedResidualConfig(8, 5, 16, 8, True, "HS", 2, 1, 1.0),
    ]
    return MobileNetV3(blocks, last_channel=16, num_classes=CLASSES)


def efficientnet() -> nn.Module:
    libraries()
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    blocks = [MBConvConfig(1, 3, 1, 8, 8, 1, 1.0, 1.0), MBConvConfig(4, 5, 2, 8, 8, 2, 1.0, 1.0)]
    return EfficientNet(blocks, dropout=0.2, stochastic_depth_prob=0.0, num_classes=CLASSES, last_channel=16)


def swin() -> nn.Module:
    libraries()
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        patch_size=[2, 2], embed_dim=8, depths=[2, 1], num_heads=[2, 4], window_size=[2, 2],
        stochastic_depth_prob=0.0, num_classes=CLASSES,
    )  # fmt: skip


def convnext() -> nn.Module:
    libraries()
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.0, num_classes=CLASSES)


# timm


def efficientnet_of_timm() -> nn.Module:
    """Its batch normalisation calls ``F.batch_norm`` itself, and its activation after it."""
    libraries()
    import timm

    # It halves the sides five times: of one pixel and two rows a batch normalisation gives nothing but signs.
    return nn.Sequential(nn.Upsample(scale_factor=8), timm.create_model("test_efficientnet", num_classes=CLASSES))


def vit() -> nn.Module:
    libraries()
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=SIZE, patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=CLASSES, qkv_bias=True
    )


def vgg() -> nn.Module:
    libraries()
    from timm.models.vgg import VGG

    return VGG([6, "M", 8, "M"], num_classes=CLASSES, mlp_ratio=1 / 128, drop_rate=0.5)


classified = partial(workload, loss=F.cross_entropy)
MODELS: dict[str, Workload] = {
    "torchvision's ResNet-18": classified(resnet18, lambda: Pictures("even")),
    "torchvision's VGG": classified(torchvision_vgg, lambda: Pictures("plain")),
    "torchvision's MobileNetV3": classified(mobilenet_v3, lambda: Pictures("even")),
    "torchvision's EfficientNet": classified(efficientnet, lambda: Pictures("even")),
    "torchvision's Swin": classified(swin, lambda: Pictures("plain")),
    "torchvision's ConvNeXt": classified(convnext, lambda: Pictures("plain")),
    "timm's EfficientNet": classified(efficientnet_of_timm, lambda: Pictures("even")),
    "timm's ViT": classified(vit, lambda: Pictures("plain")),
    "timm's VGG with dropout": classified(vgg, lambda: Pictures("plain")),
}
