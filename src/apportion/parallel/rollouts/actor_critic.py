"""The workload of an actor-critic: environments in the place of a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from apportion.core.workload import Evaluation, Parameters, Workload
from apportion.parallel.rollouts.environments import Factory, open_environments
from apportion.parallel.rollouts.episodes import Episodes, score
from apportion.parallel.rollouts.loss import ActorCriticLoss, Unrolled, terms
from apportion.parallel.rollouts.policy import policy_of
from apportion.parallel.rollouts.rollouts import Rollouts


def actor_critic(  # noqa: PLR0913 (the settings of the papers)
    environment: str | Factory,
    *,
    model: Callable[[], nn.Module],
    optimizer: Callable[[Parameters], Optimizer],
    frames: int,
    actors: int = 1,
    environments: int = 16,
    steps: int = 5,
    gamma: float = 0.99,
    gae: float = 1.0,
    value: float = 0.5,
    entropy: float = 0.01,
    anneal: bool = True,
    episodes: int = 20,
    evaluate_every: int | None = None,
    seed: int = 0,
    **more: Any,
) -> Workload:
    """A workload that trains a policy and its value on what they do themselves.

    An example is a rollout: ``steps`` steps (the papers' t_max) of ``environments`` environments that an actor plays.
    A batch is one of each of ``actors`` actors. ``model()(observations (n, ...)) -> (policy, value)``.
    """
    one = open_environments(environment, 1)
    policy = policy_of(one.action_space)
    one.close()

    def annealed(optimizer: Optimizer, total: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda done: 1.0 - done / total)

    return Workload(
        model=lambda: Unrolled(model()),
        data=lambda: Rollouts(environment, actors=actors, environments=environments, steps=steps, seed=seed),  # type: ignore[arg-type,return-value]
        optimizer=optimizer,
        batch_size=actors,
        order="sequential",
        loss=ActorCriticLoss(policy, gamma=gamma, gae=gae, value=value, entropy=entropy),
        count=terms,
        steps=max(1, frames // (actors * environments * steps)),
        evaluation=Evaluation(
            data=lambda: Episodes(environment, episodes, seed=seed + 1),  # type: ignore[arg-type,return-value]
            metrics={"score": score},
            every=None if evaluate_every is None else max(1, evaluate_every // (actors * environments * steps)),
            best="max score",
            batch_size=episodes,
        ),
        schedule=annealed if anneal else None,
        seed=seed,
        **more,
    )
