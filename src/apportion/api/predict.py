"""What a trained network predicts for a data set, and how well it does on one: in this process, batch by batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from apportion.comm.group import Alone
from apportion.core import tree
from apportion.core.address import object_at
from apportion.core.data.source import BatchSource
from apportion.core.named_arguments import named_arguments
from apportion.core.torch_private import pytree
from apportion.core.workload import Evaluation, Workload
from apportion.runtime.checkpoint.load import load, workload_of
from apportion.runtime.worker.evaluation import evaluate as evaluate_over_ranks

if TYPE_CHECKING:
    from apportion.core.data.batch import Batch

_BATCH = 256
_EXAMPLE = "examples/digits.py:test_set, or a file FILE.npz"


@named_arguments("predict")
def predict(  # noqa: PLR0913 (all but the first two by name)
    run_dir: str | os.PathLike[str],
    data: Dataset[Any] | str,
    *,
    out: str | os.PathLike[str] | None = None,
    which: str | int | None = None,
    batch_size: int = _BATCH,
    average: bool = True,
    trust: bool = False,
) -> Any:
    """The outputs of a run's network for every example of a data set, in its order: what the model returns, with the
    rows of all batches joined.

    ``data``: a map-style data set whose items are (inputs, targets) or inputs alone; the address of one, or of a
    function that makes it (``FILE:NAME``); or the path of an .npz file, whose arrays are the inputs by name, or the
    only input. ``out``: an .npz file to write the outputs to, a tensor as ``output``, several as ``output_0``,
    ``output_1`` ... in their order. ``which``, ``average`` and ``trust`` are those of ``load``. Raises ValueError where
    the data cannot be read or the outputs of batches cannot be joined, OSError where the file cannot be written.
    """
    if out is not None and Path(out).suffix != ".npz":
        raise ValueError(f"out={str(out)!r} must be a file that ends with .npz: out='outputs.npz'")
    model = load(run_dir, which=which, average=average, trust=trust)
    collate = _collate_of(run_dir, trust)
    found: list[Any] = []
    with torch.no_grad():
        for inputs in _inputs(_data(data), batch_size, collate):
            found.append(tree.call(model, inputs))
    joined = _joined(found)
    if out is not None:
        leaves = pytree.tree_leaves(joined)
        names = ["output"] if len(leaves) == 1 else [f"output_{n}" for n in range(len(leaves))]
        np.savez(out, **{name: leaf.float().numpy() if leaf.dtype == torch.bfloat16 else leaf.numpy()
                         for name, leaf in zip(names, leaves, strict=True)})  # fmt: skip
    return joined


@named_arguments("predict")
def evaluate(
    run_dir: str | os.PathLike[str],
    data: Dataset[Any] | str | None = None,
    *,
    which: str | int | None = None,
    average: bool = True,
    trust: bool = False,
) -> dict[str, float]:
    """The metrics of a run's network on a data set, by name: those of the workload's evaluation.

    ``data``: a map-style data set whose items are (inputs, targets), or the address of one, or of a function that makes
    it (``FILE:NAME``); None: the workload's own evaluation set. ``which``, ``average`` and ``trust`` are those of
    ``load``. Raises ValueError where the run was started from Python, or its workload has no evaluation.
    """
    workload = workload_of(run_dir, trust=trust)
    evaluation = workload.evaluation
    if evaluation is None:
        raise ValueError(
            f"the workload of {run_dir} has no evaluation, and its metrics are what is computed: give it "
            "evaluation=apportion.Evaluation(data=..., metrics=...)"
        )
    if data is not None:
        opened = _data(data)
        evaluation = replace(evaluation, data=lambda: opened)
    network = _Loaded(load(run_dir, which=which, average=average, trust=trust))
    dtype = torch.float64 if workload.precision == "float64" else None
    source = BatchSource.of_evaluation(replace(workload, evaluation=evaluation), dtype=dtype)
    try:
        return dict(evaluate_over_ranks(network, evaluation, source, Alone(), lambda: None))
    finally:
        source.close()


@final
class _Loaded:
    """A plain module as ``evaluate`` asks for a network."""

    whole, device = False, torch.device("cpu")

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        return tree.call(self.model, batch.inputs)

    def looked(self) -> None:
        """Nothing is kept, and nothing has to be put back."""


def _data(given: Dataset[Any] | str) -> Dataset[Any]:
    """The data set that is given by itself, by its address or as a file."""
    if isinstance(given, str) and given.endswith(".npz"):
        return _npz(Path(given))
    found = object_at(given) if isinstance(given, str) else given
    if isinstance(found, Workload):
        evaluation: Evaluation | None = found.evaluation
        if evaluation is None:
            raise ValueError(f"data={given!r} is a Workload without an evaluation set: name a data set, {_EXAMPLE}")
        found = evaluation.data()
    if isinstance(found, nn.Module) or not (hasattr(found, "__getitem__") and hasattr(found, "__len__")):
        raise ValueError(
            f"data={given!r} is a {type(found).__name__}, and it must be a map-style data set, or a function that "
            f"makes one: {_EXAMPLE}"
        )
    return found


def _npz(path: Path) -> Dataset[Any]:
    if not path.is_file():
        raise ValueError(f"data={str(path)!r}: the file does not exist")
    with np.load(path) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "targets"}
    lengths = {len(array) for array in arrays.values()}
    if len(lengths) != 1:
        raise ValueError(f"data={str(path)!r} must hold arrays of one length, and has {sorted(lengths) or 'none'}")
    return TensorDataset(*arrays.values()) if len(arrays) == 1 else _NamedArrays(arrays)


@dataclass(frozen=True)
class _NamedArrays(Dataset[Any]):
    """The inputs of several arrays by name."""

    arrays: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, number: int) -> Any:
        return {name: array[number] for name, array in self.arrays.items()}, 0


def _collate_of(run_dir: str | os.PathLike[str], trust: bool) -> Any:
    """How the run has made batches; torch's way where it was started from Python."""
    try:
        return workload_of(run_dir, trust=trust).collate
    except ValueError:
        return default_collate


def _inputs(data: Dataset[Any], batch_size: int, collate: Any) -> Iterator[Any]:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be a whole number of at least 1 example")
    for batch in DataLoader(data, batch_size=batch_size, collate_fn=collate):
        # A pair is (inputs, targets), as in training; one tensor in a tuple is what TensorDataset gives.
        yield batch[0] if isinstance(batch, tuple | list) and len(batch) in (1, 2) else batch


def _joined(found: list[Any]) -> Any:
    if not found:
        raise ValueError("the data set is empty: there is nothing to predict")
    leaves = [pytree.tree_leaves(one) for one in found]
    if any(not isinstance(leaf, Tensor) or not leaf.dim() for leaf in leaves[0]):
        raise ValueError(
            f"the model returns {type(found[0]).__name__}, and outputs are joined row by row: it must return tensors "
            "with a row for each example"
        )
    shapes = {tuple(tuple(leaf.shape[1:]) for leaf in one) for one in leaves}
    if len(shapes) > 1:
        raise ValueError(
            "the outputs of batches have rows of different shapes, as where each pads to its own longest row: pad to "
            "one length, or use batch_size=1 and join them yourself"
        )
    _, structure = pytree.tree_flatten(found[0])
    return pytree.tree_unflatten([torch.cat(column) for column in zip(*leaves, strict=True)], structure)
