"""The weights that the ranks begin with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.script_check.comparison.tensors import Array, initial, matching, shown
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord


def findings(ranks: Sequence[RankRecord], union: RankRecord | None = None) -> list[Finding]:
    """Returns that the ranks begin with different weights. Networks of which each rank holds a part of its own, such as
    the stages of a pipeline, are not compared: their tensors are not those of one process under their names."""
    begun = [initial(record) for record in ranks]
    if union is None or any(_held_in_parts(each, initial(union)) for each in begun):
        return []
    reference = initial(union)
    placed = matching(ranks, union)
    trained = {name for record in ranks for event in record.of("network") for name in event["trainable"]}
    for rank, weights in enumerate(begun[1:], 1):
        differs = [
            name
            for name, array in weights.items()
            if name in begun[0]
            and name in trained
            and placed[rank].get(name, name) == name
            and not np.array_equal(array, begun[0][name], equal_nan=True)
            and not np.array_equal(array, reference[name], equal_nan=True)
        ]
        if differs:
            names = tuple(shown(name, list(weights)) for name in differs)
            return [
                Finding(
                    "different_beginnings",
                    "difference",
                    f"Rank {rank} begins with other weights than rank 0: {len(differs)} of {len(weights)} tensors "
                    f"differ "
                    f"before the first step, {names[0]} first.",
                    "Broadcast the weights of rank 0 before the first step, or seed all ranks alike when the "
                    "network is "
                    "made; DistributedDataParallel broadcasts what it wraps.",
                    names,
                    (rank,),
                    1,
                    _site(ranks[rank], differs[0]),
                )
            ]
    return []


def _held_in_parts(weights: dict[str, Array], reference: dict[str, Array]) -> bool:
    """Whether a rank's network is a part of that of one process."""
    return set(weights) != set(reference) or any(weights[name].shape != reference[name].shape for name in weights)


def _site(record: RankRecord, name: str) -> str:
    module = name.rpartition(".")[0]
    return next((str(e["sites"][module]) for e in record.of("network") if e["sites"].get(module)), "")
