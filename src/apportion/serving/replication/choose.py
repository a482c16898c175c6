"""The choice of in_graph or between_graph: both are measured on this machine, with requests one at a time and many at
once.

Every member in a process of its own: one that is slow or dies does not hold up or end the others.

::

    request --+--> queue m1 --> process m1 --+
              +--> queue m2 --> process m2 --+--> what is there by the deadline
              +--> queue m3 --> process m3 --+
                                spare process: every net loaded, takes a dead member's place

It wins where an answer by the deadline matters, and where members are large enough for several cores. It loses on
members so small that a message to each is what takes the time.

All members in one program, which a single process runs: ONNX files merged into one, modules of torch stacked.

::

    input --+-- m1/... -- m1/output
            +-- m2/... -- m2/output         one request, one pass, every member's outputs
            +-- m3/... -- m3/output

It wins where members are small: one message instead of one a member. It loses where one of them may be slow or die:
without it there is none of the others' answers, and all of them die together.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from apportion.serving.runtimes.runtime import Spec
from apportion.serving.runtimes.source import ServedTensor, Source


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
    whole = [merged(sources, means.folder)] if kind == "in_graph" else sources
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


MOST_BYTES = 2**31 - 2**20
"""The largest size in bytes of an ONNX file."""


def merged(sources: Sequence[Source], folder: Path) -> Source:
    """Return one source whose outputs are those of the first member, then of the second, and so on. Raises ValueError
    where the members cannot be merged, with the reason, and ApportionError where the disk has no room for the merged
    file."""
    whole = replace(
        sources[0],
        name="+".join(source.name for source in sources),
        batched=all(source.batched for source in sources),
        outputs=_outputs(sources),
    )
    if {source.runtime for source in sources} == {"torch"}:
        _check_inputs_of_torch(sources)
        return replace(whole, others=tuple(source.path for source in sources[1:]))
    if other := next((source for source in sources if source.runtime != "onnx"), None):
        raise ValueError(
            "in_graph makes one program of nets that ONNX Runtime runs, or that torch runs, all of them: "
            f"{other.name} is run by {other.runtime}"
        )
    return replace(whole, path=str(_merged(sources, folder)))


def _outputs(sources: Sequence[Source]) -> tuple[ServedTensor, ...] | None:
    """Return the outputs of all members, one after the other, with the member before the name."""
    found: list[ServedTensor] = []
    for source in sources:
        if source.outputs is None:
            return None
        for tensor in source.outputs:
            name = f"{source.name}/{tensor.own}"
            found.append(ServedTensor(name, len(found), replace(tensor.spec, name=f"{source.name}/{tensor.spec.name}")))
    return tuple(found)


def _check_inputs_of_torch(sources: Sequence[Source]) -> None:
    """Raise ValueError where modules of torch take the same input in other places: they are all called alike."""
    first = [(tensor.own, tensor.place) for tensor in sources[0].inputs or ()]
    for source in sources[1:]:
        if [(tensor.own, tensor.place) for tensor in source.inputs or ()] != first:
            raise ValueError(
                f"in_graph: {sources[0].name} and {source.name}, which torch runs, take inputs of other names"
            )


def _merged(sources: Sequence[Source], folder: Path) -> Path:
    import onnx
    from onnx import compose

    if sum(Path(source.path).stat().st_size for source in sources) > MOST_BYTES:
        raise ValueError(f"in_graph makes one file of ONNX, and the members have more than {MOST_BYTES} bytes together")
    models = [onnx.load(source.path) for source in sources]
    kinds = [_kinds(model, source) for model, source in zip(models, sources, strict=True)]
    if other := next((s for s, k in zip(sources, kinds, strict=True) if k != kinds[0]), None):
        raise ValueError(f"in_graph: {sources[0].name} and {other.name} have different inputs or outputs")
    if other := next((s for s, m in zip(sources, models, strict=True) if m.graph.sparse_initializer), None):
        raise ValueError(f"in_graph: {other.name} has sparse weights")
    nodes, initializers, outputs, functions = [], [], [], []
    for source, model in zip(sources, models, strict=True):
        shared = dict(zip(_names(model, source)[0], _names(models[0], sources[0])[0], strict=True))
        model = compose.add_prefix(model, f"{source.name}/", rename_inputs=False)
        _rename(model, shared)
        nodes += model.graph.node
        initializers += model.graph.initializer
        outputs += model.graph.output
        functions += model.functions
    versions = {(o.domain, o.version) for model in models for o in model.opset_import}
    if len({domain for domain, _ in versions}) < len(versions):
        raise ValueError("in_graph: the members are of different versions of ONNX's operators; export them alike")
    graph = onnx.helper.make_graph(nodes, "ensemble", _fed(models[0]), outputs, initializers)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in sorted(versions)]
    whole = onnx.helper.make_model(
        graph, opset_imports=opsets, functions=functions, ir_version=max(model.ir_version for model in models)
    )
    path = folder / "ensemble.onnx"
    try:
        onnx.save(whole, path)
    except OSError as error:
        raise ApportionError(f"in_graph: {path} could not be written: {error.strerror}") from error
    return path


def _fed(model: Any) -> list[Any]:
    """Return the inputs of a model without its weights, which old files list among them."""
    held = {value.name for value in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in held]


def _names(model: Any, source: Source) -> tuple[list[str], list[str]]:
    """Return the names in the file of the inputs and the outputs, in the order in which they are served."""
    inputs = [value.name for value in _fed(model)] if source.inputs is None else [t.own for t in source.inputs]
    outputs = (
        [value.name for value in model.graph.output] if source.outputs is None else [t.own for t in source.outputs]
    )
    return inputs, outputs


def _kinds(model: Any, source: Source) -> list[tuple[int, list[int | None]]]:
    """Return (type, dims) of a model's inputs and outputs, in the order in which they are served."""
    values = {value.name: value.type.tensor_type for value in (*_fed(model), *model.graph.output)}
    found = []
    for name in [name for names in _names(model, source) for name in names]:
        dims = values[name].shape.dim
        found.append((values[name].elem_type, [d.dim_value if d.HasField("dim_value") else None for d in dims]))
    return found


def _rename(model: object, names: dict[str, str]) -> None:
    """Rename inputs wherever they are read, also inside of branches and loops."""
    stack = [model.graph]  # type: ignore[attr-defined]
    while stack:
        graph = stack.pop()
        for node in graph.node:
            for at, name in enumerate(node.input):
                node.input[at] = names.get(name, name)
            stack += [a.g for a in node.attribute if a.HasField("g")]
