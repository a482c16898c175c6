"""CartPole-v1 by an actor-critic: two small networks learn to balance a pole from what they do themselves."""

import torch
from torch import Tensor, nn

import apportion


class ActorCritic(nn.Module):
    """A policy over the two pushes, and the value of where the cart and the pole are."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.value(x)


workload = apportion.actor_critic(
    "CartPole-v1",
    model=ActorCritic,
    optimizer=lambda p: torch.optim.RMSprop(p, lr=0.003, alpha=0.99, eps=1e-5),
    frames=300_000,
    environments=16,
    steps=16,
    entropy=0.0,
    clip_grad_norm=0.5,
    evaluate_every=50_000,
)
