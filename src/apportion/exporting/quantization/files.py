"""Files of int8 and of float16 from the ONNX of a trained network: written, described, and with what each of them is
held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apportion.core.torch_private import pytree
from apportion.exporting.examples import check_numbers, extreme_value, rows
from apportion.exporting.paired_loss import held_metric
from apportion.exporting.quantization import quantizers
from apportion.exporting.quantization.choice import CalibrationTask, QuantizedModel, quantized
from apportion.exporting.quantization.evaluator import AT_ONCE, evaluator
from apportion.exporting.quantization.graph import compacted, halved, layers_of_nodes, with_metadata
from apportion.exporting.quantization.processor import seconds_each, this_processor
from apportion.exporting.target import Compiled, Examples, Inputs, Table, TrainedNetwork, called

LIMIT = 0.05
"""The limit of how much the outputs of an int8 file differ from what its operators are defined to compute, relative to
the largest number in them. A sum that is rounded the other way moves an activation by one of 255 steps; on ResNets for
CIFAR-10 that makes 0.01 to 0.02, and sums that a processor cuts off 0.4."""
HALF_LIMIT = 0.01
"""The limit of how much the outputs of a file of float16 differ from the network's: each weight is rounded by 0.0005 of
it at most."""
COMPARED = 250
"""The number of examples that an int8 file is compared on with the evaluator, which is slow."""


def write_int8(
    model: Any, trained: TrainedNetwork, path: Path, *, weight_bits: int | None, most_lost: float
) -> Compiled:
    """Write a model (an ``onnx.ModelProto`` of float32) in int8. ``weight_bits``: None is what this processor has
    products for. ``most_lost``: of the accuracy. Raises ValueError as ``quantized`` does, and where there is nothing to
    calibrate with."""
    if trained.calibration is None:
        raise ValueError(
            'precision="int8" chooses the ranges of activations by examples, and there are none: give '
            "data=Data(calibration=Examples(inputs, targets)), of training data, or export a run that has a data set"
        )
    check_numbers(trained.calibration, "calibration")
    processor = this_processor()
    bits = processor.weight_bits if weight_bits is None else weight_bits
    float32 = model.SerializeToString()
    feeds = list(_feeds(model, trained.calibration.inputs))
    task = CalibrationTask(
        targets=trained.calibration.targets,
        metric=_metric(trained, trained.calibration),
        outputs=_structured(trained),
        most_lost=most_lost,
    )
    try:
        made = quantized(model, feeds, task, weight_bits=bits)
    except ValueError as error:
        if extreme := extreme_value(trained.calibration):
            raise ValueError(f"{error}; {extreme}") from error
        raise
    right = "every processor" if bits == 7 else "processors with int8 dot products, and on ARM"
    verified_for = f"verified on {processor}; weights of {bits} bits are right on {right}"
    known = {
        "precision": "int8",
        "quantization": "static, per channel, QDQ" if made.dynamic is None else f"dynamic: {made.dynamic}",
        "weight_bits": str(bits),
        "processors": verified_for,
        "float32_layers": ", ".join(made.kept),
    }
    metadata = {f"apportion.{key}": value for key, value in known.items()}
    path.write_bytes(_written(made.model, model, metadata))
    reference = evaluator(made.model, at_once=None if made.dynamic else AT_ONCE, layers=layers_of_nodes(model))
    reference(rows(trained.sample, slice(0, 2)))  # what it cannot compute is refused before anything is compared
    speed, ratio = _speed(float32, "int8", path, feeds[0])
    return Compiled(
        about={
            **known,
            "weight_bits": bits,
            "float32_layers": list(made.kept),
            "int8_layers": list(made.quantized),
            "ranges": made.ranges,
            "calibration_examples": len(pytree.tree_leaves(trained.calibration.inputs)[0]),
        },
        reference=reference,
        compared=COMPARED,
        limit=LIMIT,
        most_lost=most_lost,
        blamed=lambda: f"most is lost in int8 by {made.most_sensitive()}, and precision='float16' loses less",
        tables=(speed, _choices(made)),
        conclusion=_conclusion("int8", ratio, path.stat().st_size / len(float32)),
    )


def _structured(trained: TrainedNetwork) -> Callable[[Sequence[Any]], Any]:
    """The function that makes of a graph's outputs, arrays, what the network gives."""
    with torch.no_grad():
        _, shape = pytree.tree_flatten(called(trained.module, trained.sample))
    return lambda arrays: pytree.tree_unflatten([torch.from_numpy(np.asarray(x)) for x in arrays], shape)


def _metric(trained: TrainedNetwork, examples: Examples) -> tuple[str, Callable[[Any, Any], Any], bool] | None:
    """What the file will be held to, if the targets for calibration are such that it can be."""
    with torch.no_grad():
        outputs = called(trained.module, rows(examples.inputs, slice(0, 2)))
    targets = examples.targets
    return held_metric(trained.metrics, outputs, targets[:2] if isinstance(targets, torch.Tensor) else targets)


def write_float16(model: Any, trained: TrainedNetwork, path: Path, *, most_lost: float) -> Compiled:
    """Write a model (an ``onnx.ModelProto`` of float32) with its weights in float16, which are made float32 when the
    file is loaded. Raises ValueError where a weight is out of the range of float16."""
    float32 = model.SerializeToString()
    if beyond := halved(model):
        raise ValueError(
            f"{beyond[0]} has a weight beyond 65504, which float16 does not hold: use precision='float32', or int8"
        )
    path.write_bytes(_written(model, model, {"apportion.precision": "float16"}))
    speed, ratio = _speed(float32, "float16", path, next(_feeds(model, trained.sample)))
    return Compiled(
        about={"precision": "float16", "computed_in": "float32"},
        limit=HALF_LIMIT,
        most_lost=most_lost,
        tables=(speed,),
        conclusion=_conclusion("float16", ratio, path.stat().st_size / len(float32)),
    )


def _written(made: Any, model: Any, metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file, with the metadata of the model that it was made from."""
    kept = {entry.key: entry.value for entry in model.metadata_props}
    data: bytes = with_metadata(compacted(made), {**kept, **metadata}).SerializeToString()
    return data


def _feeds(model: Any, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """The inputs by the names of the graph's, as many at once as the calibration takes."""
    names = [value.name for value in model.graph.input]
    leaves = [x.detach().numpy() for x in pytree.tree_leaves(inputs)]
    for at in range(0, len(leaves[0]), quantizers.AT_ONCE):
        yield {name: x[at : at + quantizers.AT_ONCE] for name, x in zip(names, leaves, strict=True)}


def _speed(float32: bytes, precision: str, path: Path, feed: Mapping[str, Any]) -> tuple[Table, float]:
    """The table of the speed beside float32, and the best time of float32 over the best of this file."""
    one = {name: x[:1] for name, x in feed.items()}
    sizes = [len(float32), path.stat().st_size]
    rows: list[tuple[Any, ...]] = []
    best = [float("inf"), float("inf")]
    for threads in sorted({1, torch.get_num_threads()}):
        seconds = seconds_each([float32, path], one, threads=threads)
        best = [min(pair) for pair in zip(best, seconds, strict=True)]
        rows += [
            (name, threads, round(1e3 * each, 4), size)
            for name, each, size in zip(("float32", precision), seconds, sizes, strict=True)
        ]
    table = Table(
        title="Speed and size",
        columns=("precision", "threads", "ms for one example", "bytes"),
        rows=tuple(rows),
        note=f"Medians of ONNX Runtime on this machine: {this_processor()}. The two took turns.",
    )
    return table, best[0] / best[1]


def _choices(made: QuantizedModel) -> Table:
    how = made.ranges or "found as it runs"
    return Table(
        title="Choices",
        columns=("what", "choice"),
        rows=(
            ("ranges of activations", how),
            ("bits of a weight", made.weight_bits),
            ("layers in int8", len(made.quantized)),
            ("layers in float32", ", ".join(made.kept) or "none"),
            (f"{made.measure} lost on the calibration examples", round(made.lost, 6)),
        ),
        note="Choices were made by the calibration examples alone.",
    )


def _conclusion(precision: str, ratio: float, size: float) -> str:
    faster = f"and computes one example {ratio:.2f} times as fast as float32 on this machine"
    worth = "." if ratio >= 1.05 else f": it is worth it for its size, and not for speed, on {_machine(ratio)}."
    return f"The file has {size:.2f} of the bytes of float32, {faster}{worth}"


def _machine(ratio: float) -> str:
    return "this machine" if ratio < 1 else "a machine like this one"
