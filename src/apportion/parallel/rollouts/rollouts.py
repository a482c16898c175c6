"""Rollouts as a data set: example i is what actor i has seen and done next. ``check_finite`` refuses rollouts with
rewards or observations from which nothing can be learnt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.order import Index
from apportion.parallel.rollouts.acting import Acting
from apportion.parallel.rollouts.actor import Act, Actor, Rollout
from apportion.parallel.rollouts.environments import Factory, open_environments
from apportion.parallel.rollouts.observations import ObservationFormat
from apportion.parallel.rollouts.policy import policy_of
from apportion.parallel.rollouts.unrolled import Played, Unrolled

Array = NDArray[Any]
_TARGETS = "actions", "rewards", "ended", "cut", "counts"


@final
class Rollouts(ActedDataset):
    """``actors`` actors, each of which plays ``environments`` environments for ``steps`` steps an example.

    ``gamma``: the discount of the returns that are kept, 0 where they are not; ``state``: the factory of a recurrent
    state.
    """

    def __init__(
        self,
        environment: str | Factory,
        *,
        actors: int,
        environments: int,
        steps: int,
        gamma: float = 0.0,
        state: Callable[[int], Any] | None = None,
    ) -> None:
        self._environment, self._many, self._gamma, self._state = environment, actors, gamma, state
        self.environments, self.steps = environments, steps
        self._actors: dict[tuple[int, int], Actor] = {}
        self._made: dict[tuple[int, int], tuple[int, Rollout]] = {}
        self._acting = Acting()
        self._tally = _Tally()
        self._example: Rollout | None = None

    def __len__(self) -> int:
        return self._many

    @property
    def frames(self) -> int:
        """The steps of environments in an example."""
        return self.environments * self.steps

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        """An example as it may be, made without the network."""
        inputs, targets = self._sample(1)
        return tree.map_tensors(lambda t: t[0], inputs), tree.map_tensors(lambda t: t[0], targets)

    def _actor(self, number: int) -> Actor:
        key = self.worker, number
        if key not in self._actors:
            self._actors[key] = self._new_actor(self.worker * self._many + number, self.environments)
        return self._actors[key]

    def _new_actor(self, key: int, width: int) -> Actor:
        environments = open_environments(self._environment, width)
        policy = policy_of(environments.action_space)
        state = () if self._state is None else self._state(width)
        return Actor(environments, policy, seed=self.seed, key=key, gamma=self._gamma, state=state)

    def _sample(self, count: int) -> tuple[Any, Any]:
        """Examples that one environment has made: some take seconds to open all of theirs."""
        if self._example is None:
            actor = self._new_actor(0, 1)
            try:
                numbers = actor.policy.numbers

                def nothing(observations: Any, state: Any, begins: Any) -> tuple[Any, Any]:
                    return np.zeros((len(observations), numbers), dtype=np.float32), state

                self._example = actor.play(nothing, self.steps, 0)
            finally:
                actor.close()
        example = _widened(self._example, self.environments)
        return _inputs([example] * count), _targets([example] * count)

    def shaped(self, environments: int, steps: int) -> tuple[Any, Any]:
        """Return the inputs and targets of one example of other sizes, as it may be: what one environment has done is
        repeated, and nothing is played for it."""
        self._sample(1)
        assert self._example is not None
        example = _widened(_lengthened(self._example, steps), environments)
        return _inputs([example]), _targets([example])

    def resized(self, environments: int, *, steps: int | None = None, actors: int = 1) -> Rollouts:
        """Return rollouts of other sizes, of environments of their own, played by the same network. steps=None: as many
        as here."""
        sizes = {"actors": actors, "environments": environments, "steps": self.steps if steps is None else steps}
        found = Rollouts(self._environment, **sizes, gamma=self._gamma, state=self._state)
        found.network, found.seed, found.worker = self.network, self.seed, self.worker
        self._sample(1)
        assert self._example is not None
        found._example = _lengthened(self._example, found.steps)  # else it opens one environment more
        return found

    def close(self) -> None:
        """Close all environments; playing again opens new ones."""
        actors, self._actors, self._made = self._actors, {}, {}
        for actor in actors.values():
            actor.close()

    def act(self, index: Index, step: int) -> tuple[Any, Any]:
        if self.network is None:  # of the right shape, and nothing that the actors have done
            return self._sample(len(index))
        act = self._acting.by(self.network, self._seen)
        played = []
        for number in index.tolist():
            key = self.worker, number
            if self._made.get(key, (-1, None))[0] != step:
                actor = self._actor(number)
                rollout = actor.play(act, self.steps, step)
                check_finite(rollout, actor.name, self.network, act)
                self._made[key] = step, rollout
                self._tally.add(rollout)
            played.append(self._made[key][1])
        return _inputs(played), _targets(played)

    def _seen(self) -> tuple[Array, ObservationFormat]:
        """Observations (environments, ...) as there may be, and how they are tensors."""
        self._sample(1)
        assert self._example is not None
        return self._example.observations[0].repeat(self.environments, axis=0), self._example.observed

    def rollout_facts(self) -> Mapping[str, Any]:
        return self._tally.flush()


class _Tally:
    """What is to be reported of the rollouts since it was last asked."""

    def __init__(self) -> None:
        self._frames, self._since = 0, time.perf_counter()
        self._reset()

    def _reset(self) -> None:
        self._new, self._rollouts, self._acting, self._moving = 0, 0, 0.0, 0.0
        self._scores: list[float] = []
        self._lengths: list[int] = []

    def add(self, rollout: Rollout) -> None:
        self._new += int(rollout.counts.sum())
        self._rollouts += 1
        self._acting += rollout.acting
        self._moving += rollout.moving
        self._scores += rollout.scores
        self._lengths += rollout.lengths

    def flush(self) -> dict[str, Any]:
        now = time.perf_counter()
        self._frames += self._new
        facts = {
            "frames": self._frames,
            "frames_per_second": self._new / max(now - self._since, 1e-9),
            "environment": self._moving / max(1, self._rollouts),
            "acting": self._acting / max(1, self._rollouts),
            "episodes": len(self._scores),
            "score": float(np.mean(self._scores)) if self._scores else None,
            "length": float(np.mean(self._lengths)) if self._lengths else None,
        }
        self._since = now
        self._reset()
        return facts


def _widened(rollout: Rollout, width: int) -> Rollout:
    """The rollout of one environment, as if ``width`` of them had done the same."""
    names = "observations", *_TARGETS, "last_at", "returns", "begins"
    found: dict[str, Any] = {name: np.repeat(getattr(rollout, name), width, axis=1) for name in names}
    state = tree.map_tensors(lambda t: t.repeat_interleave(width, dim=0), rollout.state)
    return replace(rollout, **found, state=state)


def _lengthened(rollout: Rollout, steps: int) -> Rollout:
    """The rollout with ``steps`` steps, in which what was done is done again from the beginning."""
    found: dict[str, Any] = {}
    for name in (*_TARGETS, "last_at", "returns", "observations", "begins"):
        array = getattr(rollout, name)
        length = steps + len(array) - len(rollout.rewards)  # of observations there is one more
        found[name] = array[np.arange(length) % len(array)]
    return replace(rollout, **found)


def _inputs(played: list[Rollout]) -> Played:
    most = max(len(rollout.last) for rollout in played)
    last = np.empty((len(played), most, *played[0].observations.shape[2:]), dtype=played[0].observations.dtype)
    for at, rollout in enumerate(played):
        last[at, : len(rollout.last)] = rollout.last
        # The network is called with the others too: zeros might be no element of the observation space.
        last[at, len(rollout.last) :] = rollout.observations[0, 0]
    states = [tree.tensors(rollout.state) for rollout in played]
    stacked = iter([torch.stack(tensors) for tensors in zip(*states, strict=True)])
    return Played(
        observations=played[0].observed.tensors(_arrays(played, "observations")),
        last=played[0].observed.tensors(last),
        last_at=_stacked(played, "last_at"),
        returns=_stacked(played, "returns"),
        begins=_stacked(played, "begins"),
        state=tree.map_tensors(lambda _: next(stacked), played[0].state),
    )


def _targets(played: list[Rollout]) -> dict[str, torch.Tensor]:
    found = {name: _stacked(played, name) for name in _TARGETS}
    found["rewards"] = found["rewards"].float()
    return found


def _stacked(played: list[Rollout], name: str) -> torch.Tensor:
    return torch.from_numpy(_arrays(played, name))


def _arrays(played: list[Rollout], name: str) -> Array:
    arrays = [getattr(rollout, name) for rollout in played]
    found: Array = arrays[0][None] if len(arrays) == 1 else np.stack(arrays)
    return found


# Numbers of an environment that nothing can be learnt from: a reward, or an observation, that is nan or infinite.


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
