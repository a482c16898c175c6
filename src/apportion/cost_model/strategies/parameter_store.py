"""The price of pushing a gradient into a store that lies in the memory of a host, and of pulling weights from it
(``parallel/parameter_store/push.py``); or into one on servers that other hosts reach over a cable
(``parallel/parameter_store/network/``)."""

from __future__ import annotations

from dataclasses import dataclass

from apportion.cost_model.cluster import Placement
from apportion.cost_model.compute import call_seconds, memory_rate
from apportion.cost_model.profile import Profile

SHARD_BYTES, RUN_BYTES, LEAST_SHARDS, LEAST_SHARD_BYTES = 512 << 10, 1 << 20, 8, 4 << 10
"""The bytes of a shard, the bytes that are updated in one go, and the least number and least bytes of a store's shards,
as ``parallel/parameter_store/memory/shard_layout.py`` cuts them."""
STEP_CALLS, RUN_CALLS, SHARD_CALLS, LAYER_CALLS = 130.0, 12.0, 1.0, 1.0
"""The overhead of Python, in ``Device.call_seconds``: of a batch that is dealt, written down and pushed; of shards that
are updated in one go, of each shard's lock and version, and of each layer whose gradient is gathered. They are chosen
so that measured steps of five networks come out, where a call took 8 us."""


@dataclass(frozen=True)
class PushPrice:
    """The seconds of what becomes of one batch's gradient."""

    gather: float
    """The seconds of gathering the gradient from the layers into the worker's place in memory."""
    push: float
    """The seconds of a push into the shards; without locks it pulls nothing."""
    pull: float
    """The seconds of a pull by itself: a push brings the new weights along."""
    shards: int


def push(profile: Profile, layout: Placement, *, part: float = 1.0, locks: bool = True) -> PushPrice:
    """The price of a push of ``part`` of the network. Under a lock the new weights and slots are drafted, which the
    worker has pulled with that, and copied into their place."""
    weights, slots = profile.parameter_bytes * part, profile.parameter_bytes * part * profile.slots
    rate, call = memory_rate(layout), call_seconds(layout)
    shards = max(min(LEAST_SHARDS, int(weights // LEAST_SHARD_BYTES)), int(weights // SHARD_BYTES), 1)
    runs = max(int(weights // RUN_BYTES), layout.ranks) if locks else 1
    moved = 5 * weights + 3 * slots if locks else 5 * weights + 2 * slots
    python = (STEP_CALLS + RUN_CALLS * runs + SHARD_CALLS * shards) * call
    gathered = 2 * weights / rate + LAYER_CALLS * len(profile.layers) * part * call
    return PushPrice(gathered, moved / rate + python, 2 * weights / rate + SHARD_CALLS * shards * call, shards)


@dataclass(frozen=True)
class CablePrice:
    """The seconds of what a push and the pull that follows it send between hosts."""

    alone: float
    """The seconds of one worker's, where no other pushes: the gradient goes to the servers, and then the weights come
    back, each after a question and an answer."""
    busy: float
    """The seconds for which the fullest cable is taken up each way by a push of every worker: what a store that is a
    queue can do."""


def across_hosts(profile: Profile, layout: Placement, *, workers: int, servers: int, copies: int) -> CablePrice:
    """The price of the cables, where this many ranks have the shards for the others. With copies a server sends each
    gradient on, beside the weights that it answers with."""
    link = layout.cluster.joining(layout.devices)
    whole = profile.parameter_bytes / link.bandwidth
    cables = min(servers, len(layout.hosts))
    trips = 2 + 2 * copies  # the gradient, the order to apply it, and the report of each to the copy
    return CablePrice(2 * whole + trips * 2 * link.latency, workers * whole * (1 + copies) / cables)
