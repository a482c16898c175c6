"""One episode as a film, for people to look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from apportion.parallel.rollouts.acting import Acting
from apportion.parallel.rollouts.environments import Factory, one_that_is_seen
from apportion.parallel.rollouts.policy import policy_of

Array = NDArray[Any]
MOST_STEPS, MOST_PICTURES, WIDTH = 2000, 200, 240
"""An episode is filmed for so many steps at most, in so many pictures, each of so many pixels in width: about a
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
