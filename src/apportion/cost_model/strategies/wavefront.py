"""The price of recurrent layers on several ranks, each working one chunk of time behind the layer below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apportion.cost_model.cluster import Placement
from apportion.cost_model.collectives import message
from apportion.cost_model.compute import LayerTimes, chance, exposed, held, times, worst
from apportion.cost_model.cost import Cost, Span
from apportion.cost_model.profile import LayerProfile, Profile, Seconds
from apportion.cost_model.simulator import SimulatedTask, simulate, terms

CHUNK_CALLS = 30.0
"""The overhead of a chunk on a layer besides its share of the whole time, each way, in calls: the loop around the
kernel."""
MESSAGE_CALLS = 15.0
"""The overhead of a message of one tensor on each of its two ranks, in calls. ``CHUNK_CALLS`` and ``MESSAGE_CALLS`` are
estimates, and hold against the measured step of two layers of 256 units."""
WEIGHTS = 0.5
"""Share of the backward pass that makes the gradients of the weights: two of its four products."""
MOST_TASKS = 3000
"""The largest number of tasks that is simulated; longer waves are priced by their closed form, which leaves out only
how ranks that differ hold each other up."""


@dataclass(frozen=True)
class Waves:
    """The way in which the recurrent layers are run."""

    at: int
    """The place of the recurrent layers among the profile's layers."""
    chunks: int
    late: bool
    """Are the gradients of the weights made at the end, when no rank waits for them?"""


@dataclass(frozen=True)
class _Chunk:
    """The seconds of a chunk of one layer on one rank."""

    forward: float
    backward: float
    weights: float
    """The seconds of the gradients of the whole layer's weights, made at the end."""
    message: float
    """The seconds of a transfer that goes on by itself."""
    own: float
    """The seconds that a rank itself spends on a message; the rank at the other end spends as much."""


def wavefront(profile: Profile, layout: Placement, waves: Waves) -> Cost:
    """The cost of a step with the layers before the recurrent ones on the first rank, and those after them on the last
    layer's."""
    net = profile.layers[waves.at]
    each = times(profile, layout)
    last = (net.stack - 1) % layout.ranks
    chunks = [_chunk(profile, layout, own, rank, waves) for rank, own in enumerate(each)]
    before = _sum(each[0], profile.layers[: waves.at], profile.batch_size)
    after = _sum(each[last], profile.layers[waves.at + 1 :], profile.batch_size)
    spans: tuple[Span, ...] = ()
    if 4 * net.stack * waves.chunks <= MOST_TASKS:
        spans = simulate(_tasks(net.stack, layout.ranks, waves.chunks, chunks, before, after))
        found = _found(spans, net.stack, waves.chunks, chunks)
    else:
        found = _closed(net.stack, waves.chunks, chunks, before.both + after.both)
    found["updating"] = max(each[r].update(w) for r, w in enumerate(_weights(profile, layout, waves.at)))
    found["waiting"] = found["computing"] * chance(layout)
    found["loading"] = profile.loading_seconds * profile.batch_size
    return Cost(
        terms=found,
        memory=worst(_memories(profile, layout, waves.at)),
        examples=profile.batch_size,
        timeline=spans,
    )


def _on(rank: int) -> str:
    return f"rank {rank}"


def _sum(own: LayerTimes, layers: Sequence[LayerProfile], rows: float) -> Seconds:
    found = [own.of(layer, rows) for layer in layers]
    return Seconds(sum(s.forward for s in found), sum(s.backward for s in found))


def _found(spans: Sequence[Span], stack: int, many: int, chunks: Sequence[_Chunk]) -> dict[str, float]:
    """The terms of a step as the rank that computes most sees them; its own part of messages is counted as
    communicating."""
    busy = dict.fromkeys((_on(rank) for rank in range(len(chunks))), 0.0)
    for span in spans:
        if span.on in busy:
            busy[span.on] += span.end - span.begin
    busiest = max(range(len(chunks)), key=lambda rank: busy[_on(rank)])
    found = terms(spans, _on(busiest))
    own = 4 * len(range(busiest, stack, len(chunks))) * many * chunks[busiest].own
    found["computing"] -= own
    found["communicating"] += own
    return found


def _closed(stack: int, many: int, chunks: Sequence[_Chunk], ends: float) -> dict[str, float]:
    """The terms of a step as every rank's layers, one after the other, and a chunk of every other rank at either
    end."""
    slowest = max(chunks, key=lambda chunk: chunk.forward + chunk.backward)
    layers = -(-stack // len(chunks))
    own = 4 * layers * many * slowest.own
    pace = slowest.forward + slowest.backward
    return {
        "computing": layers * (many * pace + slowest.weights) - own + ends,
        "communicating": own + 2 * sum(chunk.message for chunk in chunks[:-1]),
        "bubble": sum(chunk.forward + chunk.backward for chunk in chunks) - pace,
    }


def _chunk(profile: Profile, layout: Placement, own: LayerTimes, rank: int, waves: Waves) -> _Chunk:
    net, rows = profile.layers[waves.at], profile.batch_size
    layer = own.of(net, rows, way="layer", share=1.0 / net.stack)
    late = WEIGHTS * layer.backward if waves.late else 0.0
    if any(t.way == "chunk" for t in net.timings):  # without the gradients of the weights, if these come late
        part = own.of(net, rows, way="chunk", share=1.0 / (net.stack * waves.chunks)).times(waves.chunks)
        late = max(0.0, layer.backward - part.backward) if waves.late else 0.0
        layer = Seconds(part.forward, part.backward + late)
    call = own.call * CHUNK_CALLS
    a, b = rank, (rank + 1) % layout.ranks
    seconds = message(layout, a, b, net.activation_bytes / waves.chunks)
    share = exposed(layout, a, b) if a != b else 0.0
    messages = MESSAGE_CALLS * own.call + seconds * share / 2 if a != b else 0.0
    return _Chunk(
        layer.forward / waves.chunks + call + 2 * messages,
        (layer.backward - late) / waves.chunks + call + 2 * messages,
        late,
        seconds * (1.0 - share),
        messages,
    )


def _tasks(
    stack: int, ranks: int, many: int, chunks: Sequence[_Chunk], before: Seconds, after: Seconds
) -> list[SimulatedTask]:
    """The tasks of a step. A rank takes its layers one after the other, each through all chunks, forward from the first
    and backward from the last."""
    tasks: list[SimulatedTask] = []
    ended: dict[int, int] = {}

    def add(rank: int, name: str, seconds: float, needs: Sequence[int]) -> int:
        own = [ended[rank]] if rank in ended else []
        tasks.append(SimulatedTask(name, "computing", (_on(rank),), seconds, (*own, *needs)))
        ended[rank] = len(tasks) - 1
        return ended[rank]

    def sent(layer: int, name: str, place: int) -> int:
        if chunks[layer % ranks].message <= 0 or ranks == 1:
            return place
        link = f"{layer % ranks}-{(layer + 1) % ranks} {name.split()[0]}"
        tasks.append(SimulatedTask(name, "communicating", (link,), chunks[layer % ranks].message, (place,)))
        return len(tasks) - 1

    add(0, "before", before.forward, ())
    come: list[list[int]] = [[] for _ in range(many)]
    for layer in range(stack):
        for i in range(many):
            place = add(layer % ranks, f"forward {layer}:{i}", chunks[layer % ranks].forward, come[i])
            come[i] = [sent(layer, f"forward {layer}:{i}", place)]
    last = (stack - 1) % ranks
    add(last, "after", after.both, ())
    come = [[] for _ in range(many)]
    for layer in reversed(range(stack)):
        for i in reversed(range(many)):
            place = add(layer % ranks, f"backward {layer}:{i}", chunks[layer % ranks].backward, come[i])
            come[i] = [sent(layer, f"backward {layer}:{i}", place)]
    add(0, "before, backward", before.backward, ())
    for layer in range(stack):
        if chunks[layer % ranks].weights:
            add(layer % ranks, f"weights of {layer}", chunks[layer % ranks].weights, ())
    return tasks


def _weights(profile: Profile, layout: Placement, at: int) -> list[float]:
    """The bytes of weights on each rank."""
    net = profile.layers[at]
    found = [net.parameter_bytes * len(range(r, net.stack, layout.ranks)) / net.stack for r in range(layout.ranks)]
    found[0] += sum(layer.parameter_bytes for layer in profile.layers[:at])
    found[(net.stack - 1) % layout.ranks] += sum(layer.parameter_bytes for layer in profile.layers[at + 1 :])
    return found


def _memories(profile: Profile, layout: Placement, at: int) -> list[dict[str, int]]:
    net = profile.layers[at]
    kept = [net.kept_bytes * len(range(r, net.stack, layout.ranks)) / net.stack for r in range(layout.ranks)]
    kept[0] += sum(layer.kept_bytes for layer in profile.layers[:at])
    kept[(net.stack - 1) % layout.ranks] += sum(layer.kept_bytes for layer in profile.layers[at + 1 :])
    return [held(profile, layout, w, k) for w, k in zip(_weights(profile, layout, at), kept, strict=True)]
