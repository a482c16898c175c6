"""How a net is quantized, chosen by its outputs on the calibration examples: where the ranges of activations end, and
which layers stay in float."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from apportion.exporting.onnxruntime_session import session
from apportion.exporting.paired_loss import ComparedOutputs, PairedLoss, paired_loss
from apportion.exporting.quantization import quantizers
from apportion.exporting.quantization.graph import WeightedLayer, layers, outside, why_dynamic

RANGED = 256
"""The largest number of calibration examples that the ranges of activations are taken from."""
RANKED = 64
"""The number of calibration examples by whose outputs ranges are compared, and layers are put in order."""
NOISE = 0.01
"""The largest error of the outputs, as its energy over theirs: 20 dB."""
NOISE_NAME, ENERGY_NAME = "noise", "energy"

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
    """What the calibration examples lose: accuracy, a share of another metric, or the energy of the error."""
    measure: str
    """Which of them: the name of the metric, or ``NOISE_NAME``."""
    most_sensitive: Callable[[], str]
    """Returns the names of the int8 layers that make the largest errors alone."""


def quantized(model: Any, feeds: Feeds, task: CalibrationTask, *, weight_bits: int) -> QuantizedModel:
    """Quantize a model with the layers in int8 that lose no more than is allowed on the calibration examples, whose
    inputs are in ``feeds``, at most ``quantizers.AT_ONCE`` in each. Raises ValueError, with the names of layers, where
    no layer can or may be quantized."""
    dynamic = why_dynamic(model)
    every = layers(model)
    known = [one for one in every if not one.in_float and (not dynamic or one.kind in quantizers.DYNAMIC)]
    if not known:
        raise ValueError(_nothing_to_quantize(every))
    judge = CalibrationJudge(model, feeds, task)

    def made(kept: Sequence[WeightedLayer], quantize: Any, alone: bool) -> Any:
        if dynamic:
            return quantizers.dynamic(model, weight_bits=weight_bits, kept=[one.node for one in kept])
        int8 = {one.node for one in known if one not in kept}
        floats = [one.node for one in every if one.node not in int8]
        return quantize(kept=[*floats, *outside(model, int8, alone=alone)])

    found: dict[str | None, Any] = {None: None}
    if not dynamic:
        found = {
            how: functools.partial(quantizers.static, model, one, weight_bits=weight_bits)
            for how, one in quantizers.ranges(model, list(_first(feeds, RANGED))).items()
        }
        noise = {how: judge.noise(made([], one, alone=False)) for how, one in found.items()}
        found = {how: found[how] for how in sorted(found, key=lambda how: noise[how])}
    errors: dict[tuple[str | None, str], float] = {}

    def alone_in_int8(one: WeightedLayer) -> float:
        """The error of the outputs with this layer alone in int8."""
        if (name, one.node) not in errors:
            others = [other for other in known if other != one]
            errors[name, one.node] = judge.noise(made(others, found[name], alone=False))
        return errors[name, one.node]

    ways = itertools.product(judge.levels, found, [False] if dynamic else [False, True])
    for level, name, alone in ways:
        holds = functools.partial(_holds, judge, level, made, found[name], alone)
        kept = fewest_kept(known, alone_in_int8, holds)
        if len(kept) < len(known):
            break
    else:
        raise ValueError(_refusal(judge, known, alone_in_int8))
    quantize = found[name]
    result = made(kept, quantize, alone)
    return QuantizedModel(
        model=result,
        dynamic=dynamic,
        ranges=name,
        weight_bits=weight_bits,
        quantized=tuple(one.name for one in known if one not in kept),
        kept=tuple(one.name for one in every if one in kept or one not in known),
        lost=judge.lost(result)[judge.measure],
        measure=judge.measure,
        most_sensitive=lambda: _most_sensitive([one for one in known if one not in kept], alone_in_int8),
    )


def _holds(
    judge: CalibrationJudge, level: Sequence[str], made: Any, quantize: Any, alone: bool, kept: Sequence[WeightedLayer]
) -> bool:
    lost = judge.lost(made(kept, quantize, alone))
    return all(lost[measure] <= judge.most[measure] for measure in level)


def _most_sensitive(some: Sequence[WeightedLayer], error: Callable[[WeightedLayer], float]) -> str:
    """The names of the layers, three at most, that make the largest errors alone."""
    return ", ".join(one.name for one in sorted(some, key=error, reverse=True)[:3])


def _nothing_to_quantize(every: Sequence[WeightedLayer]) -> str:
    named = "".join(f"; {one.name} is {one.in_float}" for one in every if one.in_float)
    return (
        "the network has no layer with weights that int8 is defined for (convolutions, linear layers, LSTMs, "
        f'embeddings{named}): use precision="float32"'
    )


def _refusal(judge: CalibrationJudge, known: Sequence[WeightedLayer], error: Callable[[WeightedLayer], float]) -> str:
    measure = judge.levels[-1][0]
    allow = "allow more by most_lost=, or " if measure != NOISE_NAME else ""
    return (
        f"with any layer in int8, even {min(known, key=error).name}, the network loses more than "
        f"{judge.most[measure]:g} of its {measure} on the calibration examples (most sensitive: "
        f'{_most_sensitive(known, error)}): {allow}use precision="float16"'
    )


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


@dataclass(frozen=True, eq=False, kw_only=True)
class CalibrationTask:
    """What the outputs of calibration examples are held to."""

    targets: Any
    metric: tuple[str, Callable[[Any, Any], Any], bool] | None
    """The name, the function of (outputs, targets), and whether it is an accuracy; None: there is none."""
    outputs: Callable[[Sequence[Any]], Any]
    """The arrays of a graph's outputs -> the outputs as the network gives them."""
    most_lost: float


class CalibrationJudge:
    """What the calibration examples say of a quantized model, beside the float one."""

    def __init__(self, model: Any, feeds: Feeds, task: CalibrationTask) -> None:
        self._feeds, self._few = feeds, list(_first(feeds, RANKED))
        self._own = _outputs(model, feeds)
        self._task = task
        self._examples = sum(len(next(iter(feed.values()))) for feed in feeds)
        self._metric = task.metric if self._paired(self._own) is not None else None
        self.measure = NOISE_NAME if self._metric is None else self._metric[0]
        self.most = {NOISE_NAME: NOISE}
        self.levels: list[tuple[str, ...]] = [(NOISE_NAME,)]
        self._residual = _residual(self._own, task.targets)
        if self._residual is not None:
            # what the error of the outputs adds to that of the network, where the two have nothing to do with each
            # other: on other examples a metric is not better by chance
            self.most[ENERGY_NAME] = task.most_lost * self._residual
            self.levels = [(NOISE_NAME, ENERGY_NAME), (NOISE_NAME,)]
        if self._metric is not None:
            # one answer more or less is not a loss that a few examples show
            self.most[self.measure] = max(task.most_lost, 1 / self._examples) if self._metric[2] else task.most_lost
            # a network answers the examples that it was trained on so surely that the outputs' error shows more
            self.levels = [(self.measure, *self.levels[0]), (self.measure,)]

    def lost(self, made: Any) -> dict[str, float]:
        """What all examples lose, by each of the measures: the energy of the outputs' error, and what is lost of the
        metric."""
        found = _outputs(made, self._feeds)
        lost = {NOISE_NAME: _noise(self._own, found)}
        if self._residual is not None:
            lost[ENERGY_NAME] = float(np.square(found[0].astype(np.float64) - self._own[0]).mean())
        paired = self._paired(found) if self._metric is not None else None
        if paired is not None:
            lost[self.measure] = paired.lost
        return lost

    def noise(self, made: Any) -> float:
        """The energy of the error of the outputs over that of the outputs, on a few examples."""
        return _noise(self._own, _outputs(made, self._few))

    def _paired(self, found: Sequence[Any]) -> PairedLoss | None:
        """What is lost of the metric; None where it cannot be taken on the calibration examples."""
        if self._task.metric is None:
            return None
        name, function, classes = self._task.metric
        before, after = (self._task.outputs(arrays) for arrays in (self._own, found))
        every = ComparedOutputs(targets=self._task.targets, before=before, after=after, examples=self._examples)
        try:
            return paired_loss(name, function, [every], most_lost=0.0, classes=classes)
        except Exception:  # a metric may be for the targets of the evaluation alone
            return None


def _outputs(model: Any, feeds: Feeds) -> list[Any]:
    """Each output of a model for all examples, by ONNX Runtime on this machine."""
    made = session(model.SerializeToString(), threads=torch.get_num_threads())
    found = [made.run(None, feed) for feed in feeds]
    return [np.concatenate(one) if one[0].ndim else np.stack(one) for one in zip(*found, strict=True)]


def _noise(own: Sequence[Any], found: Sequence[Any]) -> float:
    """The mean over the examples of the energy of the error, over that of the outputs about their median; of the output
    that is worst. One example counts as much as another, also one whose outputs are a thousand times as large: it adds
    1 at most, and the energy of the outputs is that of all but 1 % of the examples."""
    worst = 0.0
    for expected, x in zip(own, found, strict=True):
        a, b = (one.astype(np.float64).reshape(len(one), -1) for one in map(np.atleast_1d, (expected, x)))
        energies = np.sort(np.square(a - np.median(a, axis=0)).sum(1))
        energy = energies[: max(1, int(np.ceil(0.99 * len(energies))))].mean()
        errors = np.square(a[: len(b)] - b).sum(1) / max(energy, 1e-30)
        worst = max(worst, float(np.minimum(np.nan_to_num(errors, nan=1.0), 1.0).mean()))
    return worst


def _residual(own: Sequence[Any], targets: Any) -> float | None:
    """The mean square of what the network is off its targets; None where those are not numbers of the outputs' shape,
    or where it is not off them."""
    if len(own) != 1 or not isinstance(targets, torch.Tensor) or not targets.is_floating_point():
        return None
    if tuple(targets.shape) != own[0].shape:
        return None
    outputs = own[0].astype(np.float64)
    found = float(np.square(outputs - targets.double().numpy()).mean())
    return found if found > 1e-6 * float(np.square(outputs).mean()) else None


def _first(feeds: Feeds, count: int) -> Iterator[Mapping[str, Any]]:
    """The feeds that hold the first examples, ``count`` of them at least where there are."""
    seen = 0
    for feed in feeds:
        if seen >= count:
            return
        yield feed
        seen += len(next(iter(feed.values())))
