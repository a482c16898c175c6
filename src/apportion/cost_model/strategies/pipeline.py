"""The price of a network in stages, one a rank: micro-batches that follow each other, forward and backward.

Every rank makes its passes in an order that is known, and every link carries their results in that same order: the
beginning of each pass follows from the ends of others, without a queue of events (``simulator.py``, which finds the
same times).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from apportion.cost_model.cluster import Placement
from apportion.cost_model.collectives import all_reduce, message
from apportion.cost_model.compute import LayerTimes, chance, exposed, held, suited, times, worst
from apportion.cost_model.cost import Cost, Span
from apportion.cost_model.partitioning import SECONDS_PER_BYTE, SECONDS_PER_MESSAGE, balanced
from apportion.cost_model.profile import Profile
from apportion.cost_model.simulator import spent

Kind = Literal["forward", "backward"]
Order = Sequence[tuple[Kind, int]]
"""The passes that a stage makes over its micro-batches, one after the other."""


@dataclass(frozen=True)
class TimedStage:
    """The seconds of a stage for one micro-batch."""

    forward: float
    backward: float
    messages: float
    """The seconds of each pass that are spent on messages."""
    update: float
    at_once: bool
    """Does the stage compute the whole batch, which comes and goes in micro-batches?"""


class TimedPasses:
    """The timed passes of all stages, made in these orders. ``links``: seconds that what goes over each cut is under
    way.

    An assertion fails where stages wait for each other in a circle.
    """

    def __init__(self, stages: Sequence[TimedStage], orders: Sequence[Order], links: Sequence[float]) -> None:
        self._stages, self._orders, self._links = stages, orders, links
        n, many = len(stages), len(orders[0]) // 2
        self._turns = [_turns(stage, order) for stage, order in zip(stages, orders, strict=True)]
        self._made: list[list[tuple[float, float]]] = [[] for _ in stages]
        self._sent: dict[tuple[Kind, int, int], tuple[float, float]] = {}
        """The beginning and end of each message, by its kind, the stage that it goes to and the micro-batch."""
        come: list[list[float | None]] = [[None] * many for _ in range(2 * n)]
        self._come: dict[Kind, list[list[float | None]]] = {"forward": come[:n], "backward": come[n:]}
        self._come["forward"][0] = self._come["backward"][-1] = [0.0] * many
        self._carried: dict[Kind, list[float]] = {"forward": [0.0] * len(links), "backward": [0.0] * len(links)}
        going = list(reversed(range(n)))
        while going:
            stage = going.pop()
            if self._advance(stage):  # its neighbours may go on
                going += [s for s in (stage - 1, stage + 1) if 0 <= s < n]
        assert all(len(made) == len(turns) for made, turns in zip(self._made, self._turns, strict=True))

    def _advance(self, stage: int) -> bool:
        """Let a stage go on as far as it can; False: it could make no pass."""
        part, made, turns = self._stages[stage], self._made[stage], self._turns[stage]
        first = len(made)
        for kind, numbers in turns[first:]:
            come, begin = self._come[kind][stage], made[-1][1] if made else 0.0
            for number in numbers:
                there = come[number]
                if there is None:
                    return len(made) > first
                begin = max(begin, there)
            end = begin + (part.forward if kind == "forward" else part.backward)
            made.append((begin, end))
            self._send(kind, stage, numbers, end)
        return len(made) > first

    def _send(self, kind: Kind, stage: int, numbers: Sequence[int], ready: float) -> None:
        to = stage + 1 if kind == "forward" else stage - 1
        if not 0 <= to < len(self._stages):
            return
        cut, come, carried = min(stage, to), self._come[kind][to], self._carried[kind]
        for number in numbers:
            if (seconds := self._links[cut]) > 0:
                begin = max(ready, carried[cut])
                carried[cut] = come[number] = begin + seconds
                self._sent[kind, to, number] = begin, carried[cut]
            else:
                come[number] = ready

    def terms(self, stage: int) -> dict[str, float]:
        """The seconds of the step as this stage spends them, see ``simulator.spent``."""
        end = max(made[-1][1] for made in self._made)
        own = [(begin, until, "computing") for begin, until in self._made[stage]]
        return spent(own, list(self._sent.values()), end)

    def timeline(self) -> tuple[Span, ...]:
        """The spans of one stage after the other; a message that comes to a stage stands behind the pass that waits for
        it."""
        spans: list[Span] = []
        for stage, order in enumerate(self._orders):
            on, made, before = on_rank(stage), iter(self._made[stage]), None
            for kind, number in order:
                name = f"{kind} {number}"
                if not self._stages[stage].at_once:
                    spans.append(Span(on, name, "computing", *next(made)))
                elif kind != before:
                    spans.append(Span(on, f"{kind} of the batch", "computing", *next(made)))
                before = kind
                if (sent := self._sent.get((kind, stage, number))) is not None:
                    source = stage - 1 if kind == "forward" else stage + 1
                    link = f"{min(source, stage)}-{max(source, stage)} {kind}"
                    spans.append(Span(link, name, "communicating", *sent))
        return tuple(spans)


def on_rank(stage: int) -> str:
    """The name of a stage's rank in a timeline."""
    return f"rank {stage}"


def _turns(stage: TimedStage, order: Order) -> list[tuple[Kind, tuple[int, ...]]]:
    """The passes of a stage, each with the micro-batches that it computes."""
    if not stage.at_once:
        return [(kind, (number,)) for kind, number in order]
    kinds: tuple[Kind, Kind] = "forward", "backward"
    return [(kind, tuple(number for of, number in order if of == kind)) for kind in kinds]


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
        # The loss is sent to all before any rank updates: a few numbers.
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
