"""The networks that both sides of `reinforcement.py` train: those of Stable-Baselines3's MlpPolicy and CnnPolicy, with
the weights that they begin with there. They import nothing but torch, so that every peer can have them."""

import math

import torch
from torch import nn

HIDDEN, POLICY, VALUE = math.sqrt(2), 0.01, 1.0
"""The gains of the orthogonal matrices that hidden layers, the policy's last layer and the value's begin with."""


def orthogonal(layer, gain):
    """The same layer, as it begins."""
    nn.init.orthogonal_(layer.weight, gain=gain)
    nn.init.zeros_(layer.bias)
    return layer


class TwoPerceptrons(nn.Module):
    """A policy and a value that share nothing, each of two hidden layers of tanh."""

    def __init__(self, seen, choices, width=64):
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(
                orthogonal(nn.Linear(seen, width), HIDDEN),
                nn.Tanh(),
                orthogonal(nn.Linear(width, width), HIDDEN),
                nn.Tanh(),
                orthogonal(nn.Linear(width, given), gain),
            )
            for given, gain in ((choices, POLICY), (1, VALUE))
        )

    def forward(self, x):
        return self.policy(x), self.value(x)


class Nature(nn.Module):
    """The convolutions of Mnih et al., "Human-level control through deep reinforcement learning", Nature 2015, with a
    policy and a value. observations (n, 4, 84, 84), uint8."""

    def __init__(self, choices):
        super().__init__()
        self.seen = nn.Sequential(
            orthogonal(nn.Conv2d(4, 32, 8, stride=4), HIDDEN),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2), HIDDEN),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3), HIDDEN),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(3136, 512), HIDDEN),
            nn.ReLU(),
        )
        self.policy, self.value = orthogonal(nn.Linear(512, choices), POLICY), orthogonal(nn.Linear(512, 1), VALUE)

    def forward(self, x):
        x = self.seen(x.to(self.policy.weight.dtype) / 255)
        return self.policy(x), self.value(x)


NETWORKS = {
    "CartPole-v1": lambda: TwoPerceptrons(4, 2),
    "Acrobot-v1": lambda: TwoPerceptrons(6, 3),
    "LunarLander-v3": lambda: TwoPerceptrons(8, 4),
    "pong": lambda: Nature(6),
}
"""By the environment."""


def rmsprop(parameters, lr):
    """As Stable-Baselines3's A2C has it."""
    return torch.optim.RMSprop(parameters, lr=lr, alpha=0.99, eps=1e-5)
