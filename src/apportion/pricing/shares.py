"""What the ranks of a layout compute of a batch, each with rows of its own, and how long they wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from apportion.cluster import Device
from apportion.pricing.layout import Layout
from apportion.pricing.slowest import slowest
from apportion.profile import Profile, Seconds


@dataclass(frozen=True)
class Computed:
    """By all ranks at once; means over them."""

    forward: float
    backward: float
    loading: float
    waiting: float
    """For the slowest of them: it has more rows or a slower device, or was unlucky."""

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def dealt(batch_size: int, ranks: int) -> list[int]:
    """The rows of each rank: they differ by one at most."""
    small, larger = divmod(batch_size, ranks)
    return [small + (rank < larger) for rank in range(ranks)]


def by_speed(profile: Profile, layout: Layout) -> list[float]:
    """The rows of each rank where all are to be ready at the same time."""
    even = profile.batch_size / layout.ranks
    speeds = [1.0 / seconds.both for seconds in _each(profile, layout, [even] * layout.ranks)]
    return [profile.batch_size * speed / sum(speeds) for speed in speeds]


def computed(
    profile: Profile, layout: Layout, rows: Sequence[float], *, parts: int = 1, between: float = 1.0
) -> Computed:
    """Forward and backward of so many rows on each rank, in so many parts one after the other; then they meet, or after
    so many of these (``between``): what is chance evens out meanwhile."""
    n = layout.ranks
    loading = [profile.loading_seconds * each for each in rows]
    seconds = [one.times(parts) for one in _each(profile, layout, [each / parts for each in rows])]
    forward, backward = (sum(each) / n for each in zip(*seconds, strict=True))
    spread = max(layout.device(rank).spread for rank in layout.kinds) / between**0.5
    longest = max(load + one.both for load, one in zip(loading, seconds, strict=True))
    mean = sum(loading) / n
    waiting = longest * slowest(n, spread) - mean - forward - backward if n > 1 else 0.0
    return Computed(forward, backward, mean, max(0.0, waiting))


def _each(profile: Profile, layout: Layout, rows: Sequence[float]) -> list[Seconds]:
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
    """The same network, whose batch has so many rows: times by rows stay, what is of the whole batch grows with it."""
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


def updating(profile: Profile, layout: Layout, nbytes: float | None = None, *, fused: bool = False) -> float:
    """Seconds until every rank has updated so many bytes of weights (None: all), or ``fused``, by torch's kernels."""
    return max(
        profile.update_seconds(
            layout.device(rank), threads=layout.threads, together=layout.together(rank), nbytes=nbytes, fused=fused
        )
        for rank in layout.kinds
    )


def memory_rate(layout: Layout) -> float:
    """Bytes a second that each rank reads and writes while all do; of the slowest."""
    return min(layout.device(r).rate(layout.threads, layout.together(r)).bytes_per_second for r in layout.kinds)


def call_seconds(layout: Layout) -> float:
    """To begin an operation, where that takes longest."""
    return max(layout.device(rank).call_seconds for rank in layout.kinds)


def layer_seconds(
    profile: Profile, layout: Layout, rows: float, forward: float, backward: float
) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of each layer, which add up to these: of the whole network, which has overheads
    that its layers by themselves have not, or the other way round."""
    device, together = layout.device(0), layout.together(0)
    each = profile.layers_seconds(device, rows=rows, threads=layout.threads, together=together)
    return _scaled([one.forward for one in each], forward), _scaled([one.backward for one in each], backward)


def _scaled(parts: Sequence[float], total: float) -> list[float]:
    known = sum(parts)
    return [total * part / known if known else total / len(parts) for part in parts]
