"""The export of a model to a file for other hardware, which is given out once it has computed what it must."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from apportion.core.torch_private import pytree
from apportion.core.value import parse
from apportion.core.workload import accuracy
from apportion.errors import ApportionError, NotVerified
from apportion.exporting.target import (
    Compiled,
    Examples,
    Exported,
    Inputs,
    Reading,
    Target,
    TrainedNetwork,
    Verification,
    called,
)

PACKAGE = "apportion.exporting.targets"
LIMIT = 1e-4
"""The largest relative difference of the outputs that is accepted: float32 sums are taken in another order."""
AT_ONCE = 250
"""The number of examples in a batch of those that are held out."""

NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG

MeanMetric = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Data:
    """The examples of a task: those that a compiler may look at, and those that its file is judged by."""

    calibration: Examples | None = None
    """Examples by which a target makes its choices."""
    training: Dataset[Any] | None = None
    """Items for fine-tuning, of which ``collate`` makes (inputs, targets)."""
    collate: Callable[[list[Any]], Any] = default_collate
    """A list of items -> (inputs, targets), with the example in dimension 0."""
    loss: Callable[[Any, Any], Any] | None = None
    """The loss of (outputs, targets) for fine-tuning."""
    held_out: Examples | None = None
    """Examples on which network and file are compared, and which no choice is made by."""
    metrics: Mapping[str, MeanMetric] | None = None
    """The mean of (outputs, targets) by name, taken on what is held out; None: {"accuracy": accuracy}."""


def export(  # noqa: PLR0913 (each is a separate thing that a user may say)
    model: nn.Module,
    sample: Inputs,
    path: str | os.PathLike[str],
    *,
    target: str | Target = "onnx",
    check: Sequence[Inputs] = (),
    data: Data | None = None,
    limit: float = LIMIT,
    report: Callable[[Exported], Mapping[str, str]] | None = None,
) -> Exported:
    """Write the model to the path, for the target, and hold what the file computes to what it must compute, as
    ``apportion.export`` says. ``report``: returns the texts that are written beside the file, by the ending that each
    of them adds to its name.
    """
    chosen: Target = parse(target, PACKAGE) if isinstance(target, str) else target
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for {path.name}: make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the file's name, such as {path / f'model{chosen.suffix}'}")
    wide = _at_least_two(sample)
    data = _in_order(data or Data(), wide)
    batches = [wide, _rows(wide, slice(0, 1)), *(_as_in(wide, inputs) for inputs in check)]
    trained = TrainedNetwork(
        module=model, sample=wide, calibration=data.calibration, training=data.training, collate=data.collate,
        loss=data.loss,
    )  # fmt: skip
    aside = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")
    with _named(path), _evaluating(model), aside as folder:
        made = Path(folder) / path.name
        compiled = chosen.write(trained, made)
        judge = _Judge(model, compiled, path.name, compiled.limit if compiled.limit is not None else limit)
        every = batches + _batches(data.held_out)
        found = tuple(judge.verified(one, batches, data) for one in chosen.read(made, every))
        written = Exported(
            path=path,
            target=str(chosen),
            nbytes=sum(file.stat().st_size for file in Path(folder).iterdir()),
            about=compiled.about,
            verifications=found,
            tables=compiled.tables,
            conclusion=_concluded(compiled, found),
        )
        texts = {f"{path.name}{ending}": text for ending, text in (report(written) if report else {}).items()}
        for name, text in texts.items():
            (Path(folder) / name).write_text(text)
        files = sorted(Path(folder).iterdir(), key=lambda file: file == made)  # the one that is asked for comes last
        for file in files:
            os.replace(file, path.parent / file.name)
    return replace(written, reports=tuple(path.parent / name for name in texts))


@dataclass(frozen=True, eq=False)
class _Judge:
    """What a file is held to."""

    model: nn.Module
    compiled: Compiled
    name: str
    limit: float

    def verified(self, reading: Reading, batches: Sequence[Inputs], data: Data) -> Verification:
        """Compares what a reader computes with what the file is to compute, and the file with the network on the
        examples that are held out."""
        every = [*batches, *_batches(data.held_out)]
        reference = reading.reference or self.compiled.reference
        difference, examples = 0.0, 0
        taken: list[tuple[Any, Any, int]] = []
        for number, (inputs, outputs) in enumerate(zip(every, reading.outputs, strict=False)):
            own, shape = _leaves(self.model, inputs)
            if number < 2 or self.compiled.compared is None or examples < self.compiled.compared:
                must = own if reference is None else reference(inputs)
                difference = max(difference, _difference(must, outputs))
                examples += len(pytree.tree_leaves(inputs)[0])
                self._hold(difference, reading.reader)
            if number >= len(batches):
                taken.append((_tree(own, shape), _tree(outputs, shape), len(pytree.tree_leaves(inputs)[0])))
        if examples < sum(len(pytree.tree_leaves(inputs)[0]) for inputs in batches[:2]):
            raise NotVerified(f"{reading.reader} has run {examples} examples of {self.name}: nothing was written")
        before, after, count = _metrics(taken, data)
        self._hold_accuracy(before, after)
        return Verification(
            reader=reading.reader,
            simulated_by=reading.simulated_by,
            examples=examples,
            difference=difference,
            limit=self.limit,
            held_out=count,
            before=before,
            after=after,
        )

    def _hold(self, difference: float, reader: str) -> None:
        if not difference <= self.limit:
            what = "the model" if self.compiled.reference is None else "it was compiled to"
            raise NotVerified(
                f"{self.name} computes something else than {what}: outputs by {reader} differ by {difference:.2g} of "
                f"their largest number, of {self.limit:g} at most; nothing was written"
            )

    def _hold_accuracy(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        most = self.compiled.most_lost
        if most is not None and "accuracy" in before and before["accuracy"] - after["accuracy"] > most + 1e-12:
            raise NotVerified(
                f"{self.name} is right in {after['accuracy']:.2%} of the examples that were held out, and the model "
                f"in {before['accuracy']:.2%}: {most * 100:g} points less at most were allowed; nothing was written"
            )


def _concluded(compiled: Compiled, found: Sequence[Verification]) -> str:
    """Return what the target concludes, and what was to be held to and could not."""
    if compiled.most_lost is None or any("accuracy" in one.before for one in found):
        return compiled.conclusion
    unchecked = (
        f'No metric "accuracy" was taken on held-out examples: that no more than {compiled.most_lost:g} of it is lost '
        "was not checked."
    )
    return f"{compiled.conclusion} {unchecked}".strip()


def _metrics(taken: Sequence[tuple[Any, Any, int]], data: Data) -> tuple[dict[str, float], dict[str, float], int]:
    """Return each metric of the network and of the file, and the number of examples."""
    metrics = {"accuracy": accuracy} if data.metrics is None else data.metrics
    if not taken or data.held_out is None or not metrics:
        return {}, {}, 0
    total, at = sum(count for *_, count in taken), 0
    sums = [dict.fromkeys(metrics, 0.0), dict.fromkeys(metrics, 0.0)]
    for *both, count in taken:
        targets = _rows(data.held_out.targets, slice(at, at + count))
        at += count
        for outputs, sums_of_one in zip(both, sums, strict=True):
            for name, metric in metrics.items():
                sums_of_one[name] += float(metric(outputs, targets)) * count
    before, after = ({name: value / total for name, value in one.items()} for one in sums)
    return before, after, total


def _batches(examples: Examples | None) -> list[Inputs]:
    if examples is None:
        return []
    count = len(pytree.tree_leaves(examples.inputs)[0])
    return [_rows(examples.inputs, slice(at, at + AT_ONCE)) for at in range(0, count, AT_ONCE)]


def _leaves(model: nn.Module, inputs: Inputs) -> tuple[list[Any], Any]:
    with torch.no_grad():
        leaves, shape = pytree.tree_flatten(called(model, inputs))
    return [_array(x) for x in leaves], shape


def _tree(outputs: Sequence[Any], shape: Any) -> Any:
    return pytree.tree_unflatten([torch.from_numpy(np.asarray(x)) for x in outputs], shape)


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


def _in_order(data: Data, sample: Inputs) -> Data:
    """Return the data with the inputs of examples as ``_as_in`` says."""
    found: dict[str, Any] = {}
    for name in ("calibration", "held_out"):
        examples = getattr(data, name)
        if examples is not None:
            found[name] = replace(examples, inputs=_as_in(sample, examples.inputs))
    return replace(data, **found)


def _as_in(sample: Inputs, inputs: Inputs) -> Inputs:
    """Return inputs by name in the order of the sample's, which is that of the file. Raises ValueError where names
    differ."""
    if not isinstance(sample, dict):
        return inputs
    if not isinstance(inputs, dict) or inputs.keys() != sample.keys():
        names = sorted(inputs) if isinstance(inputs, dict) else f"no names, but {type(inputs).__name__}"
        raise ValueError(f"inputs have {names}, and those of sample= are {sorted(sample)}: give the same names")
    return {name: inputs[name] for name in sample}


def _rows(inputs: Inputs, which: slice) -> Inputs:
    return pytree.tree_map(lambda x: x[which], inputs)


def _difference(expected: Sequence[Any], found: Sequence[Any]) -> float:
    """Return the largest difference, relative to the largest number of its output; infinite where number or shapes
    differ."""
    if len(expected) != len(found):
        return float("inf")
    worst = 0.0
    for own, theirs in zip(expected, found, strict=True):
        own = np.asarray(own)
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
def _named(path: Path) -> Iterator[None]:
    """Raise ApportionError, with the file's name and the cure, where there is no room for it."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise ApportionError(
            f"{path} could not be written: {error.strerror}; free some of the disk, or give a path on another one"
        ) from error


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
