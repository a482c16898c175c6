"""CIFAR-10 with the network of TensorFlow's tutorial. `cifar10_plain.py` is the same training in plain torch.

    apportion train examples/cifar10.py:workload

Random 24x24 crops and flips, standardised image by image. (The tutorial's random brightness is left out: the
standardisation takes it away again.) The centre crop is evaluated. The tutorial's decay: 0.004 on the weights of the
two fully connected layers, and an exponentially falling learning rate, here with momentum: 0.710 after 5 epochs.
"""

import torch
from cifar10_data import crop, standardised, test_set, training_set
from cifar10_network import network
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Evaluation, Workload


def augment(batch, draws):
    """A random 24x24 crop of each image, half of them mirrored."""
    top, left, flip = draws.integers(0, 9), draws.integers(0, 9), draws.bernoulli(0.5)
    return batch.replace(inputs=standardised(crop(batch.inputs, top=top, left=left, flip=flip, size=24)))


def evaluation_set():
    images, labels = test_set()
    return TensorDataset(standardised(images[:, :, 4:28, 4:28]), labels)


def optimizer(parameters):
    """SGD with momentum; weight decay on the fully connected layers alone."""
    decayed, others = [], []
    for name, parameter in parameters:
        (decayed if name in ("local3.weight", "local4.weight") else others).append((name, parameter))
    groups = [{"params": decayed, "weight_decay": 0.004}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def schedule(optimizer, steps):
    """The learning rate falls a hundredfold over the training."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / steps))


workload = Workload(
    model=network,
    data=lambda: TensorDataset(*training_set()),
    augment=augment,
    loss=nn.functional.cross_entropy,
    optimizer=optimizer,
    schedule=schedule,
    batch_size=128,
    epochs=5,
    evaluation=Evaluation(data=evaluation_set, best="max accuracy"),
)
