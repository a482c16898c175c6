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
    """Raise ValueError for a rollout with a reward that is not finite in float32, or an observation that is not, and
    from which the network makes numbers that are not finite. ``name``: what the environment is called."""
    if not (finite := _finite(rollout.rewards)).all():
        t, k = np.argwhere(~finite)[0]
        raise ValueError(
            f"{name}.step() returned a reward of {rollout.rewards[t, k]} (environment {k}, step {t} of a rollout): a "
            "reward must be finite in float32, or the loss is not"
        )
    for part in _parts(rollout.observations):
        if part.dtype.kind == "f" and not (finite := _finite(part)).all():
            at = tuple(np.argwhere(~finite)[0])
            _check_taken(rollout, name, at[:2], rollout.observations[at[0]], part[at], network, act)
    for part in _parts(rollout.last):
        if part.dtype.kind == "f" and not (finite := _finite(part)).all():
            at = tuple(np.argwhere(~finite)[0])
            t, k = np.argwhere(rollout.last_at == at[0])[0]
            observations = rollout.observations[t].copy()
            observations[k] = rollout.last[at[0]]
            _check_taken(rollout, name, (t, k), observations, part[at], network, act)


def _finite(values: Array) -> Array:
    """True where a value is finite in the type in which the loss is computed at least."""
    with np.errstate(over="ignore"):
        return np.isfinite(values.astype(np.float32, copy=False))


def _parts(observations: Array) -> list[Array]:
    names = observations.dtype.names
    return [observations] if names is None else [observations[name] for name in names]


def _check_taken(  # noqa: PLR0913 (the place, the value and the way to try it)
    rollout: Rollout, name: str, at: tuple[Any, ...], observations: Array, value: Any, network: nn.Module, act: Act
) -> None:
    """Raise ValueError where the network does not give finite numbers of these observations (K, ...), of which one has
    this value. Running statistics have no mean of such."""
    t, k = at
    if not (isinstance(network, Unrolled) and network.observation_statistics is not None):
        numbers, _ = act(observations, rollout.state, rollout.begins[t])
        if np.isfinite(numbers).all():
            return
    raise ValueError(
        f"{name} returned an observation with {value} (environment {k}, step {t} of a rollout), from which the "
        "network makes numbers that are not finite: have the environment bound its observations, or the "
        "network replace such numbers (torch.nan_to_num)"
    )
