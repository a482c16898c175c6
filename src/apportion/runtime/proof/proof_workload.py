"""A workload as a proof trains it: on a few rows, on the beginnings of its sequences, with rates at which weights move,
or with plain SGD."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, TensorDataset

from apportion.core.data.acted import ActedDataset
from apportion.core.order import Order
from apportion.core.rng import seeded_rng
from apportion.core.sampler import PartSampler, rows_of_parts
from apportion.core.torch_private import pytree, version_of
from apportion.core.workload import Parameters, Workload

SMALL = 1e-2
"""A rate below this share of the optimizer's own moves weights too little."""
FURTHEST = 100_000
"""The number of steps that a schedule is advanced by at most."""
MOST_ROWS = 4096
"""The most rows of whole batches that a proof has sent to its host."""


def moving(workload: Workload) -> Workload:
    """Returns the workload with its schedule begun where the rate is not next to nothing, as it is at the start of a
    warm-up."""
    if workload.schedule is None:
        return workload
    return replace(workload, schedule=_Moving(workload.schedule))


def with_plain_sgd(workload: Workload) -> Workload:
    """Returns the workload with SGD of rate 1 in the place of each optimizer: what the weights move by is the
    gradient."""
    return replace(workload, optimizer=_PlainSgd(workload.optimizer), schedule=None)


def few_rows(
    workload: Workload,
    rows: int,
    steps: int,
    workers: int,
    lengths: Sequence[int] = (),
    rare: Sequence[int] = (),
) -> Workload:
    """Returns the workload on ``rows`` rows a batch, taken evenly from its data, with an epoch that ends in a short
    batch where the workload's own does, and with as many steps as it has. ``steps``: the number that will be made of
    it; an epoch of whole batches that is not longer than that stays as it is. ``lengths``: those of the parts of its
    data, where they are known: else all parts are opened. ``rare``: rows that are among them, the first ones of these
    where not all of them fit; then no epoch stays as it is that leaves some out."""
    if workload.parts is not None:
        known = lengths or workload.parted_data().open_all().lengths
        return _few_rows_of_parts(workload, rows, steps, workers, known, rare)
    with seeded_rng(workload.seed):
        examples: int = len(workload.open_data())  # type: ignore[arg-type]
    wanted = _wanted(workload, examples, rows, steps, workers, chooses=bool(rare))
    if wanted is None:
        return workload
    evenly, order, (size, batches) = workload.order != "sequential", workload.order, _smaller(workload, rows)
    if isinstance(order, Order):
        order = order.of_rows(spread_with(rare, examples, wanted, evenly=evenly))
    # Opened anew each time, as the workload's own is: a dataset may change as it is read.
    return replace(
        workload.with_data(lambda data: _sample(data, wanted, rare, evenly=evenly)),
        batch_size=size,
        accumulate=batches,
        order=order,
        steps=workload.total_steps(workload.updates_per_epoch(examples)),
    )


def _smaller(workload: Workload, rows: int) -> tuple[int, int]:
    """Returns the ``batch_size`` and ``accumulate`` of an update of at most ``rows`` examples, in as many batches as
    before, or in fewer of one size."""
    rows = min(rows, workload.update_size)
    batches = next(n for n in range(min(workload.accumulate, rows), 0, -1) if rows % n == 0)
    return rows // batches, batches


def rows_of_proof(
    workload: Workload, lengths: Sequence[int], rows: Iterable[int], steps: int, workers: int
) -> list[set[int]]:
    """Returns the rows of each part of the data that a proof of ``steps`` steps may ask for: with each of these numbers
    of rows in a batch, and with whole batches where those are few enough."""
    found: list[set[int]] = [set() for _ in lengths]
    for count in (*rows, workload.update_size):
        for some in {steps, min(steps, 2)}:  # gradients are compared for fewer steps
            chosen = _rows_of_parts(workload, count, some, workers, lengths)
            if chosen is None:
                chosen = _first_batches(workload, lengths, some) if some * workload.update_size <= MOST_ROWS else []
            for of_part, index in zip(found, chosen, strict=False):
                of_part.update(index)
    return found


def _first_batches(workload: Workload, lengths: Sequence[int], steps: int) -> list[list[int]]:
    """Returns the rows of each part that the first batches of the workload hold."""
    sampler = PartSampler(
        lengths, workload.update_size, order=workload.order, seed=workload.seed, drop_last=workload.drop_last
    )
    ends, found = [0, *accumulate(lengths)], [list[int]() for _ in lengths]
    for step in range(min(steps, workload.total_steps(sampler.batches))):
        for row in sampler.index(step).tolist():
            part = bisect_right(ends, row) - 1
            found[part].append(row - ends[part])
    return found


def _wanted(
    workload: Workload, examples: int, rows: int, steps: int, workers: int, *, chooses: bool = False
) -> int | None:
    """Returns how many rows of ``examples`` examples the workload is proved on; None where it stays as it is, which it
    does not where rows are chosen and its first steps would leave some out."""
    size = workload.update_size
    rows = min(rows, size)
    batches = workload.updates_per_epoch(examples)
    draws = workload.order.length(examples) if isinstance(workload.order, Order) else examples
    last = 0 if workload.drop_last else draws % size
    if rows == size and (last == 0 or batches <= max(2, steps)) and not (chooses and batches > steps):
        return None
    short = 0 if last == 0 else last if last < workers else max(workers, rows * last // size)
    return min(examples, 2 * rows if short == 0 else rows + short)


def _few_rows_of_parts(
    workload: Workload, rows: int, steps: int, workers: int, lengths: Sequence[int], rare: Sequence[int]
) -> Workload:
    chosen = _rows_of_parts(workload, rows, steps, workers, lengths, rare)
    counted = replace(workload, steps=workload.total_steps(workload.updates_per_epoch(sum(lengths))))
    if chosen is None:
        return counted
    size, batches = _smaller(workload, rows)
    return replace(
        counted,
        data=lambda part: chosen_rows(workload.open_part(part), chosen[part]),
        batch_size=size,
        accumulate=batches,
    )


def _rows_of_parts(
    workload: Workload, rows: int, steps: int, workers: int, lengths: Sequence[int], rare: Sequence[int] = ()
) -> list[list[int]] | None:
    """Returns the rows of each part that the workload is proved on, one at least of each; None where it stays as it
    is. ``rare``: rows, counted over all parts, that are among them as far as they fit into those of their part."""
    wanted = _wanted(workload, sum(lengths), rows, steps, workers, chooses=bool(rare))
    if wanted is None:
        return None
    counts = [min(length, max(1, count)) for length, count in zip(lengths, rows_of_parts(lengths, wanted), strict=True)]
    evenly = workload.order != "sequential"
    ends, of_parts = [0, *accumulate(lengths)], [list[int]() for _ in lengths]
    for row in rare:
        part = bisect_right(ends, row) - 1
        of_parts[part].append(row - ends[part])
    sizes = zip(of_parts, lengths, counts, strict=True)
    return [spread_with(some, length, count, evenly=evenly) for some, length, count in sizes]


def short_sequences(workload: Workload) -> Workload:
    """Returns the workload on the beginnings of its sequences. Raises ValueError, as its data are opened, where it has
    none."""
    return workload.with_data(lambda data: data if isinstance(data, ActedDataset) else with_short_sequences(data))


def divided_evenly(workload: Workload, workers: int) -> Workload:
    """Returns the workload with as many batches for each worker as for the others. Where each takes whole batches, a
    worker that has fewer in the last round waits for the others, which make no more steps in a proof than
    it does."""
    steps = workload.steps
    if steps is None:
        with seeded_rng(workload.seed):
            examples: int = len(workload.open_data())  # type: ignore[arg-type]
        steps = workload.total_steps(workload.updates_per_epoch(examples))
    return replace(workload, steps=max(1, steps // workers) * workers)


def _sample(data: Dataset[Any], wanted: int, rare: Sequence[int], *, evenly: bool) -> Dataset[Any]:
    """Returns ``wanted`` rows. A data set that the network makes stays as it is: of smaller batches it makes fewer
    examples, and there are none yet that could be taken from it."""
    if isinstance(data, ActedDataset):
        return data
    return chosen_rows(data, spread_with(rare, len(data), wanted, evenly=evenly))  # type: ignore[arg-type]


def spread_with(rare: Sequence[int], examples: int, wanted: int, *, evenly: bool = True) -> list[int]:
    """Returns ``wanted`` of the rows, in their order: these rare ones, the first of them where there are more, and the
    others taken evenly or from the beginning."""
    chosen = set(rare[:wanted])
    for row in _spread(examples, wanted - len(chosen), evenly=evenly):
        # The next free row; one exists, since fewer rows are chosen than there are.
        while row in chosen:
            row = (row + 1) % examples
        chosen.add(row)
    return sorted(chosen)


def _spread(examples: int, wanted: int, *, evenly: bool) -> list[int]:
    return [i * examples // wanted if evenly else i for i in range(wanted)]


def chosen_rows(data: Dataset[Any], index: list[int]) -> Dataset[Any]:
    """Returns the rows of these indices as a data set of their own."""
    if type(data) is TensorDataset:  # so that its rows are gathered as the run gathers them
        at = torch.tensor(index)
        return TensorDataset(*(t.index_select(0, at.to(t.device)) for t in data.tensors))
    return _Chosen(data, index) if getattr(data, "__getitems__", None) is None else _ChosenTogether(data, index)


@dataclass(frozen=True)
class _Chosen(Dataset[Any]):
    """The chosen examples of a dataset, each asked for by itself: what it draws is then its own."""

    data: Dataset[Any]
    index: list[int]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Any:
        return self.data[self.index[number]]


class _ChosenTogether(_Chosen):
    """The chosen examples of a dataset that is asked for many at once."""

    def __getitems__(self, numbers: list[int]) -> Any:
        together: Any = self.data
        return together.__getitems__([self.index[number] for number in numbers])


@dataclass(frozen=True)
class _Moving:
    schedule: Callable[[Optimizer, int], LRScheduler]

    def __call__(self, optimizer: Optimizer, total: int) -> LRScheduler:
        made = self.schedule(optimizer, total)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects an update before each step of a schedule
            for _ in range(min(total // 2, FURTHEST)):
                if not _stands_still(optimizer):
                    break
                made.step()
        return made


def _stands_still(optimizer: Optimizer) -> bool:
    return all(
        float(group["lr"]) < SMALL * float(group.get("initial_lr", group["lr"]))
        for group in optimizer.param_groups
        if isinstance(group.get("lr"), float | int | Tensor)
    )


@dataclass(frozen=True)
class _PlainSgd:
    optimizer: Callable[[Parameters], Optimizer | Mapping[str, Optimizer]]

    def __call__(self, parameters: Parameters) -> Optimizer | Mapping[str, Optimizer]:
        made = self.optimizer(parameters)
        if isinstance(made, Optimizer):
            return _plain(made)
        return {name: _plain(one) for name, one in made.items()}


def _plain(optimizer: Optimizer) -> Optimizer:
    groups: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
    return torch.optim.SGD([{"params": group} for group in groups], lr=1.0)


LENGTH = 16
"""The number of tokens that a sequence is cut to."""
_TOKENS = (torch.int32, torch.int64)


def with_short_sequences(data: Dataset[Any]) -> Dataset[Any]:
    """Return the same examples with sequences of ``LENGTH`` tokens. Raises ValueError where no example has any.

    A sequence of tokens is an input of whole numbers with one dimension. What else in an example has a dimension of
    that length (labels, masks, features of each token) is cut to the same tokens.
    """
    if not any(_lengths(data[i]) for i in range(min(4, len(data)))):  # type: ignore[arg-type]
        raise ValueError(f"no example has a sequence of more than {LENGTH} tokens that could be cut")
    if type(data) is TensorDataset:
        lengths = _lengths(data[0])
        return TensorDataset(*(_cut(t, lengths, first=1) for t in data.tensors))
    return _Short(data) if getattr(data, "__getitems__", None) is None else _ShortTogether(data)


@dataclass(frozen=True)
class _Short(Dataset[Any]):
    data: Dataset[Any]

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, number: int) -> Any:
        return _shortened(self.data[number])


class _ShortTogether(_Short):
    """The shortened examples of a data set that is asked for many at once."""

    def __getitems__(self, numbers: list[int]) -> Any:
        together: Any = self.data
        return [_shortened(example) for example in together.__getitems__(numbers)]


def _shortened(example: Any) -> Any:
    lengths = _lengths(example)
    return pytree.tree_map(lambda leaf: _cut(leaf, lengths), example)


def _lengths(example: Any) -> set[int]:
    """Returns the lengths of an example's sequences that are to be cut."""
    inputs = example[0] if isinstance(example, tuple | list) and len(example) > 1 else example
    sequences = (leaf for leaf in pytree.tree_leaves(inputs) if _is_tokens(leaf))
    return {n for leaf in sequences if (n := int(leaf.shape[0])) > LENGTH}


def _is_tokens(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dtype in _TOKENS and leaf.ndim == 1
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind == "i" and leaf.ndim == 1


def _cut(leaf: Any, lengths: Collection[int], *, first: int = 0) -> Any:
    """Returns the beginning along every dimension of one of these lengths, from the dimension ``first`` on."""
    if not isinstance(leaf, Tensor | np.ndarray):
        return leaf
    found = leaf[tuple(slice(LENGTH if at >= first and n in lengths else None) for at, n in enumerate(leaf.shape))]
    return found.contiguous() if isinstance(found, Tensor) else found


def opened_once(workload: Workload) -> Workload:
    """Returns the workload with a data set of tensors opened once in this process, for as long as nothing writes to
    them. Any other data set may have state, and is opened anew each time; so are parts."""
    return workload if workload.parts is not None else replace(workload, data=_Opened(workload.data))


@dataclass
class _Opened:
    make: Callable[[], Dataset[Any]]
    _kept: TensorDataset | None = None
    _versions: list[int] = field(default_factory=list)

    def __call__(self) -> Dataset[Any]:
        kept = self._kept
        # torch counts writes in place; a tensor that the workload has written to is made anew.
        if kept is not None and [version_of(t) for t in kept.tensors] == self._versions:
            return kept
        found = self.make()
        if type(found) is TensorDataset:
            self._kept, self._versions = found, [version_of(t) for t in found.tensors]
        return found
