"""The workload of an actor-critic: environments in the place of a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from apportion.core import tree
from apportion.core.rng import seeded_rng
from apportion.core.workload import Evaluation, Parameters, Workload
from apportion.parallel.rollouts.environments import Factory, open_environments
from apportion.parallel.rollouts.episodes import LONGEST_EPISODE, Episodes, judged, lasted
from apportion.parallel.rollouts.loss import ActorCriticLoss, terms
from apportion.parallel.rollouts.observations import ObservationFormat
from apportion.parallel.rollouts.policy import ActionPolicy, Bernoulli, Categorical, Gaussian, policy_of
from apportion.parallel.rollouts.rollouts import Rollouts
from apportion.parallel.rollouts.spaces import text_of
from apportion.parallel.rollouts.unrolled import Unrolled

# What an actor-critic's network must return, tried on a few observations when the workload is built.


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
    normalise_observations: bool = False,
    normalise_rewards: bool = False,
    normalise_advantages: bool = False,
    state: Callable[[int], Any] | None = None,
    anneal: bool = True,
    episodes: int = 20,
    evaluate_every: int | None = None,
    longest_episode: int = LONGEST_EPISODE,
    seed: int = 0,
    **more: Any,
) -> Workload:
    """A workload that trains a policy and its value on what they do themselves.

    An example is a rollout: ``steps`` steps (the papers' t_max) of ``environments`` environments that an actor plays
    with the network as it is; a batch is one rollout of each of ``actors`` actors. ``data_parallel`` divides the actors
    among its workers (A2C); each worker of ``parameter_server`` and ``hogwild`` has actors of its own (A3C).

    ``environment``: the id of one of gymnasium's, with ``package:`` before it where a package registers it; or a
    function that makes one environment, or one that is given their number and makes a vector of them. ``model()`` is
    called with observations (n, ...) of their space's type, those of a Dict or a Tuple as one dict or tuple, and
    returns the policy (n, numbers) and the value (n, 1) or (n,); what the numbers are is in ``policy.py``. It is made
    and called once here, to see that. ``frames``: the steps of environments in the whole training, over all workers;
    ``anneal`` takes the learning rate to 0 over them. ``gae``: the lambda of generalised advantage estimation, of which
    1 is the n-step return of A3C. ``value`` and ``entropy`` weigh the value's error and the entropy in the loss.
    ``normalise_observations`` and ``normalise_rewards`` use running statistics that all workers share. ``state``: the
    factory of a recurrent state for n environments (dimension 0, float tensors): the model is then called with
    observations and state, and returns policy, value, and state. ``episodes``: how many the evaluation plays, each with
    the most probable actions, every ``evaluate_every`` frames; after ``longest_episode`` steps an episode of it is cut,
    which is reported. ``more``: fields of ``Workload``.

    Raises ValueError for settings out of range, for spaces of observations or actions that are not supported, for an
    environment that breaks gymnasium's contract, and for a network that does not fit its spaces. Mnih et al.,
    "Asynchronous Methods for Deep Reinforcement Learning", ICML 2016.
    """
    _check_counts(frames=frames, actors=actors, environments=environments, steps=steps)
    _check_counts(episodes=episodes, longest_episode=longest_episode)
    _check_interval(evaluate_every)
    _check_shares(gamma=gamma, gae=gae)
    _check_model(model, compiled=bool(more.get("compile")))
    known = _looked_at(environment)
    parts, numbers = _normalised_parts(known.observed) if normalise_observations else ((), 0)
    a_step = actors * environments * steps

    def make() -> Unrolled:
        return Unrolled(model(), state=state, observations=numbers, rewards=normalise_rewards, parts=parts)

    def rollouts() -> Any:
        sizes = {"actors": actors, "environments": environments, "steps": steps}
        return Rollouts(environment, **sizes, gamma=gamma if normalise_rewards else 0.0, state=state)

    def whole_episodes() -> Episodes:
        return Episodes(environment, episodes, state=state, longest=longest_episode)

    workload = Workload(
        model=make,
        data=rollouts,
        optimizer=optimizer,
        batch_size=actors,
        order="sequential",
        loss=ActorCriticLoss(known.policy, gamma, gae, value, entropy, normalise_advantages),
        count=terms,
        steps=max(1, frames // a_step),
        evaluation=_evaluation(whole_episodes, None if evaluate_every is None else evaluate_every // a_step, actors),
        schedule=_annealed if anneal else None,
        seed=seed,
        **more,
    )
    with seeded_rng(seed):
        check_network(make(), known)
    return workload


def _looked_at(environment: str | Factory) -> KnownSpaces:
    """The spaces of an environment, and a few observations of it."""
    one = open_environments(environment, 1)
    try:
        with seeded_rng(0):
            trial = one.observed.tensors(one.observed.trials(one.reset(0)))
        return KnownSpaces(one.observed, one.action_space, policy_of(one.action_space), trial)
    finally:
        one.close()


def _normalised_parts(observed: ObservationFormat) -> tuple[tuple[bool, ...], int]:
    """Which parts of observations are normalised, and how many numbers they have."""
    parts = tuple(leaf.numeric for leaf in observed.leaves)
    if not any(parts):
        raise ValueError(
            f"normalise_observations=True has no mean to take of {text_of(observed.space)}, whose numbers stand for "
            "categories: leave it out"
        )
    return parts, sum(leaf.size for leaf in observed.leaves if leaf.numeric)


def _evaluation(data: Callable[[], Any], every: int | None, at_once: int) -> Evaluation:
    """The evaluation by whole episodes, every ``every`` steps; ``at_once`` workers each play some of the episodes."""
    metrics = {"score": judged, "length": lasted}
    every = None if every is None else max(1, int(every))
    return Evaluation(data=data, metrics=metrics, every=every, best="max score", batch_size=at_once)


def _annealed(optimizer: Optimizer, total: int) -> LRScheduler:
    """The learning rate falls in a straight line to 0 with the frames."""
    return LambdaLR(optimizer, lambda done: 1.0 - done / total)


def _check_interval(evaluate_every: object) -> None:
    if evaluate_every is not None and not (isinstance(evaluate_every, int | float) and evaluate_every >= 1):
        raise ValueError(f"evaluate_every={evaluate_every!r} must be a number of frames of at least 1, or None")


def _check_shares(**settings: float) -> None:
    for name, share in settings.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name}={share} must be from 0 to 1: it weighs what comes later")


def _check_model(model: object, *, compiled: bool) -> None:
    if compiled:
        raise ValueError("compile=True compiles one shape of a call, and a network that acts is called with others")
    if isinstance(model, nn.Module) or not callable(model):
        text = " ".join(repr(model).split())
        text = text if len(text) <= 80 else f"{text[:80]}..."
        raise ValueError(f"model={text} must be a function that makes the network: a class, or lambda: Net(...)")


def _check_counts(**settings: int) -> None:
    for name, count in settings.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r} must be a whole number of at least 1")
