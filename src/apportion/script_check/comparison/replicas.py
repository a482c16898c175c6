"""Which ranks hold whole replicas of the network, and so ought to read different rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.script_check.comparison.tensors import initial
from apportion.script_check.record import RankRecord


def are_replicas(ranks: Sequence[RankRecord]) -> bool:
    """Returns whether all ranks begin with the same whole network: not so where tensors are placed by tensor
    parallelism, by hand or as DTensors, and for the stages of a pipeline."""
    if len(ranks) < 2:
        return False
    for record in ranks:
        for network in record.events_of("network"):
            if network["placements"] and not network["sharded"]:
                return False
    first, *others = (initial(record) for record in ranks)
    return bool(first) and all(
        set(other) == set(first)
        and all(
            other[name].shape == array.shape and np.array_equal(other[name], array, equal_nan=array.dtype.kind in "fc")
            for name, array in first.items()
        )
        for other in others
    )


def average_gradients(ranks: Sequence[RankRecord]) -> bool:
    """Returns whether a wrapper averages the gradients of all ranks: DistributedDataParallel or fully_shard."""
    return all(any(event["averaged"] or event["sharded"] for event in record.events_of("network")) for record in ranks)


def compute_the_same(one: RankRecord, other: RankRecord) -> bool:
    """Returns whether two ranks compute the same values in all modules for their first step. Later ones may differ by
    accident, as where one rank draws more random numbers than the other."""
    first, second = (
        [(event["inputs"], event["outputs"]) for event in record.events_of("computed") if not event["step"]]
        for record in (one, other)
    )
    return bool(first) and first == second
