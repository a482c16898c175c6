"""The analysis of whether a network ties the rows of a batch together, so that its parts, computed apart, would make
another network.

A strategy that divides the batch asks once, when it is built, with a few rows of the real data: the rows in two parts
must give the loss and the gradients of all of them, and leave the buffers as all of them would. Where they do not, the
same rows are given again with half of them replaced by the others: a number that changes with either half depends on
both, and the first layer that gives such a number without being given one is named. Statistics of the batch that
``nn.BatchNorm`` and its functions take are left out: they can be had of the whole batch, or are refused by name.

Where this is not clear (the forward takes no few rows, computes in half precision, is chaotic) nothing is refused.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apportion.core import tree
from apportion.core.data.batch import rows_of
from apportion.core.loss_terms import resolved, terms_of
from apportion.core.rng import fork_rng, gpus_in_use
from apportion.core.workload import Workload
from apportion.parallel.batch_coupling.row_probe import Called, Copied, Part, Ran
from apportion.parallel.batch_coupling.sync_batch_functions import by_class, own_forwards
from apportion.parallel.tracing.uncompiled import uncompiled

ROWS = 4
"""The number of rows that are looked at."""
MOST_SECONDS = 0.25
"""The most seconds that a forward and a backward pass of these rows may take to be made again."""
BOUND = {True: 1e-3, False: 1e-7}
"""The largest difference that is rounding, relative to the largest number of its kind: True where a part is computed in
float32."""
CHAOS = 1e3
"""The factor by which a difference that is not rounding exceeds what becomes of rounding."""
NUDGE = 1e-13
"""The relative change that is put into every weight to see what becomes of rounding."""
Rows = Callable[[int], Part]
"""A function that gives the inputs and targets of as many rows as it is asked for: ``BatchSource.sample``."""
_LEAST = 1e-4
"""The part of the largest gradient of all below which what is not zero is rounding."""
_CURE = "use single_device, or a strategy that gives every worker whole batches (tensor_parallel, layer_placement)"


def whole_batch_functions(
    model: nn.Module, workload: Workload, rows: Rows, *, strategy: str, again: bool = False
) -> list[str]:
    """The modules whose forward takes batch statistics by a function, which has to ask all ranks. ValueError, by name,
    for what ties rows together in any other way. ``again``: that has been checked before."""
    found = [name for name in _probe(model, workload, rows, strategy, judges=not again)]
    return sorted({*found, *own_forwards(model)})


def refuse_coupling(model: nn.Module, workload: Workload, rows: Rows, *, strategy: str) -> None:
    """Raise ValueError, by name, for all that ties rows together, where parts of the batch are computed one by one."""
    layers: dict[str, Any] = dict(model.named_modules())
    known = [n for n in own_forwards(model) if layers[n].training or layers[n].running_mean is None]
    own = [*known, *_probe(model, workload, rows, strategy, judges=True)]
    if own:
        name = _named(model, own[0])
        raise ValueError(
            f"{strategy} would give {name} the statistics of a part of the batch: use a normalisation that looks at "
            "one example (GroupNorm, LayerNorm), or data_parallel"
        )


def _probe(model: nn.Module, workload: Workload, rows: Rows, strategy: str, *, judges: bool) -> list[str]:
    """The modules that call functions which take batch statistics."""
    with fork_rng(gpus_in_use()), warnings.catch_warnings(), uncompiled():
        warnings.simplefilter("ignore")
        copied, problem = _run_probe(model, workload, rows, judges=judges)
    if problem is not None:
        raise ValueError(f"{problem}; {strategy} divides the batch: {_CURE}")
    return [n for n in copied.normalised if not by_class(model.get_submodule(n))] if copied is not None else []


def _run_probe(model: nn.Module, workload: Workload, rows: Rows, *, judges: bool) -> tuple[Copied | None, str | None]:
    """The copy that was looked at, if there could be one, and what is wrong with the network, if that is clear."""
    copied = None
    for double in (True, False):  # where it wants float32, that is what it gets
        try:
            copied = Copied(model, workload, double=double)
            looked = _CouplingProbe(model, workload, rows(ROWS), copied)
            if judges:
                return copied, looked.problem()
            looked.forward()
            return copied, None
        except Exception:  # it cannot be called like this: what it says of real batches is its own affair
            pass
    return copied, None


def _named(model: nn.Module, name: str) -> str:
    return f"{name} ({type(model.get_submodule(name)).__name__})" if name else type(model).__name__


class _CouplingProbe:
    """A network, a few rows of data, and what they show."""

    def __init__(self, model: nn.Module, workload: Workload, rows: Part, copied: Copied) -> None:
        self._model, self._workload, self.copied = model, workload, copied
        self._rows: Part = copied.cast(rows[0]), copied.cast(rows[1])
        self._row_count = tree.length(rows[0])

    def forward(self) -> None:
        self.copied.forward(self._rows[0])

    def problem(self) -> str | None:
        """The thing that ties the rows together, as the beginning of a sentence; None: nothing that is clear."""
        if self._row_count < 2:
            return None
        if self._workload.update is not None:
            self.forward()
            return None
        began = time.perf_counter(), time.process_time()
        whole = self.copied.run([self._rows], [1.0])
        took = min(time.perf_counter() - began[0], time.process_time() - began[1])  # others may hold the cores
        if took > MOST_SECONDS or self.copied.low or whole.loss is None:
            return None
        if whole.drew:
            return self._of_draws(whole)
        halves = self._halves()
        counts = [self._count(part) for part in halves]
        if not sum(counts):
            return None
        weights = [count / sum(counts) for count in counts]
        if abs(sum(counts) - self._count(self._rows)) > 1e-6 * sum(counts):
            return None
        together = self._workload.count is None
        apart = self.copied.run(halves, weights, together=together)
        self._parts = halves, weights, together
        buffer = self._buffer(whole)
        if buffer is not None:
            return buffer
        return self._explained(whole, apart) if self._differ(apart, whole) else None

    def _halves(self) -> list[Part]:
        half = self._row_count // 2
        inputs, targets = self._rows
        return [
            (rows_of(inputs, rows), rows_of(targets, rows)) for rows in (slice(0, half), slice(half, self._row_count))
        ]

    def _count(self, part: Part) -> float:
        count = resolved(self._workload.terms, self._model)
        return float(tree.length(part[1])) if count is None else terms_of(count, part[1])

    # What differs

    def _bound(self) -> float:
        return BOUND[self.copied.single]

    def _differ(self, found: Ran, expected: Ran) -> bool:
        return self._distance(found, expected) > self._bound()

    def _distance(self, found: Ran, expected: Ran) -> float:
        """The largest difference of the loss, and of a parameter's gradient, relative to the largest that are there;
        infinite where they are not finite numbers."""
        assert found.loss is not None
        assert expected.loss is not None
        scale = max(float(expected.loss.abs()), 1e-30)
        worst = float((found.loss - expected.loss).abs()) / scale
        apart = [worst, *self._gradients_apart(found, expected).values()]
        return max(apart) if all(map(math.isfinite, apart)) else math.inf

    def _gradients_apart(self, found: Ran, expected: Ran) -> dict[str, float]:
        largest = max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=0.0)
        apart = {}
        for name in {**expected.gradients, **found.gradients}:
            a, b = found.gradients.get(name), expected.gradients.get(name)
            one = a if a is not None else b
            assert one is not None
            a, b = (torch.zeros_like(one) if g is None else g for g in (a, b))
            if one.numel():
                scale = max(float(b.abs().max()), _LEAST * largest, 1e-30)
                apart[name] = float((a - b).abs().max()) / scale
        return apart

    def _buffer(self, whole: Ran) -> str | None:
        """The message for a buffer that a part of the rows leaves as all of them would not; None: there is none."""
        before = self.copied.buffers
        changed = [n for n, b in whole.buffers.items() if not _same(before.get(n), b, 0.0)]
        for inputs, _ in self._parts[0] if changed else ():
            left = self.copied.forward(inputs)
            for name in changed:
                if not _same(left.get(name), whole.buffers[name], self._bound()):
                    return _of_buffer(name)
        return None

    # Why

    def _explained(self, whole: Ran, apart: Ran) -> str | None:
        """The message that names the cause of a difference; None where this may be rounding that grows, or comes and
        goes."""
        again = self.copied.run([self._rows], [1.0])
        if self._distance(again, whole) > 0.0 or not self._distance(apart, whole) < float("inf"):
            return None
        noise = self._nudged(whole)
        if noise > self._bound() or not self._distance(apart, whole) > CHAOS * noise:
            return None
        called = self._coupled()
        if called is not None and called.name:
            return called.text
        is_loss, loss = self._loss_of_rows(whole)
        if is_loss:
            return loss
        if called is not None:
            return called.text
        gradients = self._gradients_apart(apart, whole)
        name = max(gradients, key=lambda n: gradients[n], default="")
        return (
            f"the gradient of {name} that a batch gives is not the sum of what its parts give"
            if name
            else f"{type(self._model).__name__} gives a batch another loss than its parts"
        )

    def _nudged(self, whole: Ran) -> float:
        generator = torch.Generator().manual_seed(0)
        parameters = list(self.copied.model.parameters())
        kept = [p.detach().clone() for p in parameters]
        nudge = NUDGE if self.copied.double else 1e-6
        try:
            with torch.no_grad():
                for p in parameters:
                    signs = torch.randint(0, 2, p.shape, generator=generator).to(p.device, p.dtype) * 2 - 1
                    p.mul_(1 + nudge * signs)
            return self._distance(self.copied.run([self._rows], [1.0]), whole)
        finally:
            with torch.no_grad():
                for p, value in zip(parameters, kept, strict=True):
                    p.copy_(value)

    def _coupled(self) -> _Named | None:
        """The first call that gives a number which depends on both halves, and is given none."""
        runs = self._taped()
        if len({tuple(c.name for c in run.calls) for run in runs}) != 1:
            return None  # another way was taken for other rows
        for scalars in (False, True):
            for calls in zip(*(run.calls for run in runs), strict=True):
                inputs = _depend_on_both([c.inputs for c in calls], self._bound(), scalars=True)
                outputs = _depend_on_both([c.outputs for c in calls], self._bound(), scalars=scalars)
                if outputs and inputs is False:
                    return _Named(self._model, calls[0])
        return None

    def _taped(self) -> list[Ran]:
        """The runs of all rows, of the first half with itself in the second's place, and of the second half with itself
        in the first's place."""
        half = self._row_count // 2
        first, second = list(range(half)), list(range(half, self._row_count))
        chosen = (
            [*first, *second],
            first + [first[i % half] for i in range(len(second))],
            second[:half] + second,
        )
        parts = [tree.map_tensors(lambda t, rows=rows: t[rows], self._rows) for rows in chosen]  # type: ignore[misc]
        return [self.copied.run([part], [1.0], tape=True) for part in parts]

    def _loss_of_rows(self, whole: Ran) -> tuple[bool, str | None]:
        """A pair: whether it is the loss that differs, for outputs that are as they are, and the message if it couples
        them. Where every half's gradient is only weighted in another way, as by a sum or a wrong count, it does not: a
        proof tells that."""
        outputs, targets = whole.outputs, self._rows[1]
        leaves = tree.tensors(outputs)
        if self._workload.count is None or not leaves or any(t.dim() == 0 or len(t) != self._row_count for t in leaves):
            return False, None
        half = self._row_count // 2
        halves = slice(0, half), slice(half, self._row_count)
        everything, given = self._loss_gradients(outputs, targets)
        found = [self._loss_gradients(rows_of(outputs, r), rows_of(targets, r)) for r in halves]
        weights = self._parts[1]
        scale = max(float(everything.abs()), 1e-30)
        mean = sum(w * float(loss) for w, (loss, _) in zip(weights, found, strict=True) if w)
        apart = [abs(mean - float(everything)) / scale]
        bent = False
        for rows, weight, (_, own) in zip(halves, weights, found, strict=True):
            for whole_gradient, part in zip(given, own, strict=True):
                a, b = whole_gradient[rows].flatten().double(), part.flatten().double()
                largest = max(float(whole_gradient.abs().max()), 1e-30)
                apart.append(float((a - weight * b).abs().max()) / largest)
                factor = (a @ b) / (b @ b).clamp(min=1e-300)
                bent = bent or float((a - factor * b).abs().max()) > self._bound() * largest
        if max(apart) <= self._bound():
            return False, None
        text = (
            "the loss couples the rows of a batch: it is not the mean of the losses of its parts, each with the terms "
            "that count says; give count=None, so that it sees all outputs"
        )
        return True, text if bent else None

    def _loss_gradients(self, outputs: Any, targets: Any) -> tuple[Tensor, list[Tensor]]:
        leaf = tree.map_tensors(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), outputs)
        wanted = [t for t in tree.tensors(leaf) if t.requires_grad]
        loss = self.copied.loss_of(leaf, targets)
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        return loss.detach(), [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]

    def _of_draws(self, whole: Ran) -> str | None:
        """The message for a network that draws numbers of its own, which are the same where the shapes are; None:
        nothing is found."""
        again = self.copied.run([self._rows], [1.0])
        runs = self._taped()
        if self._distance(again, whole) > 0.0 or len({tuple(c.name for c in run.calls) for run in runs}) != 1:
            return None
        for name in whole.buffers:
            left = [run.buffers.get(name) for run in runs]
            if not all(_same(b, left[0], self._bound()) for b in left[1:]):
                return _of_buffer(name)
        last = [run.calls[-1] for run in runs if run.calls]
        if not last or not _depend_on_both([c.outputs for c in last], self._bound(), scalars=False):
            return None
        called = self._coupled()
        return None if called is None else called.text


class _Named:
    """The call that is the cause, and the message for it."""

    def __init__(self, model: nn.Module, called: Called) -> None:
        self.name = called.name
        self.text = (
            f"what {_named(model, called.name)} gives for a row depends on the rows beside it, as a mean or a "
            "deviation over the batch does"
        )


def _of_buffer(name: str) -> str:
    return (
        f"the buffer {name} takes in what the rows of a batch give (a mean of activations, a codebook, a queue), and "
        "the rows of one worker would make another of it"
    )


def _same(found: Tensor | None, expected: Tensor | None, bound: float) -> bool:
    if found is None or expected is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return found is expected
    if not expected.is_floating_point() and not expected.is_complex():
        return torch.equal(found, expected)
    scale = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max()) if expected.numel() else 0.0
    return bool(torch.isclose(found, expected, rtol=0.0, atol=bound * scale, equal_nan=True).all())


def _depend_on_both(runs: Sequence[list[Tensor]], bound: float, *, scalars: bool) -> bool | None:
    """Return whether a number in the tensors of three runs changes with either half of the rows; None where it cannot
    be found out, as their shapes differ."""
    plain, first, second = runs
    if not [t.shape for t in plain] == [t.shape for t in first] == [t.shape for t in second]:
        return None
    for a, b, c in zip(plain, first, second, strict=True):
        if a.numel() and (scalars or a.dim()):
            moved = [_differs(x, a, bound) for x in (b, c)]
            if bool((moved[0] & moved[1]).any()):
                return True
    return False


def _differs(x: Tensor, plain: Tensor, bound: float) -> Tensor:
    if not plain.is_floating_point():
        return x != plain
    scale = plain.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return ((x - plain).abs() > bound * scale) & plain.isfinite() & x.isfinite()
