"""Gradients that each rank clips element by element, or tensor by tensor, before they are averaged.

Clipping by the norm of all gradients, which scales each rank's by one factor, is in ``weighting.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from apportion.script_check.comparison.combination import Combination, combination
from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.comparison.tensors import Array
from apportion.script_check.findings import Finding

_REMEDY = "Clip after the gradients are averaged over the ranks, so that all ranks clip the same gradients."
_ATTAINED = 3
"""The elements that lie at a limit where it is one: fewer may be so by chance, as a loss of signs gives equal ones."""


def cause(evidence: Evidence) -> Finding | None:
    """Returns the finding that clipping comes before the average; None where it does not explain the gradients."""
    if not evidence.ranks_agree or not all(evidence.own_gradients):
        return None
    given = evidence.weights_of_ranks
    if given.exact:
        limit = _attained(evidence) if given.alike else None  # a hook clips as backward runs, before it is recorded
        return None if limit is None else _by_value(evidence, limit)
    for limit in _limits(evidence):
        clipped = [{name: np.clip(a, -limit, limit) for name, a in own.items()} for own in evidence.own_gradients]
        made = combination(_recorded(evidence, evidence.gradients[0]), clipped)
        if made.exact and made.alike:
            return _by_value(evidence, limit)
    return _by_tensor(evidence)


def _limits(evidence: Evidence) -> Iterator[float]:
    """The values by which elements may have been clipped: those of the calls, and the largest of one process."""
    for event in evidence.window(evidence.ranks[0], "clip"):
        if event["function"] == "clip_grad_value_":
            yield event["limit"]
    if evidence.reference:
        yield max(float(np.abs(array).max(initial=0.0)) for array in evidence.reference.values())


def _attained(evidence: Evidence) -> float | None:
    """The value that the largest elements of each rank's own gradients and of one process's all have."""
    largest = [_largest(arrays) for arrays in (*evidence.own_gradients, evidence.reference)]
    limit = largest[0][0]
    alike = all(count >= _ATTAINED and abs(value - limit) <= 1e-12 * limit for value, count in largest)
    return limit if alike and not evidence.weights_in_reference.exact else None


def _largest(arrays: Mapping[str, Array]) -> tuple[float, int]:
    """The largest absolute value of all elements, and the number of those that have it."""
    flat = np.abs(np.concatenate([array.ravel() for array in arrays.values()] or [np.zeros(1)]))
    value = float(flat.max(initial=0.0))
    return value, int((flat >= value * (1 - 1e-12)).sum()) if value else 0


def _recorded(evidence: Evidence, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of which each rank's own gradient is known."""
    return {
        n: a for n, a in arrays.items() if all(n in own and own[n].shape == a.shape for own in evidence.own_gradients)
    }


def _by_value(evidence: Evidence, limit: float) -> Finding:
    return _finding(
        evidence,
        f"The elements of each rank's own gradients were clipped to at most {limit:.6g} before they were averaged; one "
        "process clips those of all rows: clipping comes before the average.",
    )


def _by_tensor(evidence: Evidence) -> Finding | None:
    """Each tensor of each rank is scaled by a factor of its own, where one process weights the ranks alike."""
    apart = dict[str, Combination]()
    for name, array in _recorded(evidence, evidence.gradients[0]).items():
        parts = [{name: own[name]} for own in evidence.own_gradients]
        given = combination({name: array}, parts)
        wanted = combination({name: evidence.reference[name]}, parts) if name in evidence.reference else given
        if not (given.determined and wanted.determined):
            continue  # one element, say, is a sum of the ranks' in many ways
        if not (given.exact and wanted.exact and wanted.alike):
            return None
        if max(given.factors) * evidence.count > 1 + 1e-7:  # no clipping enlarges
            return None
        if not given.alike:
            apart[name] = given
    if not apart:
        return None
    first, made = next(iter(apart.items()))
    times = [factor * evidence.count for factor in made.factors]
    scaled = ", ".join(f"{factor:.6g} on rank {rank}" for rank, factor in enumerate(times))
    return _finding(
        evidence,
        f"Each tensor of each rank's own gradients was scaled by its own norm before the average, such as "
        f"{evidence.shown([first])[0]} by {scaled}: clipping comes before the average.",
    )


def _finding(evidence: Evidence, sentence: str) -> Finding:
    found = evidence.found
    clips = evidence.window(evidence.ranks[0], "clip")
    site = clips[0]["site"] if clips else found.site
    return Finding(
        "clipped_before_average", "difference", sentence, _REMEDY, evidence.shown(found.names), (), found.shown, site
    )
