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
from apportion.exporting.examples import (
    as_in,
    at_least_two,
    check_examples,
    check_inputs,
    check_targets,
    count,
    in_batches,
    resized,
    rows,
    varying,
)
from apportion.exporting.paired_loss import ComparedOutputs, MeanMetric, are_classes, held_metric, paired_loss
from apportion.exporting.target import (
    Compiled,
    Examples,
    Exported,
    Inputs,
    Reading,
    Target,
    TrainedNetwork,
    VaryingDimension,
    Verification,
    called,
)

PACKAGE = "apportion.exporting.targets"
LIMIT = 1e-4
"""The largest relative difference of the outputs that is accepted: float32 sums are taken in another order."""
AT_ONCE = 250
"""The number of examples in a batch of those that are held out."""

NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


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
    """The mean of (outputs, targets) by name, taken on what is held out; None: {"accuracy": accuracy} where the targets
    are classes, and otherwise none."""

    def __post_init__(self) -> None:
        """Raise ValueError, with the field's name, where a field is of another kind."""
        for name in ("calibration", "held_out"):
            examples = getattr(self, name)
            if not isinstance(examples, Examples | None):
                raise ValueError(
                    f"{name}= is {type(examples).__name__}, and must be Examples(inputs, targets), or None"
                )
        metrics: Any = {} if self.metrics is None else self.metrics
        if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
            raise ValueError(
                f"metrics={metrics!r:.80} must be functions of (outputs, targets) by name, such as "
                '{"mse": nn.functional.mse_loss}'
            )


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
    _check_kinds(chosen, check, data, limit)
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} for {path.name} does not exist: make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the file's name, such as {path / f'model{chosen.suffix}'}")
    wide = at_least_two(sample)
    data = _in_order(data or Data(), wide)
    others = [as_in(wide, inputs) for inputs in check]
    aside = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")
    with _named(path), _evaluating(model), aside as folder:
        free = _checked(model, wide, others, data)
        if free and not chosen.takes_any_size:
            raise ValueError(
                f"the inputs differ in {', '.join(map(str, free))}, and a file of {chosen} takes one size: pad or crop "
                'all examples to one size, or export to "onnx"'
            )
        batches = [wide, rows(wide, slice(0, 1)), *others]
        if free:
            batches += resized(model, wide, free)
            if data.calibration is not None:  # real inputs, perhaps the only ones of another size
                batches.append(rows(data.calibration.inputs, slice(0, 2)))
        trained = TrainedNetwork(
            module=model, sample=wide, calibration=data.calibration, training=data.training, collate=data.collate,
            loss=data.loss, metrics=data.metrics, varying=free,
        )  # fmt: skip
        made = Path(folder) / path.name
        compiled = chosen.write(trained, made)
        judge = _Judge(model, compiled, path.name, compiled.limit if compiled.limit is not None else limit)
        every = batches + in_batches(data.held_out, AT_ONCE)
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
        every = [*batches, *in_batches(data.held_out, AT_ONCE)]
        reference = reading.reference or self.compiled.reference
        difference, from_network, examples = 0.0, 0.0, 0
        taken: list[ComparedOutputs] = []
        for number, (inputs, outputs) in enumerate(zip(every, reading.outputs, strict=False)):
            own, shape = _leaves(self.model, inputs)
            apart = _difference(own, outputs)
            from_network = max(from_network, apart)
            if number < 2 or self.compiled.compared is None or examples < self.compiled.compared:
                difference = max(difference, apart if reference is None else _difference(reference(inputs), outputs))
                examples += count(inputs)
                self._hold(difference, reading.reader, inputs)
            if number >= len(batches):
                assert data.held_out is not None
                at = sum(one.examples for one in taken)
                targets = rows(data.held_out.targets, slice(at, at + count(inputs)))
                trees = _tree(own, shape), _tree(outputs, shape)
                taken.append(ComparedOutputs(targets=targets, before=trees[0], after=trees[1], examples=count(inputs)))
        if examples < sum(map(count, batches[:2])):
            raise NotVerified(f"{reading.reader} has run {examples} examples of {self.name}: nothing was written")
        before, after = _metrics(taken, data.metrics)
        self._hold_metric(taken, data.metrics)
        return Verification(
            reader=reading.reader,
            simulated_by=reading.simulated_by,
            examples=examples,
            difference=difference,
            limit=self.limit,
            network_difference=from_network,
            held_out=sum(one.examples for one in taken) if before else 0,
            before=before,
            after=after,
        )

    def _hold(self, difference: float, reader: str, inputs: Inputs) -> None:
        if not difference <= self.limit:
            what = "the model" if self.compiled.reference is None else "it was compiled to"
            shapes = ", ".join(str(tuple(x.shape)) for x in pytree.tree_leaves(inputs))
            raise NotVerified(
                f"{self.name} computes something else than {what}: outputs by {reader} differ by {difference:.2g} of "
                f"their largest number, of {self.limit:g} at most, for inputs of shape {shapes}; nothing was written"
            )

    def _hold_metric(self, taken: Sequence[ComparedOutputs], metrics: Mapping[str, MeanMetric] | None) -> None:
        held = held_metric(metrics, taken[0].before, taken[0].targets) if taken else None
        if self.compiled.most_lost is None or held is None:
            return
        name, function, classes = held
        lost = paired_loss(name, function, taken, most_lost=self.compiled.most_lost, classes=classes)
        if lost.proved:
            blamed = f"; {self.compiled.blamed()}" if self.compiled.blamed is not None else ""
            raise NotVerified(f"{self.name} {lost.sentence}{blamed}; nothing was written")


def _check_kinds(target: Any, check: Any, data: Any, limit: Any) -> None:
    """Raise ValueError, with the argument's name, where an argument is of another kind than ``export`` takes."""
    if not isinstance(target, Target):
        raise ValueError(f'target={target!r:.60} must be a target, or its name, such as "onnx"')
    if not isinstance(check, list | tuple):
        raise ValueError(
            f"check= is {type(check).__name__}, and must be a list of inputs as sample= has them: [inputs]"
        )
    if not isinstance(data, Data | None):
        raise ValueError(
            f"data= is {type(data).__name__}, and must be Data(calibration=Examples(inputs, targets), held_out=...)"
        )
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise ValueError(f"limit={limit!r} must be the largest relative difference, a number of at least 0")


def _checked(model: nn.Module, sample: Inputs, others: Sequence[Inputs], data: Data) -> tuple[VaryingDimension, ...]:
    """Return the dimensions in which the inputs that were given differ. Raises ValueError, with the argument's name,
    where some of them are not as the sample is."""
    for inputs in others:
        check_inputs(model, sample, inputs, "check")
    given = [(examples, name) for examples, name in ((data.calibration, "calibration"), (data.held_out, "held_out"))]
    for examples, name in given:
        if examples is not None:
            check_examples(model, sample, examples, name)
    if data.held_out is not None:
        check_targets(data.held_out, "held_out")
    return varying(sample, [*others, *(examples.inputs for examples, _ in given if examples is not None)])


def _concluded(compiled: Compiled, found: Sequence[Verification]) -> str:
    """Return what the target concludes, and what was to be held to and could not."""
    if compiled.most_lost is None or any(one.before for one in found):
        return compiled.conclusion
    unchecked = (
        f"No metric was taken on held-out examples: that no more than {compiled.most_lost:g} of it is lost was not "
        "checked."
    )
    return f"{compiled.conclusion} {unchecked}".strip()


def _metrics(
    taken: Sequence[ComparedOutputs], metrics: Mapping[str, MeanMetric] | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Return each metric of the network and of the file."""
    if not taken:
        return {}, {}
    if metrics is None:
        metrics = {"accuracy": accuracy} if are_classes(taken[0].before, taken[0].targets) else {}
    total = sum(one.examples for one in taken)

    def means(outputs: Callable[[ComparedOutputs], Any]) -> dict[str, float]:
        return {
            name: sum(float(metric(outputs(one), one.targets)) * one.examples for one in taken) / total
            for name, metric in metrics.items()
        }

    return means(lambda one: one.before), means(lambda one: one.after)


def _leaves(model: nn.Module, inputs: Inputs) -> tuple[list[Any], Any]:
    with torch.no_grad():
        leaves, shape = pytree.tree_flatten(called(model, inputs))
    return [_array(x) for x in leaves], shape


def _tree(outputs: Sequence[Any], shape: Any) -> Any:
    return pytree.tree_unflatten([torch.from_numpy(np.asarray(x)) for x in outputs], shape)


def _array(output: torch.Tensor) -> Any:
    return (output.float() if output.dtype == torch.bfloat16 else output).numpy()  # numpy has no bfloat16


def _in_order(data: Data, sample: Inputs) -> Data:
    """Return the data with the inputs of examples as ``as_in`` says."""
    found: dict[str, Any] = {}
    for name in ("calibration", "held_out"):
        examples = getattr(data, name)
        if examples is not None:
            found[name] = replace(examples, inputs=as_in(sample, examples.inputs))
    return replace(data, **found)


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
        # Equal infinities and NaN at the same place count as equal; the difference of two infinities would be NaN and
        # compare as neither.
        other = np.flatnonzero(~((a == b) | (np.isnan(a) & np.isnan(b))))
        if other.size:
            most = np.abs(a[np.isfinite(a)]).max(initial=1e-12)
            apart = float(np.abs(a[other] - b[other]).max() / most)
            worst = max(worst, apart) if np.isfinite(apart) else float("inf")
    return worst


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise ApportionError, with the file's name and the cure, where the disk has no room for it."""
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
