"""Every member in a process of its own: one that is slow or dies does not hold up or end the others.

::

    request --+--> queue m1 --> process m1 --+
              +--> queue m2 --> process m2 --+--> what is there by the deadline
              +--> queue m3 --> process m3 --+
                                spare process: every net loaded, takes a dead member's place

It wins where an answer by the deadline matters, and where members are large enough for several cores. It loses on
members so small that a message to each is what takes the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from apportion.serving.config import Serving
from apportion.serving.pool.circuit_breaker import Breaker
from apportion.serving.pool.dynamic_batcher import DynamicBatcher
from apportion.serving.pool.member import Member
from apportion.serving.pool.pool import Log, MemberPool
from apportion.serving.pool.shared_arena import Arena
from apportion.serving.runtimes.source import Source


def create_members(
    sources: Sequence[Source], serving: Serving, inbox: Arena, log: Log, *, timing_seconds: float
) -> tuple[list[Member], MemberPool]:
    """Return a member for each source, and the pool that gives out their processes; none is started."""
    members = [
        Member(
            source=source,
            batcher=DynamicBatcher(source.name, serving.queue_length, serving.most_rows),
            breaker=Breaker(patience=serving.patience),
            process_died=lambda member, process: pool.process_died(member, process),
        )
        for source in sources
    ]
    pool = MemberPool(
        members,
        log,
        inbox=inbox,
        outbox_bytes=serving.outbox_bytes,
        load_seconds=serving.load_seconds,
        timing_seconds=timing_seconds,
    )
    return members, pool
