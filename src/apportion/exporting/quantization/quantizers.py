"""The one place where ONNX Runtime's quantizers are called: ranges of activations from calibration examples, static
int8 with QuantizeLinear and DequantizeLinear around each operator (QDQ), and dynamic int8."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apportion.exporting.onnxruntime_session import runtime

AT_ONCE = 32
"""The number of examples whose activations are held at once."""
PERCENTILES = (99.99, 99.999)
"""The percentiles of an activation that ranges may end at, tried beside the smallest and the largest value."""
TRIMMED = 0.01
"""The share of the examples, those with the largest and those with the smallest values, that a trimmed range of an
activation leaves out."""
DYNAMIC = ("Gemm", "MatMul", "LSTM", "Gather")
"""The types of the operators whose weights dynamic quantization makes int8."""


def ranges(model: Any, feeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ranges of every activation for the inputs in ``feeds``, by how they were chosen: "min-max", of all
    examples or of most, or a percentile. Every feed has at most ``AT_ONCE`` examples."""
    runtime()  # turns the telemetry off
    from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        for method in (CalibrationMethod.MinMax, CalibrationMethod.Percentile):
            augmented = str(path.with_name(f"{method.name}.onnx"))
            made = create_calibrator(path, _static_types(), augmented, method, extra_options={"symmetric": False})
            if method is CalibrationMethod.MinMax:
                found.update(_of_each_example(made, feeds))
                continue
            for feed in feeds:
                made.collect_data(_OneBatch(feed))
            for percentile in PERCENTILES:
                made.collector.percentile = percentile
                found[f"percentile {percentile:g}"] = made.compute_data()
    return found


def _of_each_example(calibrator: Any, feeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ranges from the smallest and the largest value of each example: of all, and of all but those that are
    furthest out, which may be mistakes in the data."""
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorsData

    lows: dict[str, list[Any]] = {}
    highs: dict[str, list[Any]] = {}
    for feed in feeds:
        for at in range(len(next(iter(feed.values())))):
            calibrator.calibrate_tensors_range = None  # that of this example alone
            calibrator.collect_data(_OneBatch({name: x[at : at + 1] for name, x in feed.items()}))
            for name, data in calibrator.compute_data().data.items():
                low, high = data.range_value
                lows.setdefault(name, []).append(low)
                highs.setdefault(name, []).append(high)

    def made(share: float) -> Any:
        return TensorsData(
            CalibrationMethod.MinMax,
            {
                name: (
                    np.quantile(np.asarray(lows[name]), share, axis=0, method="lower").astype(np.float32),
                    np.quantile(np.asarray(highs[name]), 1 - share, axis=0, method="higher").astype(np.float32),
                )
                for name in lows
            },
        )

    return {"min-max": made(0.0), f"min-max of {1 - TRIMMED:.0%} of the examples": made(TRIMMED)}


def static(model: Any, activations: Any, *, weight_bits: int, kept: Sequence[str]) -> Any:
    """Return the model with 8-bit activations in these ranges, and weights of 7 or 8 bits per output channel.
    ``kept``: names of nodes that stay in float."""
    runtime()
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    with _quiet():
        made = QDQQuantizer(
            copy.deepcopy(model),
            True,
            weight_bits < 8,
            QuantType.QInt8,
            QuantType.QUInt8,
            activations,
            [],
            list(kept),
            _static_types(),
            {},
        )
        made.quantize_model()
        made.model.topological_sort()
    return made.model.model


def dynamic(model: Any, *, weight_bits: int, kept: Sequence[str]) -> Any:
    """Return the model with weights of 7 or 8 bits per output channel, and activations whose ranges are found as it
    runs. ``kept``: names of nodes that stay in float."""
    runtime()
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = copy.deepcopy(model)
    del model.graph.value_info[:]  # the shapes are found again: a weight of Gemm is transposed
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "model.onnx"
        quantize_dynamic(
            model,
            path,
            op_types_to_quantize=[kind for kind in DYNAMIC if kind != "Gemm"],
            per_channel=True,
            reduce_range=weight_bits < 8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=[*kept, *(f"{name}_MatMul" for name in kept)],  # which is what a Gemm becomes
        )
        return onnx.load(path)


def _static_types() -> list[str]:
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    return sorted({*QDQRegistry, *QLinearOpsRegistry})


class _OneBatch:
    """A reader of one batch, as the calibrators take it."""

    def __init__(self, feed: Mapping[str, Any]) -> None:
        self._left: list[Mapping[str, Any]] = [feed]

    def get_next(self) -> Mapping[str, Any] | None:
        return self._left.pop() if self._left else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the quantizers, which print their steps and advise preprocessing that the exporter of torch has done."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
