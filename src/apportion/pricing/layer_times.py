"""How long each layer takes on each rank of a layout, so that together they take as long as the whole network does.

Layers are timed one by one, and the network as a whole: what one call costs more, or less, inside of a network (caches,
the loss) is dealt out over its layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from apportion.pricing.layout import Layout
from apportion.pricing.slowest import slowest
from apportion.profile import LayerProfile, Profile, Seconds


class LayerTimes:
    """Of a profile's layers, on the kind of place that a rank of a layout has."""

    def __init__(self, profile: Profile, layout: Layout, rank: int = 0) -> None:
        self._profile, self._device = profile, layout.device(rank)
        self._threads, self._together = layout.threads, layout.together(rank)
        self._fit = lru_cache(maxsize=None)(self._fitted)

    @property
    def call(self) -> float:
        """Seconds to begin one operation: what our own bookkeeping is counted in."""
        return self._device.call_seconds

    def of(self, layer: LayerProfile, rows: float, *, way: str = "", share: float = 1.0) -> Seconds:
        """A layer, or a part of it."""
        fit = self._fit(rows)
        found = self._alone(layer, rows, way, share)
        return Seconds(found.forward * fit.forward, found.backward * fit.backward)

    def each(self, rows: float) -> list[Seconds]:
        """Every layer, whole."""
        fit = self._fit(rows)
        return [Seconds(found.forward * fit.forward, found.backward * fit.backward) for found in self._each_alone(rows)]

    def update(self, nbytes: float, *, fused: bool = False) -> float:
        """Of so many bytes of weights; ``fused``: by torch's fused kernels, where the optimizer has them."""
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
        """What the network takes, of the sum of its layers."""
        profile = self._profile
        if not profile.passes or rows <= 0:
            return Seconds(1.0, 1.0)
        each = self._each_alone(rows)
        whole = profile.network_seconds(self._device, rows=rows, threads=self._threads, together=self._together)
        forward, backward = sum(s.forward for s in each), sum(s.backward for s in each)
        return Seconds(
            whole.forward / forward if forward > 0 else 1.0, whole.backward / backward if backward > 0 else 1.0
        )


def times(profile: Profile, layout: Layout) -> list[LayerTimes]:
    """Of every rank; ranks in the same kind of place have them in common."""
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


def chance(layout: Layout) -> float:
    """What ranks that meet lose to whoever is slowest by chance, of the time that they compute."""
    return slowest(layout.ranks, max(layout.device(rank).spread for rank in layout.kinds)) - 1.0


def exposed(layout: Layout, a: int, b: int) -> float:
    """Share of a transfer between two ranks that no computing hides."""
    return 1.0 - layout.cluster.link(layout.devices[a], layout.devices[b]).hidden


def held(profile: Profile, layout: Layout, weights: float, activations: float, *, share: float = 0.0) -> dict[str, int]:
    """Memory of a rank with so many bytes of weights and activations. Where all ranks are on one host, two copies of
    its part besides outlive it (``parallel/kept_parts.py``). ``share``: of the buffers; 0: as of the weights."""
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
    """Of the rank that holds most."""
    return max(memories, key=lambda memory: sum(memory.values()))
