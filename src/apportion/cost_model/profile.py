"""The profile of a workload: what a step computes and how long that takes, as plain data. With it, and a cluster, a
plan needs neither the model nor the machines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from apportion.cost_model.cluster import Device, Rate
from apportion.cost_model.json_file import JsonFile
from apportion.cost_model.rollouts import RolloutTimes


class Seconds(NamedTuple):
    """The seconds of a forward and of a backward pass."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """The seconds of both passes, one after the other."""
        return self.forward + self.backward

    def times(self, factor: float) -> Seconds:
        """The seconds of both passes, times a factor."""
        return Seconds(self.forward * factor, self.backward * factor)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A layer, or a part of it, timed on this many rows, in each of ``together`` workers at once."""

    rows: float
    threads: int = 1
    together: int = 1
    way: str = ""
    """The way in which the layer was cut: ``""`` not at all; ``units`` (output features, heads, hidden units,
    vocabulary, output channels), ``inputs`` (input features), ``height`` or ``width`` (a strip of the image), ``layer``
    (one layer of a recurrent stack), ``chunk`` (a stretch of its time steps)."""
    share: float = 1.0
    """The share of the layer that was timed."""
    forward: float
    backward: float

    def __post_init__(self) -> None:
        _not_below(0, forward=self.forward, backward=self.backward)
        _not_below(1, threads=self.threads, together=self.together)
        if self.rows <= 0 or not 0 < self.share <= 1:
            raise ValueError(f"rows={self.rows}, share={self.share}: some rows were timed, of a share up to 1")


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One call of a layer, in order of execution; bytes and FLOPs are of the whole batch."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    """The names of the layers that the layer takes its inputs from; those before the first are the network's
    arguments."""
    parameter_bytes: int
    activation_bytes: int
    """The bytes of the layer's outputs."""
    kept_bytes: int
    """The bytes that the layer keeps for the backward pass."""
    flops: float
    """The FLOPs of the forward pass."""
    timings: tuple[Timing, ...] = ()
    ways: tuple[str, ...] = ()
    """The ways in which the layer can be cut, see ``Timing.way``."""
    stack: int = 1
    """The number of layers inside a recurrent stack."""
    length: int = 1
    """The number of time steps of a recurrent layer."""
    image: tuple[int, int, int] | None = None
    """The height of the input, the height of the kernel and the stride, of a layer that moves a window over an
    image."""
    across: tuple[int, int, int] | None = None
    """The width of the input, the width of the kernel and the stride, where they differ from the height's; None: as
    ``image``."""
    groups: int = 1
    """The number of groups of a convolution, whose filters each look at one of them."""

    def __post_init__(self) -> None:
        _not_below(0, parameter_bytes=self.parameter_bytes, activation_bytes=self.activation_bytes)
        _not_below(0, kept_bytes=self.kept_bytes, flops=self.flops)
        _not_below(1, stack=self.stack, length=self.length)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The times of the whole network, forward, loss and backward, on this many rows, in each of ``together`` workers at
    once."""

    rows: float
    threads: int = 1
    together: int = 1
    forward: float
    backward: float
    update: float
    """The seconds of an update of all weights by the workload's optimizer."""
    fused_update: float | None = None
    """The seconds of an update of all weights by torch's fused kernels, as strategies that divide the weights run it;
    None: as ``update``."""
    without_core: float = 0.0
    """The share of the time in which a worker could have gone on and another program had its core."""

    def __post_init__(self) -> None:
        _not_below(0, forward=self.forward, backward=self.backward, update=self.update)
        _not_below(1, threads=self.threads, together=self.together)
        if self.rows <= 0:
            raise ValueError(f"rows={self.rows}: some rows were timed")


@dataclass(frozen=True, kw_only=True)
class Profile(JsonFile):
    """The profile of a workload's step."""

    name: str
    """The name of the network that was profiled."""
    batch_size: int
    """The number of examples of an update."""
    layers: tuple[LayerProfile, ...]
    """The layers in the order of the forward pass, each with its times and sizes."""
    device: str
    """The model of the device that the times are from."""
    passes: tuple[Pass, ...] = ()
    """The times of whole forward and backward passes by the number of rows."""
    slots: int = 1
    """The count of numbers that the optimizer keeps for each weight."""
    buffer_bytes: int = 0
    """The bytes of the model's buffers."""
    loading_seconds: float = 0.0
    """The seconds to gather one example's row."""
    examples: int | None = None
    """The number of examples in the training set."""
    frames: int = 0
    """The number of steps of environments in an example; 0: the network does not make its examples by what it does."""
    environment_seconds: float = 0.0
    """The seconds of an example in the environments; with ``acting_seconds`` they are ``loading_seconds``, nearly."""
    acting_seconds: float = 0.0
    """The seconds of an example in which the network acts."""
    rollouts: RolloutTimes | None = None
    """What examples of other sizes take, where the network makes them; None: that was not measured."""
    batch_norm: bool = False
    """Does a layer look at the whole batch?"""
    cut_by_rows: bool = True
    """Is the loss a mean over examples, so that a batch can be dealt out?"""
    own_update: bool = False
    """Has the workload an ``update`` of its own?"""
    accumulate: int = 1
    """The number of batches that the ``batch_size`` examples of an update are computed in."""
    averages: bool = False
    """Is an average of the weights kept beside them?"""
    carries: bool = False
    """Is a recurrent state carried from batch to batch?"""
    element_wise: bool = True
    """Does the optimizer treat each number by itself, so that its work can be divided anywhere?"""
    whole_updates: bool = False
    """Has the optimizer been asked for a fused kernel that goes through whole weights alone, not through weights that
    are spread over ranks?"""
    precision: str = "float32"
    """The precision of the training, as ``Workload.precision``."""
    untraceable: str | None = None
    """The reason why the network cannot be cut between its layers; None: it can."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"profile {self.name}: it has no layers")
        if self.batch_size < 1:
            raise ValueError(f"profile {self.name}: batch_size={self.batch_size}: a batch has at least one example")

    @cached_property
    def without_core(self) -> float:
        """The share of the time of measuring whole steps in which other programs held the cores."""
        return max((p.without_core for p in self.passes), default=0.0)

    @cached_property
    def parameter_bytes(self) -> int:
        """The bytes of all weights."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @cached_property
    def crossing_bytes(self) -> tuple[int, ...]:
        """The bytes that would go over a cut before each layer, of the whole batch: outputs used on its far side."""
        at = {layer.name: i for i, layer in enumerate(self.layers)}
        last = list(range(len(self.layers)))
        for i, layer in enumerate(self.layers):
            for name in layer.inputs:
                if name in at:
                    last[at[name]] = max(last[at[name]], i)
        change = [0] * (len(self.layers) + 1)
        for i, layer in enumerate(self.layers):
            if last[i] > i:
                change[i + 1] += layer.activation_bytes
                change[last[i] + 1] -= layer.activation_bytes
        crossing, now = [], 0
        for i in range(len(self.layers)):
            now += change[i]
            crossing.append(now)
        return tuple(crossing)

    # Time

    def layer_seconds(  # noqa: PLR0913 (what a time depends on)
        self,
        layer: LayerProfile,
        device: Device,
        *,
        rows: float,
        threads: int = 1,
        together: int = 1,
        way: str = "",
        share: float = 1.0,
    ) -> Seconds:
        """The seconds of a layer, or of a part of it, on this many rows: measured where the device is the profile's,
        else worked out."""
        if device.model == self.device and layer.timings:
            return self._measured(layer, device, rows, threads, together, way, share)
        return self._worked_out(layer, device, device.rate(threads, together), rows / self.batch_size * share, share)

    def layers_seconds(self, device: Device, *, rows: float, threads: int = 1, together: int = 1) -> list[Seconds]:
        """The seconds of each whole layer on this many rows."""
        native, rate, part = device.model == self.device, device.rate(threads, together), rows / self.batch_size
        return [
            self._measured(layer, device, rows, threads, together, "", 1.0)
            if native and layer.timings
            else self._worked_out(layer, device, rate, part, 1.0)
            for layer in self.layers
        ]

    def network_seconds(self, device: Device, *, rows: float, threads: int = 1, together: int = 1) -> Seconds:
        """The seconds of all layers and the loss, one after the other."""
        if rows <= 0:
            return Seconds(0.0, 0.0)
        passes = self._passes(device, threads, together)
        if passes:
            return Seconds(
                interpolated([(p.rows, p.forward) for p in passes], rows),
                interpolated([(p.rows, p.backward) for p in passes], rows),
            )
        each = self.layers_seconds(device, rows=rows, threads=threads, together=together)
        return Seconds(sum(s.forward for s in each), sum(s.backward for s in each))

    def update_seconds(
        self,
        device: Device,
        *,
        threads: int = 1,
        together: int = 1,
        nbytes: float | None = None,
        fused: bool = False,
    ) -> float:
        """The seconds of an update of this many bytes of weights (None: of all), by the workload's optimizer, or
        ``fused``."""
        share = 1.0 if nbytes is None else nbytes / max(1, self.parameter_bytes)
        passes = self._passes(device, threads, together)
        if passes:
            best = (p.update if not fused or p.fused_update is None else p.fused_update for p in passes)
            return min(best) * share
        rate = device.rate(threads, together).bytes_per_second
        moved = self.parameter_bytes * (3 + 2 * self.slots)  # weights twice, gradients once, slots twice
        return moved / rate * share + device.call_seconds

    def _passes(self, device: Device, threads: int, together: int) -> list[Pass]:
        if device.model != self.device:
            return []
        return [p for p in self.passes if (p.threads, p.together) == (threads, together)]

    def _measured(  # noqa: PLR0913
        self,
        layer: LayerProfile,
        device: Device,
        rows: float,
        threads: int,
        together: int,
        way: str,
        share: float,
    ) -> Seconds:
        if rows <= 0:
            return Seconds(0.0, 0.0)
        same = [t for t in layer.timings if (t.threads, t.together) == (threads, together)]
        factor = 1.0
        if not same:  # another layout: by what the device reaches on each
            near = min(layer.timings, key=lambda t: (abs(t.threads * t.together - threads * together), t.together))
            same = [t for t in layer.timings if (t.threads, t.together) == (near.threads, near.together)]
            factor = device.rate(near.threads, near.together).flops / device.rate(threads, together).flops
        cut = [t for t in same if t.way == way and abs(t.share - share) < 1e-6] if share != 1.0 else []
        if not cut:  # a share that was not timed: between the whole and the nearest that was
            cut = [t for t in same if not t.way and t.share == 1.0]
            nearer = [t for t in same if t.way == way and t.share < 1.0]
            if share != 1.0 and nearer:
                known = min(nearer, key=lambda t: abs(t.share - share)).share
                part = [t for t in nearer if t.share == known]
                whole = _at(cut, rows)
                some = _at(part, rows)
                return Seconds(
                    max(0.0, interpolated([(known, some.forward), (1.0, whole.forward)], share)) * factor,
                    max(0.0, interpolated([(known, some.backward), (1.0, whole.backward)], share)) * factor,
                )
            factor *= share
        return _at(cut, rows).times(factor)

    @staticmethod
    def _worked_out(layer: LayerProfile, device: Device, rate: Rate, part: float, share: float) -> Seconds:
        """The seconds of a layer by the device's rates: as long as its products take, or its bytes; and a call, which a
        GPU's host makes while the operation before it is still computed. ``part``: the share of the batch and of the
        layer; ``share``: the share of the layer."""
        nbytes = 2 * layer.activation_bytes * part + layer.parameter_bytes * share
        forward = max(layer.flops * part / rate.flops, nbytes / rate.bytes_per_second)
        call = device.call_seconds
        if device.kind == "cuda":
            return Seconds(max(forward, call), 2 * max(forward, call))
        return Seconds(forward + call, 2 * (forward + call))


def _not_below(least: float, **given: float) -> None:
    for name, value in given.items():
        if value < least:
            raise ValueError(f"{name}={value} is below {least:g}")


def _at(timings: list[Timing], rows: float) -> Seconds:
    return Seconds(
        interpolated([(t.rows, t.forward) for t in timings], rows),
        interpolated([(t.rows, t.backward) for t in timings], rows),
    )


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value between the nearest two points of the raw table; outside of the table the value on the line through the
    last two points, and no steeper downwards than the line through zero."""
    known = sorted(dict(points).items())  # of two at the same place one counts: they give no line
    if len(known) == 1:
        return known[0][1] * at / known[0][0]
    low, high = next(
        ((a, b) for a, b in _pairs(known) if a[0] <= at <= b[0]),
        (known[0], known[1]) if at < known[0][0] else known[-2:],
    )
    value = low[1] + (high[1] - low[1]) * (at - low[0]) / (high[0] - low[0])
    if at < known[0][0]:
        return max(value, known[0][1] * at / known[0][0])
    return max(value, known[-1][1]) if at > known[-1][0] else value


def _pairs(points: list[tuple[float, float]]) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    return itertools.pairwise(points)
