"""The price of replicas that train on batches of their own and go on from the average of their weights
(``local_sgd``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from apportion.cost_model.cluster import Placement
from apportion.cost_model.collectives import all_reduce
from apportion.cost_model.compute import call_seconds, computed, memory_rate, updating
from apportion.cost_model.cost import Cost, MemoryUse, copies, of_replica
from apportion.cost_model.profile import Profile

STEP_CALLS, ROUND_CALLS, TENSOR_CALLS = 20.0, 45.0, 3.0
"""The overhead of Python, in ``Device.call_seconds``: of a step, of a round, and of a round for each layer and slot and
each contribution. They are chosen so that measured rounds of five networks come out, where a call took 8 us."""


@dataclass(frozen=True)
class AveragingKind:
    """The kind of averaging that a round does."""

    outer: bool = False
    """Is the average the direction of an outer step?"""
    slots: bool = False
    """Does a replica go on with averaged slots too?"""
    overlap: bool = False
    """Does the average travel while the next round is computed?"""
    open: bool = False
    """Does one rank make the averages, of those that have come by a deadline?"""


def cost(profile: Profile, layout: Placement, kind: AveragingKind, *, every: int) -> Cost:
    """The cost of a batch on every replica, with its part of a round of ``every`` batches."""
    n = layout.ranks
    found = computed(profile, layout, [profile.batch_size] * n, between=every)
    in_memory = len(layout.hosts) == 1 and not kind.overlap and not kind.open
    exchange = _by_one_rank if kind.open else _in_memory if in_memory else _by_collectives
    step = found.both + updating(profile, layout)
    between = exchange(profile, layout, kind, every * step) / every if n > 1 else 0.0
    return Cost(
        terms={
            "computing": found.both,
            "updating": updating(profile, layout) + STEP_CALLS * call_seconds(layout),
            "communicating": between,
            "waiting": found.waiting,
            "loading": found.loading,
        },
        memory=_held(profile, layout, kind, in_memory),
        examples=profile.batch_size * n,
    )


def _in_memory(profile: Profile, layout: Placement, kind: AveragingKind, computing: float) -> float:
    """Seconds of a round: each replica writes what it has learnt (its weights are copied, and the average taken off),
    one of them adds up all contributions while the others wait, and each takes the average in turn and copies it."""
    n, weights, slots = layout.ranks, profile.parameter_bytes, profile.parameter_bytes * profile.slots
    written = 5 * weights + 2 * slots
    added = (4 + 3 * n) * weights + (2 + 6 * (n - 1)) * slots + (9 * weights if kind.outer else 0)
    taken = n * 2 * (weights + slots) + 2 * weights + (2 * slots if kind.slots else 0)
    link = layout.cluster.joining(layout.devices)
    return (written + added + taken) / memory_rate(layout) + 2 * link.latency + _python(profile, layout)


def _by_collectives(profile: Profile, layout: Placement, kind: AveragingKind, computing: float) -> float:
    """Seconds of a round in which the weights are summed over all replicas at once, and the slots where replicas go on
    with their mean; beside ``computing`` seconds of the next round where hosts are several and that is asked for."""
    n, weights, slots = layout.ranks, profile.parameter_bytes, profile.parameter_bytes * profile.slots
    sent = all_reduce(layout, range(n), weights + (slots if kind.slots else 0))
    if kind.overlap and len(layout.hosts) > 1:
        sent = max(0.0, sent - computing)
    notes = all_reduce(layout, range(n), 8.0)
    # Copied, less the average, weighed; added to the average, which is copied twice. The slots are copied three times.
    copied = (7 + 3 + 4) * weights + (6 + (2 if kind.slots else 0)) * slots
    copied += (9 * weights if kind.outer else 0) + (4 * weights if kind.overlap else 0)
    return sent + notes + copied / memory_rate(layout) + _python(profile, layout)


def _by_one_rank(profile: Profile, layout: Placement, kind: AveragingKind, computing: float) -> float:
    """Seconds of a round in which one rank takes the contributions of all others, adds them up, and sends each of them
    the average: all over its own link."""
    n, weights, slots = layout.ranks, profile.parameter_bytes, profile.parameter_bytes * profile.slots
    each = weights + (slots if kind.slots else 0)
    link = layout.cluster.joining(layout.devices)
    sent = 2 * (n - 1) * each / link.bandwidth + 2 * link.latency
    copied = 7 * weights + 3 * slots + (4 + 5 * n) * each + (9 * weights if kind.outer else 0)
    return sent + copied / memory_rate(layout) + _python(profile, layout)


def _tensors(profile: Profile) -> int:
    return sum(1 for layer in profile.layers if layer.parameter_bytes) * (1 + profile.slots)


def _python(profile: Profile, layout: Placement) -> float:
    each = TENSOR_CALLS * _tensors(profile) * (2 + layout.ranks)
    return (ROUND_CALLS + each) * call_seconds(layout)


def _held(profile: Profile, layout: Placement, kind: AveragingKind, in_memory: bool) -> dict[str, int]:
    """The memory of a replica, its contribution and the average that it began with; and of two averages that all
    replicas have in common. By collectives each replica has the last average itself, and where that comes late the
    weights that its round began with."""
    own, weights = Counter(of_replica(profile, profile.batch_size)), 2 if kind.outer else 1
    if in_memory:
        own.update(copies(profile, weights=2 * weights, slots=2, buffers=2))
        shared = copies(profile, weights=2 * weights, slots=2, buffers=2)
        return MemoryUse(own=own, shared=shared).a_worker(layout.ranks)
    own.update(copies(profile, weights=2 * weights + 1 + kind.overlap, slots=3, buffers=3))
    if kind.open:  # the rank that averages has two more versions, and what all others have sent
        own.update(copies(profile, weights=2 * weights + layout.ranks, slots=3, buffers=2))
    return MemoryUse(own=own).a_worker(1)
