"""The seconds of each layer on each rank of a layout, which together take as long as the whole network does.

Layers are timed one by one, and the network as a whole: what one call costs more, or less, inside of a network (caches,
the loss) is dealt out over its layers.

Strategies that multiply with few rows save time, since their products have a form of their own
(``parallel/ops/matmul.py``) and the times of a profile are those of torch's. The ranks of a placement wait for each
other: a step takes as long as the slowest of n, whose expected time is about the (n - 0.375) / (n + 0.25) quantile of
normal times (Blom, "Statistical Estimates and Transformed Beta-Variables", 1958).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from apportion.cost_model.cluster import Device, Placement
from apportion.cost_model.profile import LayerProfile, Profile, Seconds


class LayerTimes:
    """The times of a profile's layers in the kind of place that a rank of a layout has."""

    def __init__(self, profile: Profile, layout: Placement, rank: int = 0) -> None:
        self._profile, self._device = profile, layout.device(rank)
        self._threads, self._together = layout.threads, layout.together(rank)
        self._fit = lru_cache(maxsize=None)(self._fitted)

    @property
    def call(self) -> float:
        """The seconds to begin one operation, in which our own bookkeeping is counted."""
        return self._device.call_seconds

    def of(self, layer: LayerProfile, rows: float, *, way: str = "", share: float = 1.0) -> Seconds:
        """The seconds of a layer, or of a part of it."""
        fit = self._fit(rows)
        found = self._alone(layer, rows, way, share)
        return Seconds(found.forward * fit.forward, found.backward * fit.backward)

    def each(self, rows: float) -> list[Seconds]:
        """The seconds of every whole layer."""
        fit = self._fit(rows)
        return [Seconds(found.forward * fit.forward, found.backward * fit.backward) for found in self._each_alone(rows)]

    def update(self, nbytes: float, *, fused: bool = False) -> float:
        """The seconds of an update of this many bytes of weights; ``fused``: by torch's fused kernels, where the
        optimizer has them."""
        if nbytes <= 0:
            return 0.0
        return self._profile.update_seconds(
            self._device, threads=self._threads, together=self._together, nbytes=nbytes, fused=fused
        )

    def _alone(self, layer: LayerProfile, rows: float, way: str = "", share: float = 1.0) -> Seconds:
        return self._profile.layer_seconds(
            layer, self._device, rows=rows, threads=self._threads, together=self._together, way=way, share=share
        )

    def _each_alone(self, rows: float) -> list[Seconds]:
        return self._profile.layers_seconds(self._device, rows=rows, threads=self._threads, together=self._together)

    def _fitted(self, rows: float) -> Seconds:
        """The ratio of the time that the network takes to the sum of its layers' times."""
        profile = self._profile
        if not profile.passes or rows <= 0:
            return Seconds(1.0, 1.0)
        each = self._each_alone(rows)
        whole = profile.network_seconds(self._device, rows=rows, threads=self._threads, together=self._together)
        forward, backward = sum(s.forward for s in each), sum(s.backward for s in each)
        return Seconds(
            whole.forward / forward if forward > 0 else 1.0, whole.backward / backward if backward > 0 else 1.0
        )


def times(profile: Profile, layout: Placement) -> list[LayerTimes]:
    """The layer times of every rank; ranks in the same kind of place have them in common."""
    known: dict[tuple[str, int, int, float], LayerTimes] = {}
    found = []
    for rank in range(layout.ranks):
        device = layout.device(rank)
        key = (
            device.model,
            device.cores,
            layout.together(rank),
            device.rate(layout.threads, layout.together(rank)).flops,
        )
        if key not in known:
            known[key] = LayerTimes(profile, layout, rank)
        found.append(known[key])
    return found


def chance(layout: Placement) -> float:
    """The share of their computing time that ranks which meet lose by waiting for the rank that is slowest by
    chance."""
    return slowest(layout.ranks, max(layout.device(rank).spread for rank in layout.kinds)) - 1.0


def exposed(layout: Placement, a: int, b: int) -> float:
    """The share of a transfer between two ranks that no computing hides."""
    return 1.0 - layout.cluster.link(layout.devices[a], layout.devices[b]).hidden


def held(
    profile: Profile, layout: Placement, weights: float, activations: float, *, share: float = 0.0
) -> dict[str, int]:
    """The memory of a rank with this many bytes of weights and activations, in bytes by what they hold. Where several
    ranks are all on one host, two more copies of its part outlive it (``parallel/partition/committed_shards.py``).
    ``share``: the share of the buffers; 0: the same share as of the weights."""
    copies = 3 if len(layout.hosts) == 1 and layout.ranks > 1 else 1
    own = weights / max(1, profile.parameter_bytes)
    return {
        "weights": round(copies * weights),
        "gradients": round(weights),
        "slots": round(copies * weights * profile.slots),
        "activations": round(activations),
        "buffers": round(copies * profile.buffer_bytes * (share or own)),
    }


def worst(memories: Iterable[dict[str, int]]) -> dict[str, int]:
    """The memory of the rank that holds most."""
    return max(memories, key=lambda memory: sum(memory.values()))


# Shares of a batch


@dataclass(frozen=True)
class Computed:
    """The seconds that all ranks spend on a batch at once, as means over the ranks."""

    forward: float
    backward: float
    loading: float
    waiting: float
    """The seconds of waiting for the slowest rank: it has more rows or a slower device, or was unlucky."""

    @property
    def both(self) -> float:
        """The seconds of the forward and backward pass together."""
        return self.forward + self.backward


def dealt(batch_size: int, ranks: int) -> list[int]:
    """The rows of each rank: they differ by one at most."""
    small, larger = divmod(batch_size, ranks)
    return [small + (rank < larger) for rank in range(ranks)]


def by_speed(profile: Profile, layout: Placement) -> list[float]:
    """The rows of each rank where all are to be ready at the same time."""
    even = profile.batch_size / layout.ranks
    speeds = [1.0 / seconds.both for seconds in _each(profile, layout, [even] * layout.ranks)]
    return [profile.batch_size * speed / sum(speeds) for speed in speeds]


def computed(
    profile: Profile, layout: Placement, rows: Sequence[float], *, parts: int = 1, between: float = 1.0
) -> Computed:
    """The seconds of forward and backward passes of ``rows`` on each rank, in ``parts`` parts one after the other. The
    ranks meet after each batch, or after ``between`` of them: differences by chance even out meanwhile."""
    n = layout.ranks
    loading = [profile.loading_seconds * each for each in rows]
    seconds = [one.times(parts) for one in _each(profile, layout, [each / parts for each in rows])]
    forward, backward = (sum(each) / n for each in zip(*seconds, strict=True))
    spread = max(layout.device(rank).spread for rank in layout.kinds) / between**0.5
    longest = max(load + one.both for load, one in zip(loading, seconds, strict=True))
    mean = sum(loading) / n
    waiting = longest * slowest(n, spread) - mean - forward - backward if n > 1 else 0.0
    return Computed(forward, backward, mean, max(0.0, waiting))


def _each(profile: Profile, layout: Placement, rows: Sequence[float]) -> list[Seconds]:
    known: dict[tuple[Device, int, float], Seconds] = {}
    found = []
    for rank, many in enumerate(rows):
        device, together = layout.device(rank), layout.together(rank)
        key = replace(device, name="", host=""), together, many
        if key not in known:
            known[key] = profile.network_seconds(device, rows=many, threads=layout.threads, together=together)
        found.append(known[key])
    return found


def of_rows(profile: Profile, rows: float) -> Profile:
    """The profile of the same network with a batch of ``rows`` rows: times by rows stay, what is of the whole batch
    grows with it."""
    share = rows / profile.batch_size
    layers = tuple(
        replace(
            layer,
            activation_bytes=round(layer.activation_bytes * share),
            kept_bytes=round(layer.kept_bytes * share),
            flops=layer.flops * share,
        )
        for layer in profile.layers
    )
    return replace(profile, batch_size=max(1, round(rows)), layers=layers)


def updating(profile: Profile, layout: Placement, nbytes: float | None = None, *, fused: bool = False) -> float:
    """Seconds until every rank has updated this many bytes of weights (None: all); ``fused``: by torch's fused
    kernels."""
    return max(
        profile.update_seconds(
            layout.device(rank), threads=layout.threads, together=layout.together(rank), nbytes=nbytes, fused=fused
        )
        for rank in layout.kinds
    )


def memory_rate(layout: Placement) -> float:
    """The bytes a second that the slowest rank reads and writes while all ranks do."""
    return min(layout.device(r).rate(layout.threads, layout.together(r)).bytes_per_second for r in layout.kinds)


def call_seconds(layout: Placement) -> float:
    """The seconds to begin an operation on the device where that takes longest."""
    return max(layout.device(rank).call_seconds for rank in layout.kinds)


def layer_seconds(
    profile: Profile, layout: Placement, rows: float, forward: float, backward: float
) -> tuple[list[float], list[float]]:
    """The forward and backward seconds of each layer, which add up to ``forward`` and ``backward`` of the whole
    network: it has overheads that its layers by themselves have not, or the other way round."""
    device, together = layout.device(0), layout.together(0)
    each = profile.layers_seconds(device, rows=rows, threads=layout.threads, together=together)
    return _scaled([one.forward for one in each], forward), _scaled([one.backward for one in each], backward)


def _scaled(parts: Sequence[float], total: float) -> list[float]:
    known = sum(parts)
    return [total * part / known if known else total / len(parts) for part in parts]


# Products of few rows
# (``parallel/ops/matmul.py``),


SMALL_BYTES = 4 << 16
"""The bytes of a weight below which the usual form of its products is as fast."""
SHARES = ((48, 0.72, 1.0), (96, 0.88, 0.63), (192, 1.0, 0.75))
"""The rows of a table of (fewer rows than this many, share of the forward time, share of the backward time), after the
table in ``parallel/ops/matmul.py``."""


def suited(layer: LayerProfile, rows: float) -> Seconds:
    """The shares of a layer's usual forward and backward times that are left on a CPU, where products of few rows have
    a form of their own."""
    if layer.kind == "Linear" and layer.parameter_bytes >= SMALL_BYTES:
        for most, forward, backward in SHARES:
            if rows < most:
                return Seconds(forward, backward)
    return Seconds(1.0, 1.0)


def saved(layers: Iterable[LayerProfile], forward: Iterable[float], backward: Iterable[float], rows: float) -> Seconds:
    """The seconds that products of few rows save, of layers that take so long in the usual form."""
    ahead = back = 0.0
    for layer, f, b in zip(layers, forward, backward, strict=True):
        share = suited(layer, rows)
        ahead, back = ahead + f * (1 - share.forward), back + b * (1 - share.backward)
    return Seconds(ahead, back)


# The slowest rank


def slowest(workers: int, spread: float) -> float:
    """The factor by which the slowest of this many workers takes longer, where their times have this relative standard
    deviation."""
    if workers < 2:
        return 1.0
    return 1.0 + spread * NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))
