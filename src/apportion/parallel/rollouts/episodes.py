"""Whole episodes as an evaluation: what the network scores when it does what it thinks best."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.event import EPISODE
from apportion.core.order import Index
from apportion.core.rng import mix
from apportion.parallel.rollouts.acting import Acting
from apportion.parallel.rollouts.environments import Factory, one_that_is_seen, open_environments
from apportion.parallel.rollouts.policy import policy_of
from apportion.parallel.rollouts.transition import Environments

# One episode as a film, for people to look at.

Array = NDArray[Any]
MOST_STEPS, MOST_PICTURES, WIDTH = 2000, 200, 240
"""The most steps of an episode that are filmed, the most pictures of the film, and their width in pixels: about a
megabyte."""
MILLISECONDS = 40


def filmed(
    environment: str | Factory,
    acting: Acting,
    network: nn.Module,
    *,
    seed: int,
    state: Callable[[int], Any] | None,
    beat: Callable[[], None],
) -> list[Array]:
    """The pictures (height, width, 3) of an episode that the network plays with its most probable actions; none where
    the environment cannot be seen."""
    seen = one_that_is_seen(environment)
    if seen is None:
        return []
    try:
        policy = policy_of(seen.action_space)
        observation, memory = seen.reset(seed), () if state is None else state(1)
        act, pictures = acting.by(network, lambda: (observation, seen.observed)), []
        begins = np.ones(1, dtype=bool)
        for _ in range(MOST_STEPS):
            beat()
            pictures.append(seen.render())
            numbers, memory = act(observation, memory, begins)
            moved = seen.step(policy.for_environment(policy.best(numbers)))
            observation, begins = moved.observations, np.zeros(1, dtype=bool)
            if moved.ended[0] or moved.cut[0]:
                break
    finally:
        seen.close()
    return pictures


def as_gif(pictures: list[Array], path: Path) -> Path | None:
    """Write the pictures as a GIF that plays for ever; None where Pillow is not installed."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return None
    every = -(-len(pictures) // MOST_PICTURES)
    made = [_small(Image.fromarray(picture)) for picture in pictures[::every]]
    made[0].save(path, save_all=True, append_images=made[1:], duration=MILLISECONDS, loop=0, optimize=True)
    return path


def _small(picture: Any) -> Any:
    height = max(1, round(picture.height * WIDTH / picture.width))
    small = picture.resize((WIDTH, height)) if picture.width > WIDTH else picture
    return small.quantize(64)


MOST_AT_ONCE = 32
LONGEST_EPISODE = 30_000
"""The steps after which an episode of an evaluation is cut. The longest of Atari's have 27,000."""


@final
class Episodes(ActedDataset):
    """A data set of whole episodes, some at once: example i is the first episode of each of ``width`` environments that
    begin with a seed of their own, so that the episodes are the same whenever they are played, and on every rank.
    ``longest``: the steps after which an episode is cut."""

    def __init__(
        self,
        environment: str | Factory,
        episodes: int,
        *,
        state: Callable[[int], Any] | None = None,
        longest: int = LONGEST_EPISODE,
    ) -> None:
        self.width = max(n for n in range(1, MOST_AT_ONCE + 1) if episodes % n == 0)
        self._environment, self._count, self._state = environment, episodes // self.width, state
        self._longest = longest
        self._acting = Acting()
        self._opened: Environments | None = None
        self._news: list[str] = []
        self._was_cut = False

    def __len__(self) -> int:
        return self._count

    @property
    def frames(self) -> int:
        """How many there are is known when they have been played."""
        return 0

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        """An example as it may be, made without the network."""
        inputs = tree.map_tensors(lambda t: t[0], self._example_observation())
        return inputs, {"score": torch.tensor(0.0), "length": torch.tensor(0.0)}

    def _example_observation(self) -> Any:
        """An observation (1, ...) as the inputs of the network, in memory of its own; a dict or a tuple is one
        argument."""
        environments = self._environments()
        seen = environments.observed.tensors(environments.reset(0)[:1].copy())
        return (seen,) if environments.observed.structured else seen

    def _environments(self) -> Environments:
        if self._opened is None:
            self._opened = open_environments(self._environment, self.width)
        return self._opened

    def act(self, index: Index, step: int) -> tuple[Any, Any]:
        seen = self._example_observation()
        found = [{"score": 0.0, "length": 0.0} if self.network is None else self._played(n) for n in index.tolist()]
        targets = {name: torch.tensor([one[name] for one in found]) for name in found[0]}
        return tree.map_tensors(lambda t: t.expand(len(index), *t.shape[1:]), seen), targets

    def _played(self, number: int) -> dict[str, float]:
        """The mean score and length of the first episodes."""
        environments = self._environments()
        policy = policy_of(environments.action_space)
        assert self.network is not None
        seen = environments.reset(mix(self.seed, number, 0xE9A1) & 0x7FFFFFFF)
        act = self._acting.by(self.network, lambda: (seen, environments.observed))
        width = self.width
        score, length, over = np.zeros(width), np.zeros(width), np.zeros(width, dtype=bool)
        state = () if self._state is None else self._state(width)
        begins = np.ones(width, dtype=bool)
        for _ in range(self._longest):
            self.beat()
            numbers, state = act(seen, state, begins)
            moved = environments.step(policy.for_environment(policy.best(numbers)))
            score += np.where(over, 0.0, moved.rewards)
            length += ~over
            over |= moved.ended | moved.cut
            seen, begins = moved.observations, moved.ended | moved.cut  # those that are over do not matter any more
            if over.all():
                break
        if not over.all():
            self._report_cut(int((~over).sum()), environments.name)
        return {"score": float(score.mean()), "length": float(length.mean())}

    def _report_cut(self, cut: int, name: str) -> None:
        """Report, once, that episodes had no end."""
        if self._was_cut:
            return
        self._was_cut = True
        cause = (
            f"{cut} of {self.width} episodes of {name} in an evaluation had no end after {self._longest:,} steps and "
            "were cut there, so that their scores are those of these steps: wrap the environment in "
            "gymnasium.wrappers.TimeLimit(environment, max_episode_steps=...), or set longest_episode="
        )
        print(f"warning: {cause}", file=sys.stderr, flush=True)  # by then, as the next evaluation may take as long
        self._news.append(cause)

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def record(self, folder: Path) -> Path | None:
        """Play one episode, and keep it as a GIF."""
        if self.network is None:
            return None
        seed = mix(self.seed, 0, 0xE9A1) & 0x7FFFFFFF
        begin = None if self._state is None else self._state
        pictures = filmed(self._environment, self._acting, self.network, seed=seed, state=begin, beat=self.beat)
        return as_gif(pictures, folder / EPISODE) if pictures else None

    def rollout_facts(self) -> Mapping[str, Any]:
        return {}


def judged(outputs: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean of the sums of the rewards of an episode."""
    return targets["score"].double().mean()


def lasted(outputs: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean number of steps of an episode."""
    return targets["length"].double().mean()
