"""ResNet-20 on CIFAR-10 (He et al., "Deep Residual Learning", 2015, section 4.2): 20 layers with batch normalisation.

    apportion train examples/resnet20_cifar10.py:workload

The paper's recipe: 4 pixels of padding, random 32x32 crops and flips, SGD with momentum, weight decay 0.0001, the
learning rate divided by 10 at one half and three quarters of the training; and 400 steps of warm-up. The paper trains
for 164 epochs (`--steps 64000`) and reaches 0.9125. Parameter names are those of the published state dicts
(github.com/akamaster/pytorch_resnet_cifar10): with its weights `evaluation` gives 0.9173, as published.
"""

import torch
from cifar10_data import crop, test_set, training_set
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Evaluation, Workload

WARM_UP_STEPS = 400


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters: where the maps shrink, every second pixel, and zeros
    for the new channels (option A)."""

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride, self.new_channels = stride, channels - channels_in

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return torch.relu(out + self.shortcut(x))

    def shortcut(self, x):
        if not self.new_channels:
            return x
        half = self.new_channels // 2
        return nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))


class ResNet(nn.Module):
    """Three stages of `blocks` blocks with 16, 32, 64 maps: 6 * blocks + 2 layers."""

    def __init__(self, blocks):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, blocks, stride=1)
        self.layer2 = self._stage(16, 32, blocks, stride=2)
        self.layer3 = self._stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    @staticmethod
    def _stage(channels_in, channels, blocks, *, stride):
        first = Block(channels_in, channels, stride)
        return nn.Sequential(first, *(Block(channels, channels, 1) for _ in range(blocks - 1)))

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def resnet20():
    return ResNet(blocks=3)


def normalised(images):
    """float32, with the mean and the deviation that are customary for ImageNet."""
    mean = torch.tensor([0.485, 0.456, 0.406], device=images.device).view(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225], device=images.device).view(3, 1, 1)
    return (images / 255 - mean) / deviation


def augment(batch, draws):
    """A random 32x32 crop of each padded image, half of them mirrored."""
    padded = nn.functional.pad(batch.inputs, (4, 4, 4, 4))
    top, left, flip = draws.integers(0, 9), draws.integers(0, 9), draws.bernoulli(0.5)
    return batch.replace(inputs=normalised(crop(padded, top=top, left=left, flip=flip, size=32)))


def evaluation_set():
    images, labels = test_set()
    return TensorDataset(normalised(images), labels)


def schedule(optimizer, steps):
    """A tenth from one half on, a hundredth from three quarters on; before, a linear warm-up, as the paper needs for
    deeper networks and Goyal et al. (2017) for larger batches: at the full rate each of the first steps amplifies even
    rounding tenfold."""

    def factor(step):
        return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.1 ** ((step >= steps // 2) + (step >= steps * 3 // 4))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


workload = Workload(
    model=resnet20,
    data=lambda: TensorDataset(*training_set()),
    augment=augment,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4),
    schedule=schedule,
    batch_size=128,
    epochs=10,
    evaluation=Evaluation(data=evaluation_set, best="max accuracy"),
)
