"""The price of a network in stages, one a rank: micro-batches that follow each other, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from apportion.cost_model.collectives import all_reduce, message
from apportion.cost_model.compute import LayerTimes, chance, exposed, held, suited, times, worst
from apportion.cost_model.cost import Cost, Span
from apportion.cost_model.partitioning import SECONDS_PER_BYTE, SECONDS_PER_MESSAGE, balanced
from apportion.cost_model.placement import Placement
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies.pipeline_timeline import Order, TimedPasses, TimedStage, on_rank

PASS_CALLS = 14.0
"""The overhead of a forward or a backward pass of a micro-batch besides its layers, in calls: its rows, the call of the
stage's graph, the loss and its weight."""
MESSAGE_CALLS = 14.0
"""The overhead of a message on each of its two ranks, in calls: the description, and a wait in Python. ``PASS_CALLS``
and ``MESSAGE_CALLS`` are chosen so that measured steps of five networks at 4 to 32 micro-batches come out, where a call
took 8 us."""
MOST_TASKS = 3000
"""The largest number of tasks that is simulated; longer pipelines are priced by their closed form, which leaves out
only how stages that differ hold each other up."""


def cut(profile: Profile, layout: Placement, *, microbatches: int, cuts: Sequence[str] | None) -> list[int]:
    """The layers that the stages begin with, the first one's 0 among them, as ``parallel/pipeline/cut_points.py`` finds
    them: by the times on rank 0. ValueError where there cannot be that many stages."""
    if cuts is not None:
        return [0, *_named(profile, cuts, layout.ranks)]
    if layout.ranks == 1:
        return [0]
    rows, own = profile.batch_size / microbatches, LayerTimes(profile, layout, 0)
    seconds = [found.both for found in own.each(rows)]
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
                f"cuts={tuple(cuts)}: no stage can begin with {name!r}: it is not a layer after the one before"
            )
        found.append(at[0])
    return found


class Pipeline:
    """A network in stages that begin with these layers: the part of its price that does not depend on the order of the
    passes."""

    def __init__(  # noqa: PLR0913 (what a pipeline has)
        self,
        profile: Profile,
        layout: Placement,
        begins: Sequence[int],
        *,
        microbatches: int,
        recompute: bool = False,
        at_once: Sequence[bool] = (),
        fused: bool = False,
    ) -> None:
        """Price the stages that begin with the layers ``begins``. ``at_once``: whether each stage computes the whole
        batch, which comes and goes in micro-batches; ``fused``: whether updates are made by torch's fused kernels."""
        self._profile, self._layout, self._begins = profile, layout, begins
        self.microbatches, self._recompute = microbatches, recompute
        self._whole = at_once or [False] * layout.ranks
        self.waits = any(self._whole)
        """Is there a stage that computes nothing before it has all micro-batches?"""
        cuts = _cuts(profile, layout, begins, microbatches)
        self._parts = _parts(profile, layout, begins, microbatches, cuts, recompute, self._whole, fused)
        self._links = [cut.under_way for cut in cuts]

    def cost(self, orders: Sequence[Order]) -> Cost:
        """The cost of a step whose stages make their passes in these orders."""
        profile, layout, parts = self._profile, self._layout, self._parts
        spans: tuple[Span, ...] = ()
        if 4 * layout.ranks * self.microbatches <= MOST_TASKS or self.waits:
            passes = TimedPasses(parts, orders, self._links)
            spans, found = passes.timeline(), _found(passes, parts, self.microbatches)
        else:
            found = _closed(parts, self._links, self.microbatches)
        end = sum(found.values())
        # The loss is told to all before anybody updates: a few numbers.
        found["communicating"] = found.get("communicating", 0.0) + all_reduce(layout, range(layout.ranks), 24)
        found["updating"] = max(part.update for part in parts)
        found["waiting"] = found.get("computing", 0.0) * chance(layout)
        found["loading"] = profile.loading_seconds * profile.batch_size
        updates = (Span(on_rank(i), "update", "updating", end, end + p.update) for i, p in enumerate(parts) if spans)
        return Cost(
            terms=found,
            memory=worst(_memories(profile, layout, self._begins, orders, self._recompute, self._whole)),
            examples=profile.batch_size,
            timeline=(*spans, *updates),
        )


class _Cut(NamedTuple):
    """The seconds of a transfer between two stages, for one micro-batch."""

    own: float
    """The seconds that each of the two ranks spends itself in either direction: half of the part of a transfer that
    does not go on by itself, and the time by which the rest of it slows computing down."""
    under_way: float
    """The seconds that a transfer goes on by itself."""


def _cuts(profile: Profile, layout: Placement, begins: Sequence[int], microbatches: int) -> list[_Cut]:
    found = []
    for i, begin in enumerate(begins[1:]):
        seconds = message(layout, i, i + 1, profile.crossing_bytes[begin] / microbatches)
        share, slowdown = exposed(layout, i, i + 1), layout.cluster.link(*layout.group((i, i + 1))).slowdown
        found.append(_Cut(seconds * (share / 2 + (1 - share) * slowdown), seconds * (1.0 - share)))
    return found


def _parts(  # noqa: PLR0913 (what a pipeline has)
    profile: Profile,
    layout: Placement,
    begins: Sequence[int],
    microbatches: int,
    cuts: Sequence[_Cut],
    recompute: bool,
    at_once: Sequence[bool],
    fused: bool,
) -> list[TimedStage]:
    known: dict[tuple[int, float], tuple[list[float], list[float]]] = {}
    sums: list[TimedStage] = []
    each = times(profile, layout)
    bounds = [*begins, len(profile.layers)]
    weights = [0, *accumulate(layer.parameter_bytes for layer in profile.layers)]
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        own, rows = each[stage], profile.batch_size / (1 if at_once[stage] else microbatches)
        key = id(own), rows
        if key not in known:
            known[key] = _of_few(profile, own, rows)
        ahead, back = known[key]
        forward = sum(ahead[begin:end]) + PASS_CALLS * own.call * (layout.ranks > 1)
        backward = sum(back[begin:end]) + PASS_CALLS * own.call * (layout.ranks > 1)
        messages = 0.0
        for cut in cuts[max(0, stage - 1) : stage + 1]:
            messages += MESSAGE_CALLS * own.call + cut.own
        times_sent = microbatches if at_once[stage] else 1
        sums.append(
            TimedStage(
                forward + messages * times_sent,
                backward + (forward if recompute else 0.0) + messages * times_sent,
                messages * times_sent,
                own.update(weights[end] - weights[begin], fused=fused),
                at_once[stage],
            )
        )
    return sums


def _of_few(profile: Profile, own: LayerTimes, rows: float) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of each layer, as it computes few rows."""
    each = own.each(rows)
    shares = [suited(layer, rows) for layer in profile.layers]
    forward = [found.forward * share.forward for found, share in zip(each, shares, strict=True)]
    return forward, [found.backward * share.backward for found, share in zip(each, shares, strict=True)]


def _found(passes: TimedPasses, parts: Sequence[TimedStage], microbatches: int) -> dict[str, float]:
    """The terms of a step as the stage that computes most sees them; its own part of messages is counted as
    communicating."""
    many = [1 if part.at_once else microbatches for part in parts]
    busiest = max(range(len(parts)), key=lambda i: (parts[i].forward + parts[i].backward) * many[i])
    found = passes.terms(busiest)
    own = 2 * parts[busiest].messages * many[busiest]
    found["computing"] -= own
    found["communicating"] += own
    return found


def _closed(parts: Sequence[TimedStage], links: Sequence[float], microbatches: int) -> dict[str, float]:
    """The terms of a step in which the first micro-batch goes through all stages and back and the others follow at the
    pace of the slowest stage."""
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
    layout: Placement,
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
    """The largest number of micro-batches whose activations a stage keeps at once."""
    most = now = 0
    for kind, _ in order:
        now += 1 if kind == "forward" else -1
        most = max(most, now)
    return most
