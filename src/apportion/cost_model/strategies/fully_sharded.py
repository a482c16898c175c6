"""The price of gathering weights layer by layer, and of summing gradients into shards
(``parallel/replica/fsdp.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apportion.cost_model.cluster import Placement
from apportion.cost_model.collectives import all_gather, reduce_scatter
from apportion.cost_model.compute import memory_rate
from apportion.cost_model.cost import Span
from apportion.cost_model.profile import Profile
from apportion.cost_model.simulator import SimulatedTask, makespan, simulate

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Unit:
    """A layer whose weights are gathered at once, with the layers up to the next unit, which have few weights."""

    nbytes: int
    forward: float
    backward: float


def units(profile: Profile, least: int, forward: Sequence[float], backward: Sequence[float]) -> tuple[int, list[Unit]]:
    """The bytes that are gathered for the whole step, at its beginning; and the units in order of execution. A unit
    begins with a layer of ``least`` parameters or more; ``forward`` and ``backward`` are the seconds of each layer."""
    found, root = [Unit(0, 0.0, 0.0)], 0
    for layer, ahead, back in zip(profile.layers, forward, backward, strict=True):
        if layer.parameter_bytes >= least * FLOAT_BYTES:
            found.append(Unit(layer.parameter_bytes, ahead, back))
            continue
        root += layer.parameter_bytes
        last = found[-1]
        found[-1] = Unit(last.nbytes, last.forward + ahead, last.backward + back)
    return root, found


def gather(layout: Placement, nbytes: int) -> float:
    """Seconds until every rank has this many bytes that lay in shards: sent, and copied to where the layer has them
    (torch lays shards side by side first)."""
    return all_gather(layout, range(layout.ranks), nbytes) + 3 * nbytes / memory_rate(layout) if nbytes else 0.0


def scatter(layout: Placement, nbytes: int) -> float:
    """Seconds until every rank has its shard of the sum; gradients are first laid side by side."""
    return reduce_scatter(layout, range(layout.ranks), nbytes) + 4 * nbytes / memory_rate(layout) if nbytes else 0.0


def in_turn(layout: Placement, root: int, parts: Sequence[Unit]) -> float:
    """Seconds of all messages of a pass forward and back, one after the other: on CPUs nothing else goes on."""
    sizes = {unit.nbytes for unit in parts}
    each = {nbytes: 2 * gather(layout, nbytes) + scatter(layout, nbytes) for nbytes in sizes}
    twice = sum(each[unit.nbytes] for unit in parts)
    return gather(layout, root) + scatter(layout, root) + twice


def overlapped(layout: Placement, root: int, parts: Sequence[Unit]) -> tuple[float, tuple[Span, ...]]:
    """The seconds beyond computing, and the timeline: on GPUs the weights of the next layer come, and the gradients of
    the last one go, while a layer is computed."""
    device, wire = (layout.devices[0],), (layout.cluster.joining(layout.devices).kind,)
    tasks = [SimulatedTask("gather the rest", "communicating", wire, gather(layout, root))]
    sizes = {unit.nbytes for unit in parts}
    gathering = {nbytes: gather(layout, nbytes) for nbytes in sizes}
    scattering = {nbytes: scatter(layout, nbytes) for nbytes in sizes}
    computed = [0]
    order = [*range(len(parts)), *reversed(range(len(parts)))]
    for step, i in enumerate(order):
        unit, back = parts[i], step >= len(parts)
        name = f"{'backward' if back else 'forward'} {i}"
        needs = [computed[-1]]
        if unit.nbytes:  # one layer ahead, and no more: that is the memory which it saves
            tasks.append(
                SimulatedTask(
                    f"gather {i}", "communicating", wire, gathering[unit.nbytes], (computed[max(0, step - 1)],)
                )
            )
            needs.append(len(tasks) - 1)
        tasks.append(SimulatedTask(name, "computing", device, unit.backward if back else unit.forward, tuple(needs)))
        computed.append(len(tasks) - 1)
        if back and unit.nbytes:
            sent = scattering[unit.nbytes]
            tasks.append(SimulatedTask(f"scatter {i}", "communicating", wire, sent, (computed[-1],), order=1.0))
    tasks.append(
        SimulatedTask("scatter the rest", "communicating", wire, scatter(layout, root), (computed[-1],), order=1.0)
    )
    spans = simulate(tasks)
    return makespan(spans) - sum(unit.forward + unit.backward for unit in parts), spans
