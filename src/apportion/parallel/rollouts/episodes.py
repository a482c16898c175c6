"""Whole episodes as an evaluation: what the network scores when it does what it thinks best."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch

from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.sampling.sampler import Index, mix
from apportion.parallel.rollouts.acting import Acting
from apportion.parallel.rollouts.environments import Factory, opened_one_by_one
from apportion.parallel.rollouts.policy import policy_of


@final
class Episodes(ActedDataset):
    """So many episodes, each with a seed of its own: example i is the last observation of episode i, and its score."""

    def __init__(self, environment: str | Factory, episodes: int, *, seed: int) -> None:
        self._make, self._many, self._seed = opened_one_by_one(environment), episodes, seed
        self._acting = Acting()

    def __len__(self) -> int:
        return self._many

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        """An example as it may be, made without the network."""
        environment = self._make()
        observation = np.asarray(environment.reset(seed=0)[0])
        environment.close()
        pair = torch.from_numpy(observation), {"score": torch.tensor(0.0), "steps": torch.tensor(0.0)}
        return pair

    def act(self, index: Index, step: int) -> tuple[Any, Any]:
        if self.network is None:
            inputs, targets = self[0]
            return tree.map_tensors(lambda t: t[None].expand(len(index), *t.shape), (inputs, targets))  # type: ignore[no-any-return]
        act = self._acting.by(self.network)
        environments = [self._make() for _ in index]
        policy = policy_of(environments[0].action_space)
        whole = type(environments[0].action_space).__name__ == "Discrete"
        seeds = [mix(self._seed, number, 0xE9A1) & 0x7FFFFFFF for number in index.tolist()]
        seen = np.stack([np.asarray(e.reset(seed=s)[0]) for e, s in zip(environments, seeds, strict=True)])
        score, steps = np.zeros(len(index)), np.zeros(len(index))
        going = np.arange(len(index))
        while len(going):
            chosen = policy.best(act(seen[going]))
            over = np.zeros(len(going), dtype=bool)
            for at, number in enumerate(going):
                action = int(chosen[at]) if whole else chosen[at]
                seen[number], reward, ended, cut, _ = environments[number].step(action)
                score[number] += float(reward)
                steps[number] += 1
                over[at] = ended or cut
            going = going[~over]
        for environment in environments:
            environment.close()
        told = {"score": torch.from_numpy(score).float(), "steps": torch.from_numpy(steps).float()}
        return torch.from_numpy(seen), told


def score(outputs: Any, targets: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean of the sums of the rewards of an episode."""
    return targets["score"].double().mean()
