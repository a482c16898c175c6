"""An AlexNet for CIFAR-10: five convolutions, then three wide fully connected layers. For hybrid_parallel.

    apportion train examples/alexnet_cifar10.py:workload --strategy hybrid_parallel --workers 2

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: the convolutions have nine tenths
of the work and a twentieth of the weights, the fully connected layers the reverse. So `features` runs data parallel,
and `classifier` is sliced. The widths are AlexNet's (torchvision's form of it), for images of 32x32: 35.8 million
parameters, 33.6 million of them in the classifier.
"""

import torch
from cifar10_data import crop, test_set, training_set
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Evaluation, Workload


class AlexNet(nn.Module):
    """Images (n, 3, 32, 32) -> logits (n, 10)."""

    def __init__(self, dropout=0.5):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 192, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 4 * 4, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, 10),
        )

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


def normalised(images):
    """Pixels of 0 to 255 to about -1 to 1."""
    return images.float() / 127.5 - 1


def augment(batch, draws):
    """A random 32x32 crop of each padded image, half of them mirrored."""
    padded = nn.functional.pad(batch.inputs, (4, 4, 4, 4))
    top, left, flip = draws.integers(0, 9), draws.integers(0, 9), draws.bernoulli(0.5)
    return batch.replace(inputs=normalised(crop(padded, top=top, left=left, flip=flip, size=32)))


def evaluation_set():
    images, labels = test_set()
    return TensorDataset(normalised(images), labels)


workload = Workload(
    model=AlexNet,
    data=lambda: TensorDataset(*training_set()),
    augment=augment,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4),
    schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    batch_size=128,
    epochs=5,
    evaluation=Evaluation(data=evaluation_set, best="max accuracy"),
)
