"""The command ``apportion serve --evaluate``: the members on test data, and what it costs to answer without some of
them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import comb, inf
from pathlib import Path
from typing import Any

import numpy as np

from apportion.serving.config import Serving
from apportion.serving.ensemble.aggregation import Aggregation, Array, combined
from apportion.serving.model_preparation import prepared
from apportion.serving.protocol.datatypes import DATATYPES
from apportion.serving.replication.matching import matched
from apportion.serving.runtimes.runtime import Runtime

ROWS = 64
"""The number of rows that are computed at once."""


def evaluate(members: Mapping[str, str], data: str, serving: Serving) -> Statement:
    """Compute the accuracy of all members, of each one and of subsets. ``data``: a workload's address (its evaluation's
    data), or a file (.npz) with ``targets`` and the models' inputs: ``input``, or several by their names. Raises
    ValueError where it is neither, or the models do not take it."""
    outputs: dict[str, Array] = {}
    targets: Array = np.empty(0)
    with tempfile.TemporaryDirectory(prefix="apportion-evaluate-") as folder:
        sources = [prepared(name, place, Path(folder), serving, len(members)) for name, place in members.items()]
        for source in matched(sources, serving.rename):
            program = source.open()
            try:
                found, targets = _computed(program, data)
            finally:
                program.close()
            outputs[source.name] = found
    return statement(outputs, targets, serving.aggregation, serving.weights)


def _computed(program: Runtime, data: str) -> tuple[Array, Array]:
    """Return (the first output, the targets) of all examples."""
    outputs, targets = [], []
    for inputs, wanted in _npz(program, data) if data.endswith(".npz") else _workload(program, data):
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


def _npz(program: Runtime, data: str) -> Iterator[tuple[list[Array], Array]]:
    if not Path(data).is_file():
        raise ValueError(f"{data} does not exist")
    with np.load(data) as file:
        names = [spec.name for spec in program.inputs]
        if len(names) == 1 and "input" in file.files:
            names = ["input"]
        if missing := [name for name in [*names, "targets"] if name not in file.files]:
            raise ValueError(f"{data} has {', '.join(file.files)}, and no {missing[0]}")
        inputs, targets = [file[name] for name in names], file["targets"]
    for at in range(0, len(targets), ROWS):
        yield [x[at : at + ROWS] for x in inputs], targets[at : at + ROWS]


def _workload(program: Runtime, data: str) -> Iterator[tuple[list[Array], Array]]:
    from apportion.core.address import load_workload
    from apportion.core.torch_private import pytree
    from apportion.exporting.target import input_names

    workload = load_workload(data)
    if workload.evaluation is None:
        raise ValueError(f"{data} has no evaluation: its test data is what the nets are held against")
    dataset = workload.evaluation.data()
    size = len(dataset)  # type: ignore[arg-type]
    for at in range(0, size, ROWS):
        inputs, targets = workload.collate([dataset[n] for n in range(at, min(at + ROWS, size))])
        arrays = [x.numpy() for x in pytree.tree_leaves(inputs)]
        by_name = dict(zip(input_names(inputs), arrays, strict=True))
        names = [spec.name for spec in program.inputs]
        yield [by_name[name] for name in names] if {*names} == {*by_name} else arrays, targets.numpy()


# Subsets of the members


MOST_SUBSETS = 500
"""The largest number of subsets of one size that are computed: where there are more, those that are computed are spread
over all of them."""


@dataclass(frozen=True)
class Size:
    """The accuracies of all subsets of one size."""

    members: int
    subsets: int
    least: float
    mean: float
    most: float
    """The highest accuracy of a subset; ``least`` is the lowest and ``mean`` the average, all from 0 to 1."""


@dataclass(frozen=True)
class Statement:
    """The accuracies, from 0 to 1, on ``examples`` examples."""

    examples: int
    whole: float
    """The accuracy with all members."""
    alone: Mapping[str, float]
    """The accuracy of each member by itself."""
    without: Mapping[str, float]
    """The accuracy of all members but that one; empty where there is only one."""
    sizes: tuple[Size, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the accuracies as plain dicts, lists and numbers."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return lines of text for people, in percent."""
        said = [f"{self.examples:,} examples", f"{'all members':<24}{self.whole:8.2%}"]
        said += [f"{f'{name} alone':<24}{share:8.2%}" for name, share in self.alone.items()]
        said += [f"{f'without {n}':<24}{s:8.2%}  {100 * (s - self.whole):+.2f} points" for n, s in self.without.items()]
        for size in self.sizes:
            name = f"any {size.members} of {len(self.alone)}"
            said.append(f"{name:<24}{size.mean:8.2%}  from {size.least:.2%} to {size.most:.2%}")
        return said


def statement(
    outputs: Mapping[str, Array], targets: Array, how: Aggregation, weights: Mapping[str, float] | None = None
) -> Statement:
    """Return the accuracies of an ensemble. ``outputs``: those of each member, [examples, classes], or labels
    [examples]. ``targets``: [examples], of integers."""
    names = list(outputs)

    def share(some: Sequence[str]) -> float:
        own = None if weights is None else [weights[name] for name in some]
        return accuracy(combined(how, [outputs[name] for name in some], own), targets)

    sizes = []
    for count in range(1, len(names)):
        stride = -(-comb(len(names), count) // MOST_SUBSETS)
        found = [share(some) for at, some in enumerate(combinations(names, count)) if at % stride == 0]
        sizes.append(Size(count, len(found), min(found), sum(found) / len(found), max(found)))
    return Statement(
        examples=len(targets),
        whole=share(names),
        alone={name: share([name]) for name in names},
        without={n: share([other for other in names if other != n]) for n in names} if len(names) > 1 else {},
        sizes=tuple(sizes),
    )


def accuracy(outputs: Array, targets: Array) -> float:
    """Return the share of examples whose largest score, or label, is the target."""
    labels = outputs.argmax(-1) if outputs.ndim > 1 else outputs
    if labels.shape != targets.shape:
        raise ValueError(
            f"outputs {list(outputs.shape)} are not scores of {list(targets.shape)} targets: accuracy is for nets that "
            "give one row of scores, or one label, an example"
        )
    return float(np.mean(labels == targets))
