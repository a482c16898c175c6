"""The network of an actor-critic as the training calls it: on whole rollouts at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from apportion.core import tree
from apportion.parallel.ops.sync_batch_norm import RunningStatistics

MOST_DEVIATIONS = 10.0
"""The standard deviations to which normalised observations are clipped, as in most implementations."""


class Played(NamedTuple):
    """What a rollout gives the network: A actors, T steps, K environments."""

    observations: Any
    """(A, T + 1, K, ...), or a dict or tuple of such: the last ones were not acted on."""
    last: Any
    """(A, F, ...): the observations with which episodes were cut short."""
    last_at: Tensor
    """(A, T, K): the number in ``last`` of the observation that a step led to; -1 where no episode was cut."""
    returns: Tensor
    """(A, T, K): the discounted sum of an episode's rewards so far, after each step."""
    begins: Tensor
    """(A, T + 1, K): True where the observation begins an episode."""
    state: Any
    """The recurrent state with which the rollout began, each tensor (A, K, ...); () where there is none."""


class Judged(NamedTuple):
    """What the network says of a rollout."""

    policies: Tensor
    """(A, T, K, numbers)."""
    values: Tensor
    """(A, T + 1, K)."""
    after: Tensor
    """(A, T, K): the value of the observation that each step led to; where an episode was cut, of its last one."""
    scale: Tensor
    """(1,): what rewards are divided by."""


@final
class Unrolled(nn.Module):
    """An actor-critic, called on rollouts: ``Played`` -> ``Judged``. Called on observations alone, and the recurrent
    state where there is one, it gives what the network does.

    ``network(observations (n, ...)) -> (policy (n, numbers), value (n,) or (n, 1))``; with ``state``, a factory of the
    recurrent state of n environments (dimension 0), ``network(observations, state) -> (policy, value, state)``.
    ``observations``: the number of an observation's numbers where they are normalised; 0: they are not.
    ``rewards``: are rewards divided by the deviation of the returns? ``parts``: of observations that are dicts or
    tuples, whether each tensor is normalised.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        state: Callable[[int], Any] | None = None,
        observations: int = 0,
        rewards: bool = False,
        parts: tuple[bool, ...] = (True,),
    ) -> None:
        super().__init__()
        self._parts = parts
        self.network = network
        self.begin = state
        self.observation_statistics = RunningStatistics(observations) if observations else None
        self.return_statistics = RunningStatistics(1) if rewards else None

    def normalised(self, observations: Any) -> Any:
        """The observations as the network is given them: real numbers in its own type. (n, ...)."""
        known, dtype = self.observation_statistics, self._dtype
        if known is None:
            return tree.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, observations)
        mean, deviation = known.mean, known.deviation
        if isinstance(observations, Tensor):
            return _normalised(observations, mean, deviation, dtype)
        parts, begin = iter(self._parts), 0

        def normalise_leaf(t: Tensor) -> Tensor:
            nonlocal begin
            if not next(parts):
                return t.to(dtype) if t.is_floating_point() else t
            at = slice(begin, begin + t[:1].numel())
            begin = at.stop
            return _normalised(t, mean[at], deviation[at], dtype)

        return tree.map_tensors(normalise_leaf, observations)

    @property
    def _dtype(self) -> torch.dtype:
        found = (p.dtype for p in self.network.parameters() if p.is_floating_point())
        return next(found, torch.get_default_dtype())

    def forward(
        self,
        observations: Any,
        last: Any = None,
        last_at: Tensor | None = None,
        returns: Tensor | None = None,
        begins: Tensor | None = None,
        state: Any = None,
    ) -> Any:
        """``Played``, field by field; or observations (n, ...) alone, and the recurrent state after them."""
        if last_at is None or returns is None or begins is None:
            return self._observed(observations, last)
        found = Played(observations, last, last_at, returns, begins, state)
        judged = self._at_once(found) if self.begin is None else self._step_by_step(found)
        if self.training:  # after they were used: the rollout was played with those that were before it
            self._take_in(found)
        return judged

    def _observed(self, observations: Any, state: Any) -> Any:
        if self.begin is None:
            return self.network(self.normalised(observations))
        count = tree.length(observations)
        return self.network(self.normalised(observations), self.begin(count) if state is None else state)

    def _at_once(self, played: Played) -> Judged:
        """All steps by one call."""
        count, steps, width = played.begins.shape
        cut = iter(tree.tensors(played.last))
        flat = tree.map_tensors(lambda t: torch.cat([t.flatten(0, 2), next(cut).flatten(0, 1)]), played.observations)
        flat = self.normalised(flat)
        policy, value = self.network(flat)
        value, steps_in_all = value.flatten(), count * steps * width
        policies = policy[:steps_in_all].unflatten(0, (count, steps, width))[:, :-1]
        values = value[:steps_in_all].unflatten(0, (count, steps, width))
        after = values[:, 1:]
        if len(value) > steps_in_all:
            found = value[steps_in_all:].unflatten(0, (count, -1))
            there = found.gather(1, played.last_at.clamp_min(0).flatten(1)).view_as(after)
            after = torch.where(played.last_at >= 0, there, after)
        return Judged(policies, values, after, self._scale(values))

    def _step_by_step(self, played: Played) -> Judged:
        """One step after the other, each with the state that the one before it has left."""
        observations, last, last_at = played.observations, played.last, played.last_at
        count, steps, width = played.begins.shape
        any_cut = tree.tensors(last)[0].shape[1] > 0
        state = tree.map_tensors(lambda t: t.flatten(0, 1), played.state)
        policies, values, last_values = [], [], {}
        for t in range(steps):
            state = self.begun_again(state, played.begins[:, t].flatten())
            policy, value, state = self.network(self._at(observations, t), state)
            policies.append(policy.unflatten(0, (count, width)))
            values.append(value.view(count, width))
            if t < steps - 1 and any_cut and (last_at[:, t] >= 0).any():
                last_values[t] = self._last_values(last, last_at[:, t], state)
        found = torch.stack(values, 1)
        led_to = [
            torch.where(last_at[:, t] >= 0, last_values[t].view_as(value), value) if t in last_values else value
            for t, value in enumerate(values[1:])
        ]
        return Judged(torch.stack(policies[:-1], 1), found, torch.stack(led_to, 1), self._scale(found))

    def _at(self, observations: Any, t: int) -> Any:
        """The observations of a step, as the network is given them."""
        return self.normalised(tree.map_tensors(lambda o: o[:, t].flatten(0, 1), observations))

    def begun_again(self, state: Any, begins: Tensor) -> Any:
        """The state with a fresh one in the place of those of episodes that begin. begins: (n,)."""
        if self.begin is None or not begins.any():
            return state
        fresh = tree.tensors(self.begin(len(begins)))
        new = iter(fresh)
        return tree.map_tensors(lambda t: torch.where(begins.view(-1, *[1] * (t.dim() - 1)), next(new).to(t), t), state)

    def _last_values(self, last: Any, at: Tensor, state: Any) -> Tensor:
        """The values of the last observations of episodes that were cut at this step; without meaning for others. at:
        (A, K), -1 for others."""
        actors = torch.arange(len(at), device=at.device)[:, None].expand_as(at)
        seen = tree.map_tensors(lambda t: t[actors, at.clamp_min(0)].flatten(0, 1), last)
        value: Tensor = self.network(self.normalised(seen), state)[1]
        return value

    def _scale(self, like: Tensor) -> Tensor:
        if self.return_statistics is None:
            return like.new_ones(1)
        return self.return_statistics.deviation.to(like.dtype)

    def _numbers(self, observations: Any) -> Tensor:
        """The numbers that are normalised of the observations that were acted on. (n, size)."""
        parts = [t[:, :-1].flatten(0, 2) for t in tree.tensors(observations)]
        rows = [t.reshape(len(t), t[:1].numel()) for t, taken in zip(parts, self._parts, strict=True) if taken]
        return rows[0] if len(rows) == 1 else torch.cat([t.to(torch.float64) for t in rows], 1)

    def _take_in(self, played: Played) -> None:
        if self.observation_statistics is not None:
            self.observation_statistics.accumulate(self._numbers(played.observations))
        if self.return_statistics is not None:
            self.return_statistics.accumulate(played.returns.reshape(-1, 1))


def _normalised(observations: Tensor, mean: Tensor, deviation: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers by their mean and deviation (size,), computed in float64 whatever they are, and given in this type."""
    centred = observations.reshape(len(observations), len(mean)).to(torch.float64) - mean
    found = (centred / deviation).clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS)
    return found.to(dtype).view_as(observations)
