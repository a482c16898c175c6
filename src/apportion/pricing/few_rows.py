"""What strategies save that multiply with few rows: their products have a form of their own (``parallel/products.py``),
and the times of a profile are those of torch's."""

from __future__ import annotations

from collections.abc import Iterable

from apportion.profile import LayerProfile, Seconds

SMALL_BYTES = 4 << 16
"""Of a weight: below, the usual form is as fast."""
SHARES = ((48, 0.72, 1.0), (96, 0.88, 0.63), (192, 1.0, 0.75))
"""(fewer rows than so many, share of the forward time, of the backward time), after the table in
``parallel/products.py``."""


def suited(layer: LayerProfile, rows: float) -> Seconds:
    """Shares of a layer's usual times that are left on a CPU."""
    if layer.kind == "Linear" and layer.parameter_bytes >= SMALL_BYTES:
        for most, forward, backward in SHARES:
            if rows < most:
                return Seconds(forward, backward)
    return Seconds(1.0, 1.0)


def saved(layers: Iterable[LayerProfile], forward: Iterable[float], backward: Iterable[float], rows: float) -> Seconds:
    """Seconds, of layers that take so long in the usual form."""
    ahead = back = 0.0
    for layer, f, b in zip(layers, forward, backward, strict=True):
        share = suited(layer, rows)
        ahead, back = ahead + f * (1 - share.forward), back + b * (1 - share.backward)
    return Seconds(ahead, back)
