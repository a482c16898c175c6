"""The weights that the ranks begin with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from apportion.script_check.comparison.tensors import Array, shown
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord


def findings(ranks: Sequence[RankRecord], union: RankRecord) -> list[Finding]:
    """Returns that the ranks begin, or after a load go on, with different weights. Networks of which each rank holds a
    part of its own, such as the stages of a pipeline, are not compared: their tensors are not those of one process
    under their names, or are those of others."""
    networks = [record.events_of("network") for record in ranks]
    values = {_value(array) for event in union.events_of("network") for array in event["weights"].values()}
    for events in zip(*networks, union.events_of("network"), strict=False):
        *begun, one = events
        if one["step"] >= len(union.steps) or any(
            event["label"] != one["label"] or _held_in_parts(event, one) for event in begun
        ):
            continue
        for rank, event in enumerate(begun[1:], 1):
            if differs := _differing(event, begun[0], one, values):
                return [_finding(rank, event, differs)]
    return []


def _differing(event: Event, first: Event, one: Event, values: Collection[bytes]) -> list[str]:
    """The trained tensors that are neither those of rank 0 nor those of one process, under any name."""
    return [
        name
        for name, array in event["weights"].items()
        if name in event["trainable"]
        and not np.allclose(array, first["weights"][name], 1e-9, 1e-12, equal_nan=True)
        and not np.allclose(array, one["weights"][name], 1e-9, 1e-12, equal_nan=True)
        and _value(array) not in values
    ]


def _value(array: Array) -> bytes:
    return repr(array.shape).encode() + array.tobytes()


def _finding(rank: int, event: Event, differs: Sequence[str]) -> Finding:
    weights, later = event["weights"], bool(event["step"])
    names = tuple(shown(name, list(weights)) for name in differs)
    verb = f"goes on after step {event['step']}" if later else "begins"
    when = f"before step {event['step'] + 1}" if later else "before the first step"
    remedy = (
        "Load the weights on all ranks, or broadcast those of rank 0 after the load."
        if later
        else "Broadcast the weights of rank 0 before the first step, or seed all ranks alike when the network is made; "
        "DistributedDataParallel broadcasts what it wraps."
    )
    sentence = (
        f"Rank {rank} {verb} with other weights than rank 0: {len(differs)} of {len(weights)} tensors differ {when}, "
        f"{names[0]} first."
    )
    site = str(event["sites"].get(differs[0].rpartition(".")[0]) or event["site"])
    return Finding("different_beginnings", "difference", sentence, remedy, names, (rank,), event["step"] + 1, site)


def _held_in_parts(event: Event, one: Event) -> bool:
    """Whether a rank's network is a part of that of one process."""
    weights, whole = event["weights"], one["weights"]
    return set(weights) != set(whole) or any(weights[name].shape != whole[name].shape for name in weights)
