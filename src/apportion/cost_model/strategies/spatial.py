"""The price of a network whose images lie on the ranks in strips, or by channels: halos, sums, and the rest, which all
ranks compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from apportion.cost_model.cluster import Placement
from apportion.cost_model.collectives import all_gather, all_reduce, message, reduce_scatter
from apportion.cost_model.compute import LayerTimes, exposed, memory_rate
from apportion.cost_model.cost import Span
from apportion.cost_model.profile import LayerProfile, Profile
from apportion.cost_model.simulator import SimulatedTask, simulate, terms
from apportion.cost_model.strategies.tensor import is_elementwise

EDGE_CALLS = 60.0
"""The overhead of a convolution on a strip each way besides its own rows, in calls: halos sent, received and added, and
a small convolution at each edge. It is an estimate."""


COPIES = 4.0
"""The number of times each way that the input of a convolution is read or written besides: halos are laid beside a
rank's own rows, and what its inside and its edges give is laid side by side; of channels, the sums are."""


@dataclass(frozen=True)
class Images:
    """The layers of a network that work on images."""

    cut: int
    """The number of layers that work on images, from the first."""
    first: int
    """The first layer that looks at neighbours."""
    joined: int | None
    """The Linear layer after the images, whose inputs are divided; None: none follows, or an average pool before it."""


def images(profile: Profile, way: str) -> Images | None:
    """The layers that work on images; None where no layer moves a window over an image that can be cut this way."""
    moving = [i for i, layer in enumerate(profile.layers) if layer.image is not None]
    if not any(way in profile.layers[i].ways for i in moving):
        return None
    end = moving[-1] + 1
    pooled = False
    while end < len(profile.layers) and _stays(profile.layers[end]):
        pooled = pooled or "AvgPool" in profile.layers[end].kind
        end += 1
    joined = None
    if end < len(profile.layers) and not pooled and profile.layers[end].kind == "Linear":
        joined = end
    return Images(end, moving[0], joined)


def _stays(layer: LayerProfile) -> bool:
    """Does the layer leave an image an image, or make a vector of it?"""
    return is_elementwise(layer) or any(word in layer.kind.lower() for word in ("pool", "norm", "flatten", "view"))


@dataclass
class Strips:
    """The price of one rank: its timeline, its terms, and the bytes of its weights and activations."""

    spans: tuple[Span, ...]
    terms: dict[str, float]
    weights: float
    activations: float


def spatial(profile: Profile, layout: Placement, own: LayerTimes, found: Images, *, columns: bool = False) -> Strips:
    """The price of dividing the rows of every image, or its ``columns``, which take as long to compute as a strip of as
    many rows. All ranks do the same at the same time: the one with most rows is shown."""
    run = _LayerRun(profile, layout, own, columns=columns)
    n = layout.ranks
    for back in (False, True):
        for i, layer in reversed(list(enumerate(profile.layers))) if back else enumerate(profile.layers):
            if i < found.cut:
                run.layer(layer, run.share(layer), "height", halo=True, back=back)
            else:
                run.layer(layer, 1.0 / n if i == found.joined else 1.0, "inputs", halo=False, back=back)
            if i == found.joined and not back:
                run.joined(layer)
    weights = sum(layer.parameter_bytes for layer in profile.layers[: found.cut])
    run.add("sum of gradients", "communicating", all_reduce(layout, range(n), weights), "link")
    return run.done(found, all_weights=True)


How = Literal["column", "row", "groups", "gathered", "alike"]
"""The way in which a convolution is divided: with some of the filters on each rank, looking at all channels; with all
filters, looking at some of the channels; with some of the groups; as a column, of channels that have to be gathered
first; whole on each rank, of channels that have to be gathered first."""


def channels(profile: Profile, layout: Placement, own: LayerTimes, found: Images, *, groups: bool = False) -> Strips:
    """The price of dividing the channels, as ``parallel/spatial/channels.py`` does: convolutions cut by their filters,
    then by their input channels, in turn, with a sum after each two; with ``groups`` all by their filters, and gathered
    before the next, but for those whose groups the ranks share, which send nothing. ValueError where there are no
    groups, or too few."""
    if groups:
        _must_have_groups(profile, layout)
    run = _LayerRun(profile, layout, own)
    ranks, n = range(layout.ranks), layout.ranks
    in_slices, how = _channels(profile, found, n, groups=groups)
    for i, layer in enumerate(profile.layers):
        if how.get(i) in ("gathered", "alike"):
            run.add(f"channels for {layer.name}", "communicating", all_gather(layout, ranks, run.given(layer)), "link")
            run.copied(layer, run.given(layer))
        run.layer(layer, 1.0 / n if i in in_slices else 1.0, _way(how.get(i)), halo=False)
        if how.get(i) == "row":
            run.add(f"sum of {layer.name}", "communicating", all_reduce(layout, ranks, layer.activation_bytes), "link")
            run.copied(layer, layer.activation_bytes)
        if i == found.joined and i in in_slices:
            run.joined(layer)
    for i, layer in reversed(list(enumerate(profile.layers))):
        run.layer(layer, 1.0 / n if i in in_slices else 1.0, _way(how.get(i)), halo=False, back=True)
        nbytes, name = run.given(layer), f"gradient of {layer.name}"
        if i > found.first and _whole_before(i, layer, how, in_slices, profile):
            run.add(name, "communicating", all_reduce(layout, ranks, nbytes), "link")
            run.copied(layer, nbytes)
        elif how.get(i) == "gathered":
            run.add(name, "communicating", reduce_scatter(layout, ranks, nbytes), "link")
            run.copied(layer, nbytes)
    return run.done(found, all_weights=False, in_slices=in_slices)


def _way(how: How | None) -> str:
    return "inputs" if how in (None, "row") else "units"


def _whole_before(at: int, layer: LayerProfile, how: Mapping[int, How], in_slices: set[int], profile: Profile) -> bool:
    """Does each rank compute a result of its own from inputs that all ranks have? The gradient of these inputs is then
    a sum."""
    if how.get(at) == "column":
        return True
    places = {other.name: i for i, other in enumerate(profile.layers)}
    given = [places.get(name, -1) for name in layer.inputs]
    return how.get(at) == "groups" and not any(i in in_slices and how.get(i) != "row" for i in given)


def _must_have_groups(profile: Profile, layout: Placement) -> None:
    many = [layer.groups for layer in profile.layers if layer.groups > 1]
    if not many:
        raise ValueError('the network has no convolution with groups: use split="channel", or data_parallel')
    if min(many) < layout.ranks:
        raise ValueError(
            f"groups={min(many)} cannot be shared by {layout.ranks} workers: "
            f'use workers<={min(many)}, or split="channel"'
        )


def _channels(profile: Profile, found: Images, ranks: int, *, groups: bool) -> tuple[set[int], dict[int, How]]:
    """The layers that work on channels of their own, and how convolutions are cut. Where a convolution has fewer groups
    than there are ranks, every rank computes all of it."""
    in_slices: set[int] = set()
    how: dict[int, How] = {}
    whole = True
    for i, layer in enumerate(profile.layers[: found.cut]):
        if layer.image is not None and layer.parameter_bytes:
            if 1 < layer.groups < ranks:
                how |= {} if whole else {i: "alike"}
                whole = True
                continue
            if layer.groups > 1:
                how[i] = "groups"
            elif whole:
                how[i] = "column"
            else:
                how[i] = "gathered" if groups else "row"
            in_slices.add(i)
            whole = how[i] == "row"
        elif not whole:
            in_slices.add(i)
    if found.joined is not None and not whole:
        in_slices.add(found.joined)
    return in_slices, how


class _LayerRun:
    """The tasks of a rank, one layer after the other."""

    def __init__(self, profile: Profile, layout: Placement, own: LayerTimes, *, columns: bool = False) -> None:
        self._profile, self._layout, self._own, self._columns = profile, layout, own, columns
        self._by_name = {layer.name: layer for layer in profile.layers}
        self._tasks: list[SimulatedTask] = []
        self._last: tuple[int, ...] = ()
        self._norms = 0

    def side(self, layer: LayerProfile) -> tuple[int, int, int] | None:
        """The length in the image, the length in the window and the stride of the dimension that is divided."""
        return layer.across or layer.image if self._columns else layer.image

    def share(self, layer: LayerProfile) -> float:
        """The share of a layer that the rank with most rows has."""
        side = self.side(layer)
        return 1.0 / self._layout.ranks if side is None else math.ceil(side[0] / self._layout.ranks) / side[0]

    def given(self, layer: LayerProfile) -> float:
        """The bytes of a layer's inputs; the network's arguments count as none."""
        return sum(self._by_name[name].activation_bytes for name in layer.inputs if name in self._by_name)

    def add(self, name: str, kind: str, seconds: float, on: str = "rank 0") -> None:
        """Add a task that everything after it waits for."""
        if seconds > 0:
            self._tasks.append(SimulatedTask(name, kind, (on,), seconds, self._last))
            self._last = (len(self._tasks) - 1,)

    def layer(self, layer: LayerProfile, share: float, way: str, *, halo: bool, back: bool = False) -> None:
        """Add one way through a layer; where its window needs them, with rows of the neighbours that arrive
        meanwhile."""
        both = self._own.of(layer, self._profile.batch_size, way=way if share < 1.0 else "", share=share)
        seconds = both.backward if back else both.forward
        name = f"{layer.name}, backward" if back else layer.name
        side = self.side(layer)
        rows = (side[1] - 1) / 2 if halo and side is not None else 0.0
        travels = self._halo(layer, rows)
        before = self._last
        self.add(name, "computing", seconds)
        if rows > 0 and side is not None and self._layout.ranks > 1:
            share_open = exposed(self._layout, 0, 1)
            if travels * (1 - share_open) > 0:
                self._tasks.append(
                    SimulatedTask(f"halo of {name}", "communicating", ("link",), travels * (1 - share_open), before)
                )
                self._last = (*self._last, len(self._tasks) - 1)
            self.add(f"halo of {name}", "communicating", travels * share_open)
            self.copied(layer, self.given(layer) / self._layout.ranks)
            edges = 2 if self._layout.ranks > 2 else 1
            at_edge = both.backward if back else both.forward
            self.add(
                f"edges of {name}",
                "computing",
                edges * (EDGE_CALLS * self._own.call + at_edge * min(1.0, rows / (share * side[0]))),
            )
        if halo and "BatchNorm" in layer.kind:  # statistics of the whole image: two numbers a channel
            self.add(f"statistics of {name}", "communicating", all_reduce(self._layout, range(self._layout.ranks), 64))

    def copied(self, layer: LayerProfile, nbytes: float) -> None:
        """Add the time of laying together what came and what was there."""
        self.add(f"copies of {layer.name}", "computing", COPIES * nbytes / memory_rate(self._layout))

    def joined(self, layer: LayerProfile) -> None:
        """Add the sum of the outputs of a Linear layer that was given parts of its inputs."""
        ranks = range(self._layout.ranks)
        self.add(
            f"sum of {layer.name}", "communicating", all_reduce(self._layout, ranks, layer.activation_bytes), "link"
        )

    def _halo(self, layer: LayerProfile, rows: float) -> float:
        """Seconds of the rows that come from each neighbour: those of both neighbours come at once."""
        side = self.side(layer)
        if rows <= 0 or side is None or self._layout.ranks < 2:
            return 0.0
        nbytes = self.given(layer) / side[0] * rows
        at_once = 2 if self._layout.ranks > 2 else 1
        return max(
            message(self._layout, a, a + 1, nbytes, at_once=at_once) for a in range(min(self._layout.ranks - 1, 8))
        )

    def done(self, found: Images, *, all_weights: bool, in_slices: Sequence[int] | set[int] = ()) -> Strips:
        """Simulate the tasks, and return the price of the rank."""
        spans, n = simulate(self._tasks), self._layout.ranks
        weights = activations = 0.0
        for i, layer in enumerate(self._profile.layers):
            part = i < found.cut if all_weights else i in in_slices
            cut = (not all_weights and part) or i == found.joined
            weights += layer.parameter_bytes / (n if cut else 1)
            activations += layer.kept_bytes / (n if part else 1)
        return Strips(spans, terms(spans, "rank 0"), weights, activations)
