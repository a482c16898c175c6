"""The aggregation of several members' outputs: their mean, a weighted mean, or a vote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Aggregation = Literal["mean", "weighted_mean", "vote"]
Array = NDArray[Any]


def check_aggregation(how: str, weights: Sequence[float] | None, members: int) -> None:
    """Raise ValueError where this number of members cannot be aggregated in this way with these weights."""
    if how not in get_args(Aggregation):
        raise ValueError(f"aggregation={how!r} must be one of {', '.join(get_args(Aggregation))}")
    if (weights is not None) != (how == "weighted_mean"):
        raise ValueError(f"aggregation={how!r} with weights={weights}: weighted_mean needs them, the others take none")
    if weights is not None and (len(weights) != members or not all(0.0 < w < float("inf") for w in weights)):
        raise ValueError(f"weights={list(weights)} must be {members} positive numbers: one for each member")


def check_outputs(how: str, kinds: Sequence[str]) -> None:
    """Raise ValueError where the outputs have no mean but the aggregation takes one. ``kinds``: numpy's kinds of the
    outputs' dtypes."""
    if how != "vote" and (wrong := [kind for kind in kinds if kind not in "f"]):
        raise ValueError(
            f"aggregation={how!r}: outputs of kind {wrong[0]!r} have no mean, such as labels: use aggregation='vote', "
            "on the command line --serving \"serving(aggregation='vote')\""
        )


def combined(how: Aggregation, outputs: Sequence[Array], weights: Sequence[float] | None = None) -> Array:
    """Combine one output of each of the members that have answered, all of the same shape and type.

    mean, weighted_mean: computed over these members, in their type, summed in float64 in their order. ``weights`` are
    those of these members. vote: for scores, [..., classes], the share of the members whose largest score each class
    has (the first of equal ones); for anything else, the value that most members give at each place, the smallest of
    those that equally many give.
    """
    if len(outputs) == 1 and how != "vote":
        return outputs[0]
    if how == "vote":
        return _vote(outputs)
    share = np.ones(len(outputs)) if weights is None else np.asarray(weights, dtype=np.float64)
    share = share / share.sum()
    total = np.multiply(outputs[0], share[0], dtype=np.float64)
    for output, part in zip(outputs[1:], share[1:], strict=True):
        total += np.multiply(output, part, dtype=np.float64)
    return np.asarray(total.astype(outputs[0].dtype))


def _vote(outputs: Sequence[Array]) -> Array:
    first = outputs[0]
    if first.dtype.kind == "f" and first.ndim > 0:
        votes = np.zeros_like(first)
        for output in outputs:
            chosen = output.argmax(-1)[..., None]
            np.put_along_axis(votes, chosen, np.take_along_axis(votes, chosen, -1) + 1, -1)
        return np.asarray(votes / np.asarray(len(outputs), dtype=first.dtype))
    stacked = np.stack(outputs)
    agreeing = np.stack([(stacked == output).sum(0) for output in outputs])
    best = agreeing == agreeing.max(0)
    values = np.where(best, stacked, np.broadcast_to(stacked.max(0), stacked.shape))
    return np.asarray(values.min(0))
