"""The training step of ResNet-20 by jax and by torch, both in float64, in a process with .venv/tpu on its path:

    JAX_ENABLE_X64=1 python step_in_float64.py

prints a line of JSON for each batch of 64 training images. No TPU has float64, so a file holds none: this is about the
functions that files are made from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(sys.prefix) / "tpu"))

import jax
import numpy as np
from published_resnets import published_resnet, training_images
from torch import nn

from apportion.exporting.target import Examples
from apportion.exporting.tpu import lowering, training_check
from apportion.exporting.tpu.lowering import for_training, traced_loss

BATCH = 64
LOSS = nn.functional.cross_entropy


def apart(inputs: object, targets: object) -> dict[str, float]:
    """The differences of the loss, and of the gradients and new weights relative to the largest of all of them."""
    given = Examples(inputs, targets)
    network, _ = for_training(published_resnet(20).double())
    traced = traced_loss(network, LOSS, given.inputs, given.targets, dynamic=False)
    step = jax.jit(lowering.step_of(lowering.jax_function(traced), lowering.trained_names(network)))
    batch = [*lowering.leaves_of(given.inputs, "inputs"), *lowering.leaves_of(given.targets, "targets")]
    rate = np.float64(training_check.LEARNING_RATE)
    value, gradients, weights = step(dict(lowering.weights_of(network)), rate, *batch)
    found = training_check._joined(
        np.asarray(value), training_check._arrays(gradients), training_check._arrays(weights)
    )
    expected = training_check._by_torch(network, LOSS, given)
    names = [training_check._GRADIENT + name for name in gradients]
    return {
        "bits": np.asarray(value).dtype.itemsize * 8,
        "loss": training_check._apart(found["loss"], expected["loss"]),
        "gradients": training_check._apart_together(found, expected, names),
        "weights": training_check._apart_together(found, expected, list(weights)),
        "largest gradient": max(float(np.abs(expected[name]).max()) for name in names),
    }


def main() -> None:
    """Compare three batches."""
    lowering._REFUSED.clear()
    x, y = training_images(3 * BATCH)
    for rows in (slice(at, at + BATCH) for at in range(0, len(x), BATCH)):
        print(json.dumps(apart(x[rows].double(), y[rows])), flush=True)


if __name__ == "__main__":
    main()
