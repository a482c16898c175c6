"""Gradients of different parameters that were added to each other."""

from __future__ import annotations

from apportion.script_check.comparison.combination import EXACT, combination
from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.comparison.tensors import Array
from apportion.script_check.findings import Finding


def cause(evidence: Evidence) -> Finding | None:
    """Returns the finding that the ranks reduce different lists of gradients; None where each is added to its own."""
    for difference in evidence.found.differences:
        rank, name = difference.rank, difference.name
        given = evidence.gradients[rank].get(name)
        if given is None:
            continue
        most = max(EXACT, evidence.bounds.relative)
        if combination({name: given}, [{name: a} for a in _own_gradients(evidence, name)]).residual < most:
            continue
        for other, other_name, array in _other_gradients(evidence, rank, name, given):
            own = evidence.own_gradients[rank].get(name)
            parts = [{name: array}] if own is None else [{name: own}, {name: array}]
            made = combination({name: given}, parts, evidence.bounds.relative)
            if made.exact and abs(made.factors[-1]) > most:
                first, second = evidence.shown([name, other_name])
                names = dict.fromkeys([name, *evidence.found.names])
                return Finding(
                    "different_lists",
                    "difference",
                    f"The gradient of {first} on rank {rank} was added to that of {second} on rank {other}: the ranks "
                    "reduce different lists of gradients.",
                    "Reduce the gradients of the same parameters in the same order on all ranks, with zeros where a "
                    "rank "
                    "has none.",
                    evidence.shown(list(names)),
                    (rank, other),
                    evidence.found.shown,
                    evidence.found.site,
                )
    return None


def _own_gradients(evidence: Evidence, name: str) -> list[Array]:
    return [own[name] for own in evidence.own_gradients if name in own]


def _other_gradients(evidence: Evidence, rank: int, name: str, like: Array) -> list[tuple[int, str, Array]]:
    return [
        (other, each, array)
        for other, own in enumerate(evidence.own_gradients)
        if other != rank
        for each, array in own.items()
        if each != name and array.shape == like.shape
    ]
