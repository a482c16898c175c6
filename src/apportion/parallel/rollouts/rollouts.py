"""Rollouts as a data set: example i is what actor i has seen and done next."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch

from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.sampling.sampler import Index
from apportion.parallel.rollouts.acting import Acting
from apportion.parallel.rollouts.actor import Actor, Rollout
from apportion.parallel.rollouts.environments import Factory, open_environments
from apportion.parallel.rollouts.policy import policy_of


@final
class Rollouts(ActedDataset):
    """``actors`` actors, each of which plays ``environments`` environments for ``steps`` steps an example."""

    def __init__(self, environment: str | Factory, *, actors: int, environments: int, steps: int, seed: int) -> None:
        self._environment, self._many, self._width, self._steps = environment, actors, environments, steps
        self._seed = seed
        self._actors: dict[tuple[int, int], Actor] = {}
        self._made: dict[tuple[int, int], tuple[int, Rollout]] = {}
        self._acting = Acting()
        self.scores: list[float] = []
        """The sums of rewards of the episodes that have come to an end so far."""
        self.frames = 0

    def __len__(self) -> int:
        return self._many

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        """An example as it may be, made without the network."""
        inputs, targets = self._sample(1)
        return tree.map_tensors(lambda t: t[0], inputs), tree.map_tensors(lambda t: t[0], targets)

    def _actor(self, number: int) -> Actor:
        key = self.worker, number
        if key not in self._actors:
            environments = open_environments(self._environment, self._width)
            policy = policy_of(environments.action_space)
            self._actors[key] = Actor(environments, policy, seed=self._seed, key=self.worker * self._many + number)
        return self._actors[key]

    def _sample(self, many: int) -> tuple[Any, Any]:
        environments = open_environments(self._environment, self._width)
        try:
            policy = policy_of(environments.action_space)
            actor = Actor(environments, policy, seed=self._seed, key=0)
            rollout = actor.play(lambda seen: np.zeros((len(seen), policy.numbers)), self._steps, 0)
        finally:
            environments.close()
        return _inputs([rollout] * many), _targets([rollout] * many)

    def act(self, index: Index, step: int) -> tuple[Any, Any]:
        if self.network is None:  # of the right shape, and nothing that the actors have done
            return self._sample(len(index))
        act = self._acting.by(self.network)
        played = []
        for number in index.tolist():
            key = self.worker, number
            if self._made.get(key, (-1, None))[0] != step:
                rollout = self._actor(number).play(act, self._steps, step)
                self.scores += rollout.scores
                self.frames += int(rollout.counts.sum())
                self._made[key] = step, rollout
            played.append(self._made[key][1])
        return _inputs(played), _targets(played)


def _inputs(played: list[Rollout]) -> Any:
    most = max(len(rollout.last) for rollout in played)
    last = np.zeros((len(played), most, *played[0].observations.shape[2:]), dtype=played[0].observations.dtype)
    for at, rollout in enumerate(played):
        last[at, : len(rollout.last)] = rollout.last
    return _stacked([rollout.observations for rollout in played]), torch.from_numpy(last)


def _targets(played: list[Rollout]) -> dict[str, torch.Tensor]:
    names = "actions", "rewards", "ended", "cut", "counts", "last_at"
    found = {name: _stacked([getattr(rollout, name) for rollout in played]) for name in names}
    found["rewards"] = found["rewards"].float()
    return found


def _stacked(arrays: list[Any]) -> torch.Tensor:
    return torch.from_numpy(arrays[0][None] if len(arrays) == 1 else np.stack(arrays))
