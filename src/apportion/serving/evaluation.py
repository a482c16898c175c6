"""``apportion serve --evaluate``: the members on test data, and what it costs to answer without some of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path

import numpy as np

from apportion.serving.aggregation import Array
from apportion.serving.datatypes import DATATYPES
from apportion.serving.prepared import prepared
from apportion.serving.program import Program
from apportion.serving.serving import Serving
from apportion.serving.subsets import Statement, statement

ROWS = 64
"""That are computed at once."""


def evaluate(members: Mapping[str, str], data: str, serving: Serving) -> Statement:
    """``data``: a workload's address (its evaluation's data), or a file (.npz) with ``targets`` and the nets' inputs:
    ``input``, or several by their names. ValueError where it is neither, or the nets do not take it."""
    outputs: dict[str, Array] = {}
    targets: Array = np.empty(0)
    with tempfile.TemporaryDirectory(prefix="apportion-evaluate-") as folder:
        for name, place in members.items():
            program = prepared(name, place, Path(folder), serving, len(members)).open()
            try:
                found, targets = _computed(program, data)
            finally:
                program.close()
            outputs[name] = found
    return statement(outputs, targets, serving.aggregation, serving.weights)


def _computed(program: Program, data: str) -> tuple[Array, Array]:
    """(the first output, the targets) of all examples."""
    outputs, targets = [], []
    for inputs, wanted in _npz(program, data) if data.endswith(".npz") else _workload(data):
        if len(inputs) != len(program.inputs):
            raise ValueError(f"{data} has {len(inputs)} inputs, the net takes {len(program.inputs)}")
        rows = [x.astype(DATATYPES[s.datatype], copy=False) for x, s in zip(inputs, program.inputs, strict=True)]
        for spec, x in zip(program.inputs, rows, strict=True):
            if (why := spec.refusal(spec.datatype, x.shape)) is not None:
                raise ValueError(f"{data}: {why}")
        outputs.append(program.run(rows, inf)[0])
        targets.append(wanted)
    if not outputs:
        raise ValueError(f"{data} has no examples")
    return np.concatenate(outputs), np.concatenate(targets)


def _npz(program: Program, data: str) -> Iterator[tuple[list[Array], Array]]:
    if not Path(data).is_file():
        raise ValueError(f"there is no {data}")
    with np.load(data) as file:
        names = [spec.name for spec in program.inputs]
        if len(names) == 1 and "input" in file.files:
            names = ["input"]
        if missing := [name for name in [*names, "targets"] if name not in file.files]:
            raise ValueError(f"{data} has {', '.join(file.files)}, and no {missing[0]}")
        inputs, targets = [file[name] for name in names], file["targets"]
    for at in range(0, len(targets), ROWS):
        yield [x[at : at + ROWS] for x in inputs], targets[at : at + ROWS]


def _workload(data: str) -> Iterator[tuple[list[Array], Array]]:
    from apportion.address import load_workload
    from apportion.torch_private import pytree

    workload = load_workload(data)
    if workload.evaluation is None:
        raise ValueError(f"{data} has no evaluation: its test data is what the nets are held against")
    dataset = workload.evaluation.data()
    size = len(dataset)  # type: ignore[arg-type]
    for at in range(0, size, ROWS):
        inputs, targets = workload.collate([dataset[n] for n in range(at, min(at + ROWS, size))])
        yield [x.numpy() for x in pytree.tree_leaves(inputs)], targets.numpy()
