"""What an actor-critic's network must return, tried on a few observations when the workload is built."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apportion.core import tree
from apportion.parallel.rollouts.observations import ObservationFormat
from apportion.parallel.rollouts.policy import ActionPolicy, Bernoulli, Categorical, Gaussian
from apportion.parallel.rollouts.spaces import text_of
from apportion.parallel.rollouts.unrolled import Unrolled


class KnownSpaces(NamedTuple):
    """What the network of an environment has to fit."""

    observed: ObservationFormat
    action_space: Any
    policy: ActionPolicy
    observations: Any
    """(n, ...): a few, as the network is given them."""


@torch.no_grad()
def check_network(unrolled: Unrolled, known: KnownSpaces) -> None:
    """Call the network with the observations. Raises ValueError, which names the space, where it cannot be called
    with them, or does not return the numbers of the policy and a value (and a state, where it takes one)."""
    unrolled.eval()
    first = next((p for p in unrolled.network.parameters() if p.is_floating_point()), torch.empty(0))
    observed, given = known.observed, tree.cast(known.observations, first.device, None)
    count = tree.length(given)
    state = None if unrolled.begin is None else tree.cast(unrolled.begin(count), first.device, first.dtype)
    try:
        returned = unrolled(given, state)
    except Exception as error:
        raise ValueError(
            f"the network {_name(unrolled)} cannot be called with observations of {observed.owner}, whose space is "
            f"{text_of(observed.space)}: it was given {_described(given)}{_normalised(unrolled)} and raised "
            f"{type(error).__name__}: {error}; {_remedy(given, observed)}"
        ) from error
    expected = ("policy", "value") if state is None else ("policy", "value", "state")
    if not isinstance(returned, tuple | list) or len(returned) != len(expected):
        raise ValueError(
            f"the network {_name(unrolled)} returns {_described(returned)}: it must return ({', '.join(expected)})"
        )
    _check_policy(unrolled, returned[0], count, known.policy, known.action_space)
    value = returned[1]
    if not isinstance(value, Tensor) or tuple(value.shape) not in ((count,), (count, 1)):
        raise ValueError(
            f"the network {_name(unrolled)} returns {_described(value)} as the value of {count} observations: it must "
            f"be a tensor of shape ({count}, 1) or ({count},)"
        )
    if state is not None and _shapes(returned[2]) != _shapes(state):
        raise ValueError(
            f"the network {_name(unrolled)} returns {_described(returned[2])} as its state, and state= makes "
            f"{_described(state)}: both must have the same tensors"
        )


def _check_policy(unrolled: Unrolled, numbers: Any, count: int, policy: ActionPolicy, action_space: Any) -> None:
    if not isinstance(numbers, Tensor) or numbers.dim() != 2 or len(numbers) != count:
        raise ValueError(
            f"the network {_name(unrolled)} returns {_described(numbers)} as its policy for {count} observations: it "
            f"must be a tensor of shape ({count}, {policy.numbers}) for {text_of(action_space)}"
        )
    if numbers.shape[1] != policy.numbers:
        raise ValueError(
            f"the network gives {numbers.shape[1]} numbers for its policy, and {text_of(action_space)} takes "
            f"{policy.numbers}, {_meaning(policy)}: {_name(unrolled)} must return a policy of shape "
            f"(n, {policy.numbers})"
        )


def _meaning(policy: ActionPolicy) -> str:
    if isinstance(policy, Categorical):
        return "a logit for each action"
    if isinstance(policy, Gaussian):
        return "the means, then the logarithms of the standard deviations"
    if isinstance(policy, Bernoulli):
        return "the logit of 1 for each decision"
    return "the logits of each choice, one after the other"


def _remedy(given: Any, observed: ObservationFormat) -> str:
    if observed.structured:
        kind = "dict" if isinstance(given, dict) else "tuple"
        return f"its forward must take the {kind} as one argument, forward(self, observation)"
    if any(leaf.ends() is not None for leaf in observed.leaves):
        return (
            "its forward must take every number of the space, from the least to the largest: use nn.Embedding, "
            "subtract the space's start where it has one, or convert them (observation.float())"
        )
    if not given.is_floating_point():
        return "its forward must convert them: observation.float()"
    return "its forward must take a tensor of this shape and type"


def _normalised(unrolled: Unrolled) -> str:
    return "" if unrolled.observation_statistics is None else ", normalised,"


def _name(unrolled: Unrolled) -> str:
    module: nn.Module = unrolled.network
    return type(module).__name__


def _shapes(values: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tree.tensors(values)]


def _described(values: Any) -> str:
    """Values in a few words: tensors by their shape and type."""
    if isinstance(values, Tensor):
        return f"a tensor of shape {tuple(values.shape)} and type {str(values.dtype).removeprefix('torch.')}"
    if isinstance(values, dict):
        return "{" + ", ".join(f"{key!r}: {_described(value)}" for key, value in values.items()) + "}"
    if isinstance(values, tuple | list):
        return "(" + ", ".join(map(_described, values)) + ")"
    return f"{type(values).__name__}"
