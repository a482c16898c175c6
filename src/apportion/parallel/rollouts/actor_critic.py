"""The workload of an actor-critic: environments in the place of a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from apportion.core.rng import seeded_rng
from apportion.core.workload import Evaluation, Parameters, Workload
from apportion.parallel.rollouts.environments import Factory, open_environments
from apportion.parallel.rollouts.episodes import LONGEST_EPISODE, Episodes, judged, lasted
from apportion.parallel.rollouts.loss import ActorCriticLoss, terms
from apportion.parallel.rollouts.network_check import KnownSpaces, check_network
from apportion.parallel.rollouts.observations import ObservationFormat
from apportion.parallel.rollouts.policy import policy_of
from apportion.parallel.rollouts.rollouts import Rollouts
from apportion.parallel.rollouts.spaces import text_of
from apportion.parallel.rollouts.unrolled import Unrolled


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
    with the network as it is; a batch is one rollout of each of ``actors`` actors. ``data_parallel`` deals the actors
    to its workers (A2C); each worker of ``parameter_server`` and ``hogwild`` has actors of its own (A3C).

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
    """The evaluation by whole episodes, every so many steps, of which ``at_once`` workers each play some."""
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
