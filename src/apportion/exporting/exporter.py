"""The export of a model to a file for other hardware, which is given out once it has computed what the model
computes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from apportion.core.torch_private import pytree
from apportion.core.value import parse
from apportion.errors import ApportionError
from apportion.exporting.target import Exported, Inputs, Target, called

PACKAGE = "apportion.exporting.targets"
LIMIT = 1e-4
"""The largest relative difference of the outputs that is accepted: float32 sums are taken in another order."""


def export(
    model: nn.Module,
    sample: Inputs,
    path: str | os.PathLike[str],
    *,
    target: str | Target = "onnx",
    check: Sequence[Inputs] = (),
    limit: float = LIMIT,
) -> Exported:
    """Write the model to the path, for the target, and compare what the file computes with the model itself.

    ``sample``: inputs as the model takes them, with the examples in dimension 0: they give the shapes, and both compute
    them. ``check``: more such inputs that both compute. ``limit``: the limit of the largest difference of any output,
    relative to the largest number in it. The model is left as it was, in training mode if it was so. Raises ValueError
    where the model cannot be exported to the target, and ApportionError where the file computes something else; then no
    file is left.
    """
    chosen: Target = parse(target, PACKAGE) if isinstance(target, str) else target
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for {path.name}: make it first")
    wide = _at_least_two(sample)
    batches = [wide, _rows(wide, slice(0, 1)), *check]
    with _evaluating(model), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        made = Path(folder) / path.name
        about = chosen.write(model, wide, made)
        with torch.no_grad():
            expected = [[_array(x) for x in pytree.tree_leaves(called(model, inputs))] for inputs in batches]
        difference = max(
            _difference(own, theirs) for own, theirs in zip(expected, chosen.run(made, batches), strict=True)
        )
        if not difference <= limit:
            raise ApportionError(
                f"{path.name} computes something else than the model: outputs differ by {difference:.2g} of their "
                f"largest number, of {limit:g} at most; nothing was written"
            )
        files = sorted(Path(folder).iterdir(), key=lambda file: file == made)  # the one that is asked for comes last
        nbytes = sum(file.stat().st_size for file in files)
        for file in files:
            shutil.move(file, path.parent / file.name)
    return Exported(
        path=path,
        target=str(chosen),
        nbytes=nbytes,
        examples=sum(len(pytree.tree_leaves(inputs)[0]) for inputs in batches),
        difference=difference,
        limit=limit,
        about=about,
    )


def _array(output: torch.Tensor) -> Any:
    return (output.float() if output.dtype == torch.bfloat16 else output).numpy()  # numpy has no bfloat16


def _at_least_two(sample: Inputs) -> Inputs:
    """Return the sample with two examples at least: torch.export would take a dimension of size 1 for a constant."""
    leaves = pytree.tree_leaves(sample)
    rows = {len(x) if isinstance(x, torch.Tensor) and x.ndim else None for x in leaves}
    if len(rows) != 1 or None in rows or 0 in rows:
        raise ValueError(f"sample={sample!r:.60} must be tensors whose dimension 0 is the example, as many in each")
    if rows != {1}:
        return sample
    return pytree.tree_map(lambda x: torch.cat([x, x]), sample)


def _rows(inputs: Inputs, which: slice) -> Inputs:
    return pytree.tree_map(lambda x: x[which], inputs)


def _difference(expected: Sequence[Any], found: Sequence[Any]) -> float:
    """Return the largest difference, relative to the largest number of its output; infinite where number or shapes
    differ."""
    if len(expected) != len(found):
        return float("inf")
    worst = 0.0
    for own, theirs in zip(expected, found, strict=True):
        if own.shape != np.shape(theirs):
            return float("inf")
        a, b = own.astype(np.float64).reshape(-1), np.asarray(theirs).astype(np.float64).reshape(-1)
        other = np.flatnonzero(~((a == b) | (np.isnan(a) & np.isnan(b))))
        if other.size:
            most = np.abs(a[np.isfinite(a)]).max(initial=1e-12)
            apart = float(np.abs(a[other] - b[other]).max() / most)
            worst = max(worst, apart) if np.isfinite(apart) else float("inf")
    return worst


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Hold the model in evaluation mode; afterwards each module is in the mode that it was in before."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
    except NotImplementedError:  # a program of torch.export is what it was exported as
        training = []
    try:
        yield
    finally:
        for module in training:
            module.training = True
