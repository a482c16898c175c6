"""The choice of in_graph or between_graph: both are measured on this machine, with requests one at a time and many at
once.

``between_graph`` has every member in a process of its own: one that is slow or dies does not hold up or end the others.

::

    request --+--> queue m1 --> process m1 --+
              +--> queue m2 --> process m2 --+--> what is there by the deadline
              +--> queue m3 --> process m3 --+
                                spare process: every net loaded, takes a dead member's place

It wins where an answer by the deadline matters, and where members are large enough for several cores. It loses on
members so small that a message to each is what takes the time: there ``in_graph`` wins (in_graph.py).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from apportion.errors import ApportionError
from apportion.serving.config import Serving
from apportion.serving.ensemble.aggregation import check_aggregation, check_outputs
from apportion.serving.ensemble.deadline import check_quorum
from apportion.serving.ensemble.ensemble import Ensemble, InferenceRequest
from apportion.serving.pool.circuit_breaker import Breaker
from apportion.serving.pool.dynamic_batcher import DynamicBatcher
from apportion.serving.pool.frames import Arena, placed
from apportion.serving.pool.member import Member
from apportion.serving.pool.pool import Log, MemberPool
from apportion.serving.protocol.datatypes import DATATYPES
from apportion.serving.replication import in_graph
from apportion.serving.runtimes.runtime import Spec
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


AT_ONCE = 16
SECONDS = 0.6
"""The seconds for which each of the two is measured, one request at a time and many at once."""
WORTH = 1.25
"""The factor by which in_graph has to be faster, since it gives up the answer by the deadline."""
TIMING_SECONDS = 0.5


@dataclass(frozen=True)
class Staffed:
    """The members that answer, with the pool of their processes."""

    ensemble: Ensemble
    pool: MemberPool
    replication: str


@dataclass(frozen=True)
class Means:
    """The means with which members are started. ``folder``: holds the files that are made. ``missed``: called with the
    name of a member that was late."""

    folder: Path
    inbox: Arena
    log: Log
    missed: Callable[[str], None]


async def replicated(sources: Sequence[Source], serving: Serving, means: Means) -> Staffed:
    """Return the members, started as ``serving.replication`` says. Raises ValueError where they cannot be started:
    their inputs differ, or they cannot be merged."""
    check_quorum(serving.quorum, [source.name for source in sources])

    async def start(kind: str) -> Staffed:
        return await _started(kind, sources, serving, means)

    if serving.replication == "in_graph":
        taken = await start("in_graph")
    else:
        taken = await start("between_graph")
        if serving.replication == "auto" and len(sources) > 1:
            taken = await _faster(taken, start, means)
    taken.pool.keep_spare()  # not before: it would take part of what is measured
    return taken


async def _faster(between: Staffed, start: Callable[[str], Awaitable[Staffed]], means: Means) -> Staffed:
    """Return these members or those of in_graph, as measured; the others are closed, and both are where that fails."""
    started = [between]
    try:
        try:
            started.append(within := await start("in_graph"))
        except (ValueError, ApportionError) as error:
            means.log(f"replication between_graph: {error}", replication="between_graph")
            return between
        one, many = await _measured(between.ensemble, means.inbox)
        one_within, many_within = await _measured(within.ensemble, means.inbox)
    except BaseException:
        for staffed in started:
            await staffed.pool.close()
        raise
    taken = within if many_within >= WORTH * many and one_within <= one else between
    await (between if taken is within else within).pool.close()
    means.log(
        f"replication {taken.replication}: between_graph {one * 1e3:.2f} ms alone and {many:.0f} requests/s at once, "
        f"in_graph {one_within * 1e3:.2f} ms and {many_within:.0f}; in_graph cannot answer without a member, so it has "
        f"to be {WORTH:g} times as fast",
        replication=taken.replication,
    )
    return taken


async def _started(kind: str, sources: Sequence[Source], serving: Serving, means: Means) -> Staffed:
    whole = [in_graph.merged(sources, means.folder)] if kind == "in_graph" else sources
    started, pool = create_members(whole, serving, means.inbox, means.log, timing_seconds=TIMING_SECONDS)
    try:
        await pool.start()
        names = [source.name for source in sources]
        members = dict.fromkeys(names, started[0]) if kind == "in_graph" else dict(zip(names, started, strict=True))
        if len(sources) > 1:
            weights = None if serving.weights is None else [serving.weights[n] for n in names if n in serving.weights]
            check_aggregation(serving.aggregation, weights, len(names))
            kinds = ["u" if s.datatype == "BF16" else DATATYPES[s.datatype].kind for s in started[0].outputs]
            check_outputs(serving.aggregation, kinds)
    except BaseException:
        await pool.close()
        raise
    ensemble = Ensemble(
        members=members,
        quorum=serving.quorum,
        aggregation=serving.aggregation,
        weights=None if serving.weights is None else dict(serving.weights),
        specs={source.name: _specs(source) for source in sources},
        missed=means.missed,
    )
    return Staffed(ensemble, pool, kind)


def _specs(source: Source) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
    return tuple(t.spec for t in source.inputs or ()), tuple(t.spec for t in source.outputs or ())


async def _measured(ensemble: Ensemble, inbox: Arena) -> tuple[float, float]:
    """Return (the seconds of a request by itself, the requests per second of many at once)."""
    member = ensemble.distinct_members[0]
    rows = member.source.rows() or [spec.filled(1) for spec in member.inputs]
    tensors, held = placed([(spec.datatype, row) for spec, row in zip(member.inputs, rows, strict=True)], inbox)
    names = tuple(ensemble.members)
    loop = asyncio.get_running_loop()

    async def ask() -> float:
        began = time.perf_counter()
        await ensemble.infer(InferenceRequest(tensors, 1, loop.time() + 60.0, names, held))
        return time.perf_counter() - began

    alone: list[float] = []
    end = loop.time() + SECONDS
    while loop.time() < end or len(alone) < 3:
        alone.append(await ask())
    done, end = 0, loop.time() + SECONDS

    async def keep_asking() -> None:
        nonlocal done
        while loop.time() < end:
            await ask()
            done += 1

    began = loop.time()
    await asyncio.gather(*(keep_asking() for _ in range(AT_ONCE)))
    return statistics.median(alone), done / (loop.time() - began)
