"""Numbers of an environment that nothing can be learnt from: a reward, or an observation, that is nan or infinite."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from apportion.parallel.rollouts.actor import Act, Rollout
from apportion.parallel.rollouts.unrolled import Unrolled

Array = NDArray[Any]


def check_finite(rollout: Rollout, name: str, network: nn.Module, act: Act) -> None:
    """Raise ValueError for a rollout with a reward that is not finite, or an observation that is not and from which the
    network makes numbers that are not. ``name``: what the environment is called."""
    if not np.isfinite(rollout.rewards).all():
        t, k = np.argwhere(~np.isfinite(rollout.rewards))[0]
        raise ValueError(
            f"{name}.step() returned a reward of {rollout.rewards[t, k]} (environment {k}, step {t} of a rollout): a "
            "reward must be finite, or the loss is not"
        )
    for part in _parts(rollout.observations):
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            t, k = np.argwhere(~np.isfinite(part))[0][:2]
            if _is_taken(rollout, int(t), network, act):
                continue
            value = part[t, k][~np.isfinite(part[t, k])][0] if part.ndim > 2 else part[t, k]
            raise ValueError(
                f"{name} returned an observation with {value} (environment {k}, step {t} of a rollout), from which the "
                "network makes numbers that are not finite: have the environment bound its observations, or the "
                "network replace such numbers (torch.nan_to_num)"
            )


def _parts(observations: Array) -> list[Array]:
    names = observations.dtype.names
    return [observations] if names is None else [observations[name] for name in names]


def _is_taken(rollout: Rollout, t: int, network: nn.Module, act: Act) -> bool:
    """Does the network give finite numbers of the observations of this step? Running statistics have no mean of
    them."""
    if isinstance(network, Unrolled) and network.observation_statistics is not None:
        return False
    numbers, _ = act(rollout.observations[t], rollout.state, rollout.begins[t])
    return bool(np.isfinite(numbers).all())
