"""What a network in stages costs, one a rank: micro-batches that follow each other, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from apportion.pricing.collectives import all_reduce, message
from apportion.pricing.cost import Cost, Span
from apportion.pricing.few_rows import suited
from apportion.pricing.layer_times import LayerTimes, chance, exposed, held, times, worst
from apportion.pricing.layout import Layout
from apportion.pricing.partition import SECONDS_PER_BYTE, SECONDS_PER_MESSAGE, balanced
from apportion.pricing.simulate import Task, simulate, terms
from apportion.profile import LayerProfile, Profile, Seconds

Order = Sequence[tuple[Literal["forward", "backward"], int]]
"""What a stage does with its micro-batches, one after the other."""

PASS_CALLS = 14.0
"""What a forward or a backward pass of a micro-batch costs besides its layers, in calls: its rows, the call of the
stage's graph, the loss and its weight."""
MESSAGE_CALLS = 14.0
"""What a message costs each of its two ranks: the description, and a wait in Python. Both chosen so that
measured steps of five networks at 4 to 32 micro-batches come out, where a call took 8 us."""
MOST_TASKS = 3000
"""That are simulated; longer pipelines are priced by their closed form, which forgets only how stages that differ
hold each other up."""


@dataclass(frozen=True)
class _Stage:
    """Of one micro-batch, in seconds."""

    forward: float
    backward: float
    messages: float
    """Of that, in messages."""
    update: float
    at_once: bool


def cut(profile: Profile, layout: Layout, *, microbatches: int, cuts: Sequence[str] | None) -> list[int]:
    """The layers that the stages begin with, the first one's 0 among them; as ``parallel/cuts.py`` finds them: by the
    times on rank 0. ValueError where that many stages cannot be."""
    if cuts is not None:
        return [0, *_named(profile, cuts, layout.ranks)]
    if layout.ranks == 1:
        return [0]
    rows, own = profile.batch_size / microbatches, LayerTimes(profile, layout, 0)
    seconds = [own.of(layer, rows).both for layer in profile.layers]
    crossing: list[float | None] = [
        SECONDS_PER_MESSAGE + nbytes / microbatches * SECONDS_PER_BYTE for nbytes in profile.crossing_bytes
    ]
    return [0, *balanced(seconds, [0.0, *crossing[1:]], layout.ranks)]


def _named(profile: Profile, cuts: Sequence[str], stages: int) -> list[int]:
    if len(cuts) != stages - 1:
        raise ValueError(
            f"cuts={tuple(cuts)} make {len(cuts) + 1} stages, and there are {stages} workers: use "
            f"workers={len(cuts) + 1}, or name {stages - 1} layers"
        )
    found: list[int] = []
    for name in cuts:
        at = [i for i, layer in enumerate(profile.layers) if layer.name == name or layer.name.startswith(f"{name}.")]
        if not at or at[0] <= max(found, default=0):
            raise ValueError(
                f"cuts={tuple(cuts)}: no stage can begin with {name!r}: it is no layer after the one before"
            )
        found.append(at[0])
    return found


def stages(  # noqa: PLR0913 (what a pipeline has)
    profile: Profile,
    layout: Layout,
    begins: Sequence[int],
    orders: Sequence[Order],
    *,
    recompute: bool = False,
    at_once: Sequence[bool] = (),
    fused: bool = False,
) -> Cost:
    """Of stages that begin with these layers and compute in these orders. ``at_once``: of each stage, does it compute
    the whole batch, which comes and goes in micro-batches? ``fused``: are updates made by torch's fused kernels?"""
    microbatches = len(orders[0]) // 2
    whole = at_once or [False] * layout.ranks
    parts = _parts(profile, layout, begins, microbatches, recompute, whole, fused)
    links = _links(profile, layout, begins, microbatches)
    spans: tuple[Span, ...] = ()
    if 4 * layout.ranks * microbatches <= MOST_TASKS or any(whole):
        spans = simulate(_tasks(parts, orders, links))
        found = _found(spans, parts, microbatches)
    else:
        found = _closed(parts, links, microbatches)
    end = sum(found.values())
    busiest = max(range(layout.ranks), key=lambda i: parts[i].update)
    # The loss is told to all before anybody updates: a few numbers.
    found["communicating"] = found.get("communicating", 0.0) + all_reduce(layout, range(layout.ranks), 24)
    found["updating"] = parts[busiest].update
    found["waiting"] = found.get("computing", 0.0) * chance(layout)
    found["loading"] = profile.loading_seconds * profile.batch_size
    spans += tuple(Span(_on(i), "update", "updating", end, end + p.update) for i, p in enumerate(parts) if spans)
    return Cost(
        terms=found,
        memory=worst(_memories(profile, layout, begins, orders, recompute, whole)),
        examples=profile.batch_size,
        timeline=spans,
    )


def _on(stage: int) -> str:
    return f"rank {stage}"


def _parts(  # noqa: PLR0913 (what a pipeline has)
    profile: Profile,
    layout: Layout,
    begins: Sequence[int],
    microbatches: int,
    recompute: bool,
    at_once: Sequence[bool],
    fused: bool,
) -> list[_Stage]:
    known: dict[tuple[int, float], list[Seconds]] = {}
    sums: list[_Stage] = []
    each = times(profile, layout)
    bounds = [*begins, len(profile.layers)]
    weights = [0, *accumulate(layer.parameter_bytes for layer in profile.layers)]
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        own, rows = each[stage], profile.batch_size / (1 if at_once[stage] else microbatches)
        key = id(own), rows
        if key not in known:
            known[key] = [_of_few(own, layer, rows) for layer in profile.layers]
        forward = sum(s.forward for s in known[key][begin:end]) + PASS_CALLS * own.call * (layout.ranks > 1)
        backward = sum(s.backward for s in known[key][begin:end]) + PASS_CALLS * own.call * (layout.ranks > 1)
        messages = _own_messages(profile, layout, begins, stage, microbatches, own.call)
        times_sent = microbatches if at_once[stage] else 1
        sums.append(
            _Stage(
                forward + messages * times_sent,
                backward + (forward if recompute else 0.0) + messages * times_sent,
                messages * times_sent,
                own.update(weights[end] - weights[begin], fused=fused),
                at_once[stage],
            )
        )
    return sums


def _of_few(own: LayerTimes, layer: LayerProfile, rows: float) -> Seconds:
    found, share = own.of(layer, rows), suited(layer, rows)
    return Seconds(found.forward * share.forward, found.backward * share.backward)


def _own_messages(
    profile: Profile, layout: Layout, begins: Sequence[int], stage: int, microbatches: int, call: float
) -> float:
    """Seconds that a stage spends itself on what comes in and goes out in one direction: bookkeeping, half of what of a
    transfer does not go on by itself, and by what the rest of it slows computing down."""
    total = 0.0
    for a, b in ((stage - 1, stage), (stage, stage + 1)):
        if a >= 0 and b < len(begins):
            nbytes = profile.crossing_bytes[begins[b]] / microbatches
            share, slowdown = exposed(layout, a, b), layout.cluster.link(*layout.group((a, b))).slowdown
            total += MESSAGE_CALLS * call + message(layout, a, b, nbytes) * (share / 2 + (1 - share) * slowdown)
    return total


def _links(profile: Profile, layout: Layout, begins: Sequence[int], microbatches: int) -> list[float]:
    """Seconds that each cut's transfers go on by themselves."""
    return [
        message(layout, i, i + 1, profile.crossing_bytes[begin] / microbatches) * (1.0 - exposed(layout, i, i + 1))
        for i, begin in enumerate(begins[1:])
    ]


def _tasks(parts: Sequence[_Stage], orders: Sequence[Order], links: Sequence[float]) -> list[Task]:
    """Every pass on its rank, after the one before it there and after what it needs of its neighbours."""
    places, total = _places(parts, orders, links)
    tasks: list[Task | None] = [None] * total
    for stage, (part, order) in enumerate(zip(parts, orders, strict=True)):
        numbers = [number for kind, number in order if kind == "forward"]
        turns: Order = [("forward", -1), ("backward", -1)] if part.at_once else order
        before: int | None = None
        for kind, number in turns:
            place = places[kind, stage, number]
            source, cut_at = (stage - 1, stage - 1) if kind == "forward" else (stage + 1, stage)
            needs = [] if before is None else [before]
            for each in numbers if number < 0 else [number]:
                if 0 <= source < len(parts):
                    sender = places[kind, source, -1 if parts[source].at_once else each]
                    sent = places.get((f"{kind} sent", stage, each))
                    if sent is None:
                        needs.append(sender)
                    else:
                        link, name = f"{min(source, stage)}-{max(source, stage)} {kind}", f"{kind} {each}"
                        tasks[sent] = Task(name, "communicating", (link,), links[cut_at], (sender,), order=sent)
                        needs.append(sent)
            name = f"{kind} {number}" if number >= 0 else f"{kind} of the batch"
            seconds = part.forward if kind == "forward" else part.backward
            tasks[place] = Task(name, "computing", (_on(stage),), seconds, tuple(needs))
            before = place
    return [task for task in tasks if task is not None]


def _places(
    parts: Sequence[_Stage], orders: Sequence[Order], links: Sequence[float]
) -> tuple[dict[tuple[str, int, int], int], int]:
    """Where in the list of tasks each pass stands, and each transfer to a stage that takes any time."""
    places: dict[tuple[str, int, int], int] = {}
    for stage, (part, order) in enumerate(zip(parts, orders, strict=True)):
        for kind, number in order:
            places.setdefault((kind, stage, -1 if part.at_once else number), len(places))
            at = stage - 1 if kind == "forward" else stage
            if 0 <= at < len(links) and links[at] > 0:
                places[f"{kind} sent", stage, number] = len(places)
    return places, len(places)


def _found(spans: Sequence[Span], parts: Sequence[_Stage], microbatches: int) -> dict[str, float]:
    """As the stage sees it that computes most; its own part of messages is counted with the others."""
    passes = [1 if part.at_once else microbatches for part in parts]
    busiest = max(range(len(parts)), key=lambda i: (parts[i].forward + parts[i].backward) * passes[i])
    found = terms(spans, _on(busiest))
    own = 2 * parts[busiest].messages * passes[busiest]
    found["computing"] -= own
    found["communicating"] += own
    return found


def _closed(parts: Sequence[_Stage], links: Sequence[float], microbatches: int) -> dict[str, float]:
    """The first micro-batch goes through all stages and back, the others follow at the pace of the slowest."""
    busiest = max(parts, key=lambda part: part.forward + part.backward)
    pace = busiest.forward + busiest.backward
    own = 2 * busiest.messages * microbatches
    return {
        "computing": pace * microbatches - own,
        "communicating": own + 2 * sum(links),
        "bubble": sum(part.forward + part.backward for part in parts) - pace,
    }


def _memories(
    profile: Profile,
    layout: Layout,
    begins: Sequence[int],
    orders: Sequence[Order],
    recompute: bool,
    at_once: Sequence[bool],
) -> list[dict[str, int]]:
    found = []
    bounds = [*begins, len(profile.layers)]
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        own = profile.layers[begin:end]
        many = len(orders[stage]) // 2
        flying = many if at_once[stage] else most_in_flight(orders[stage])
        kept = sum(layer.kept_bytes for layer in own)
        came = profile.crossing_bytes[begin] if begin else 0
        activations = (came * flying + kept) / many if recompute else (came + kept) * flying / many
        weights = sum(layer.parameter_bytes for layer in own)
        found.append(held(profile, layout, weights, activations))
    return found


def most_in_flight(order: Order) -> int:
    """Micro-batches whose activations a stage keeps at once."""
    most = now = 0
    for kind, _ in order:
        now += 1 if kind == "forward" else -1
        most = max(most, now)
    return most
