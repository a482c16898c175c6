"""How a net is quantized, chosen by its outputs on the calibration examples: where the ranges of activations end, and
which layers stay in float."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from apportion.core.workload import accuracy
from apportion.exporting.onnxruntime_session import session
from apportion.exporting.quantization import quantizers
from apportion.exporting.quantization.graph import WeightedLayer, layers, why_dynamic

RANGED = 256
"""The largest number of calibration examples that the ranges of activations are taken from."""
RANKED = 64
"""The number of calibration examples by whose outputs ranges are compared, and layers are put in order."""
NOISE = 0.01
"""The largest error of the outputs, as its energy over theirs, where the targets are no classes: 20 dB."""

L = TypeVar("L")
Feeds = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class QuantizedModel:
    """A quantized model, and how it was chosen."""

    model: Any
    """The quantized graph, an ``onnx.ModelProto``."""
    dynamic: str | None
    """Why its activations are quantized as it runs; None: their ranges are fixed."""
    ranges: str | None
    """Where the fixed ranges end: "min-max", or a percentile."""
    weight_bits: int
    quantized: tuple[str, ...]
    """The layers that are int8."""
    kept: tuple[str, ...]
    """The layers that stay in float32."""
    lost: float
    """What the calibration examples lose: accuracy, or the energy of the error where their targets are no classes."""
    measure: str
    """Which of them: "accuracy" or "noise"."""


def quantized(model: Any, feeds: Feeds, targets: Any, *, weight_bits: int, most_lost: float) -> QuantizedModel:
    """Quantize a model with the layers in int8 that lose no more than that on the calibration examples, which are the
    inputs in ``feeds``, at most ``quantizers.AT_ONCE`` in each. ``most_lost``: of the accuracy, where the targets are
    classes. Raises ValueError where there is no layer to quantize, or none that may be."""
    dynamic = why_dynamic(model)
    every = layers(model)
    known = [one for one in every if not dynamic or one.kind in quantizers.DYNAMIC]
    if not known:
        raise ValueError(
            "the network has no layer with weights that int8 is defined for (convolutions, linear layers, LSTMs, "
            'embeddings): use precision="float32"'
        )
    judge = _CalibrationJudge(model, feeds, targets, most_lost)
    name, quantize = None, functools.partial(quantizers.dynamic, model, weight_bits=weight_bits)
    if not dynamic:
        name, quantize = _best_ranges(model, feeds, weight_bits, judge)

    def made(kept: Sequence[WeightedLayer]) -> Any:
        return quantize(kept=[one.node for one in kept])

    def alone(one: WeightedLayer) -> float:
        """The error of the outputs with this layer alone in int8."""
        return judge.noise(made([other for other in known if other != one]))

    kept = fewest_kept(known, alone, lambda some: judge.lost(made(some)) <= judge.most)
    if len(kept) == len(known):
        raise ValueError(
            f"with any layer in int8 the network loses more than {judge.most:g} of its {judge.measure} on the "
            f'calibration examples: allow more by most_lost=, or use precision="float16"'
        )
    result = made(kept)
    return QuantizedModel(
        model=result,
        dynamic=dynamic,
        ranges=name,
        weight_bits=weight_bits,
        quantized=tuple(one.name for one in known if one not in kept),
        kept=tuple(one.name for one in every if one in kept or one not in known),
        lost=judge.lost(result),
        measure=judge.measure,
    )


def _best_ranges(
    model: Any, feeds: Feeds, weight_bits: int, judge: _CalibrationJudge
) -> tuple[str, functools.partial[Any]]:
    """The ranges of activations with which the outputs differ least, and what quantizes with them."""
    found = {
        how: functools.partial(quantizers.static, model, one, weight_bits=weight_bits)
        for how, one in quantizers.ranges(model, list(_first(feeds, RANGED))).items()
    }
    noise = {how: judge.noise(quantize(kept=[])) for how, quantize in found.items()}
    name = min(noise, key=lambda how: noise[how])
    return name, found[name]


def fewest_kept(known: Sequence[L], error: Callable[[L], float], holds: Callable[[Sequence[L]], bool]) -> list[L]:
    """Return the layers that stay in float: the most sensitive ones, as few of them as ``holds`` asks for; all of them
    where it asks for that. ``error``: that of a layer that is quantized alone."""
    if holds([]):
        return []
    errors = [error(one) for one in known]
    order = [known[at] for at in sorted(range(len(known)), key=lambda at: -errors[at])]
    few, enough = 0, 1
    while enough < len(order) and not holds(order[:enough]):
        few, enough = enough, min(2 * enough, len(order))
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if holds(order[:middle]) else (middle, enough)
    return order[:enough]


class _CalibrationJudge:
    """What the calibration examples say of a quantized model, beside the float one."""

    def __init__(self, model: Any, feeds: Feeds, targets: Any, most_lost: float) -> None:
        self._feeds, self._few = feeds, list(_first(feeds, RANKED))
        self._own = _outputs(model, feeds)
        self._targets = targets
        self.measure = "accuracy" if _classes(self._own, targets) else "noise"
        self.most = most_lost if self.measure == "accuracy" else NOISE

    def lost(self, made: Any) -> float:
        """What all examples lose, by ``measure``."""
        found = _outputs(made, self._feeds)
        if self.measure == "noise":
            return _noise(self._own, found)
        before, after = (float(accuracy(torch.from_numpy(x[0]), self._targets)) for x in (self._own, found))
        return before - after

    def noise(self, made: Any) -> float:
        """The energy of the error of the outputs over that of the outputs, on a few examples."""
        return _noise(self._own, _outputs(made, self._few))


def _outputs(model: Any, feeds: Feeds) -> list[Any]:
    """Each output of a model for all examples, by ONNX Runtime on this machine."""
    made = session(model.SerializeToString(), threads=torch.get_num_threads())
    found = [made.run(None, feed) for feed in feeds]
    return [np.concatenate(one) if one[0].ndim else np.stack(one) for one in zip(*found, strict=True)]


def _noise(own: Sequence[Any], found: Sequence[Any]) -> float:
    """The energy of the error over that of the outputs, of the output that is worst."""
    worst = 0.0
    for expected, x in zip(own, found, strict=True):
        a, b = expected[: len(x)].astype(np.float64), x.astype(np.float64)
        worst = max(worst, float(np.square(a - b).sum() / max(np.square(a).sum(), 1e-30)))
    return worst if np.isfinite(worst) else float("inf")


def _classes(outputs: Sequence[Any], targets: Any) -> bool:
    """True where the targets are the classes that the one output has a number for each of."""
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point() or targets.dtype == torch.bool:
        return False
    if len(outputs) != 1 or outputs[0].ndim < 2:
        return False
    return bool(outputs[0].shape[:1] + outputs[0].shape[2:] == tuple(targets.shape))


def _first(feeds: Feeds, count: int) -> Iterator[Mapping[str, Any]]:
    """The feeds that hold the first examples, so many of them at least where there are."""
    seen = 0
    for feed in feeds:
        if seen >= count:
            return
        yield feed
        seen += len(next(iter(feed.values())))
