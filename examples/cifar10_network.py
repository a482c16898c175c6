"""The network of TensorFlow's CIFAR-10 tutorial: two 5x5 convolutions of 64 maps, fully connected 384 and 192.

Standardised 24x24 crops go in, the logits of 10 classes come out: 1.07 million parameters.
"""

import torch
from torch import nn


class LocalResponseNorm(nn.Module):
    """nn.LocalResponseNorm (Krizhevsky et al., 2012) as a 1x1 convolution with a band of ones.

    Its pooling over channels takes half of a step on a CPU; this takes a tenth.
    """

    def __init__(self, channels, *, size=9, alpha=0.001, beta=0.75):
        super().__init__()
        self.scale, self.beta = alpha / size, beta
        channel = torch.arange(channels)
        band = (channel[:, None] - channel).abs() <= size // 2
        self.register_buffer("band", band[:, :, None, None].float(), persistent=False)

    def forward(self, x):
        return x * (1 + self.scale * nn.functional.conv2d(x * x, self.band)).pow(-self.beta)


def network():
    model = nn.Sequential()
    model.conv1 = nn.Conv2d(3, 64, 5, padding=2)
    model.relu1 = nn.ReLU()
    model.pool1 = nn.MaxPool2d(3, stride=2, padding=1)
    model.norm1 = LocalResponseNorm(64)
    model.conv2 = nn.Conv2d(64, 64, 5, padding=2)
    model.relu2 = nn.ReLU()
    model.norm2 = LocalResponseNorm(64)
    model.pool2 = nn.MaxPool2d(3, stride=2, padding=1)
    model.flatten = nn.Flatten()
    model.local3 = nn.Linear(6 * 6 * 64, 384)
    model.relu3 = nn.ReLU()
    model.local4 = nn.Linear(384, 192)
    model.relu4 = nn.ReLU()
    model.softmax_linear = nn.Linear(192, 10)
    for layer, deviation, bias in [
        (model.conv1, 0.05, 0.0),
        (model.conv2, 0.05, 0.1),
        (model.local3, 0.04, 0.1),
        (model.local4, 0.04, 0.1),
        (model.softmax_linear, 1 / 192, 0.0),
    ]:
        nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        nn.init.constant_(layer.bias, bias)
    return model
