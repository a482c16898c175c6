"""A look at the batches of a run as collate makes them, before the first step: those that could not be divided over the
ranks, or on a rank, are named while nothing is trained yet."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from torch.utils.data import default_collate

from apportion.comm.group import unlike_rows
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.loss_terms import examples
from apportion.core.sampler import DataShard
from apportion.core.strategy import Strategy
from apportion.core.workload import Workload
from apportion.parallel.replica.loss_weighting import refuse_unjoined
from apportion.runtime.worker.mistakes import is_mistake

MOST_ROWS = 4096
"""The number of rows of a batch up to which batches are made: larger ones may not fit the memory beside a proof."""


AUGMENT_SECONDS = 0.25
"""The seconds in which batches are made of rows that are collated as usual, at most."""


@dataclass(frozen=True)
class BatchDivision:
    """How a strategy divides each batch."""

    ranks: int
    """The number of ranks that have a share of each batch; 1: each has the whole one."""
    parts: int
    """The number of micro-batches into which a rank divides what it has."""

    @classmethod
    def of(cls, strategy: Strategy, ranks: int) -> BatchDivision | None:
        """Returns how a strategy divides batches over a number of ranks; None where that is not known of it."""
        if not (strategy.exact and strategy.divides_batches) or getattr(strategy, "of", None) is not None:
            return None
        staged = hasattr(strategy, "cuts")  # whose ranks each have the whole batch
        return cls(1 if staged else ranks, getattr(strategy, "microbatches", 1))


def refused_batch(workload: Workload, division: BatchDivision, rare: Sequence[int], seconds: float) -> str | None:
    """Makes the batches of the first epoch, one of each size and those with rare rows first, for as long as there is
    time; returns how one of them cannot be divided, as a clause; None where each that was made can. What the workload
    itself raises is left to the run. Where rows are collated as usual, and augmented, AUGMENT_SECONDS are enough: what
    augment makes of a batch seldom depends on its rows."""
    if workload.collate is default_collate:
        seconds = min(seconds, AUGMENT_SECONDS)
    until = time.monotonic() + seconds
    source = BatchSource(workload)
    if source.keeps_rows or source.deal.lanes or workload.batch_size > MOST_ROWS:
        return None
    if workload.batch_size * _seconds_a_row(source) > seconds:  # not even one batch could be made in time
        return None
    for step in _steps(source, rare):
        if time.monotonic() > until:
            break
        try:
            _divide(workload, source, step, division)
        except ValueError as error:
            if not is_mistake(error):
                return None
            return f"the batch of step {step + 1} cannot be trained on: {error}"
        except Exception:
            return None
    return None


def _seconds_a_row(source: BatchSource) -> float:
    """Returns the seconds that a row takes to be loaded and collated. The first one may take longer than others."""
    began = time.monotonic()
    for row in range(2):
        began = time.monotonic()
        with suppress(Exception):  # a collate may leave out what it is given
            _ = source.rows(0, slice(row, row + 1)).inputs
    return time.monotonic() - began


def _steps(source: BatchSource, rare: Sequence[int]) -> Iterator[int]:
    steps = range(min(source.total, source.deal.batches))
    wanted = np.array(rare, dtype=np.int64)
    rare_steps = [step for step in steps if np.isin(source.deal.index(step), wanted).any()] if len(wanted) else []
    sizes = {source.deal.size(step): step for step in reversed(steps)}
    first = [*dict.fromkeys([*sizes.values(), *rare_steps])]
    yield from first
    made = set(first)
    yield from (step for step in steps if step not in made)


def _divide(workload: Workload, source: BatchSource, step: int, division: BatchDivision) -> None:
    """Divides a batch as the ranks will. ValueError, which names the leaf, where it cannot be divided."""
    shares = [source.at(step, DataShard(rank, division.ranks)) for rank in range(division.ranks)]
    shares = [share for share in shares if len(share)]
    for share in shares:
        if source.count is examples:
            _ = share.row_count
        for part in share.parts(division.parts):
            _ = part.inputs
    if workload.count is None and workload.update is None:
        _refuse_unlike(shares)


def _refuse_unlike(shares: Sequence[Batch]) -> None:
    """Raise ValueError where the targets of all ranks cannot be joined for a loss over all of them."""
    if len(shares) == 1:
        return
    for share in shares:
        refuse_unjoined(share.targets, "targets")
    rows = [[(t.shape[1:], t.dtype) for t in tree.tensors(share.targets)] for share in shares]
    if any(each != rows[0] for each in rows):
        shapes = [[f"{tuple(t.shape)} {t.dtype}" for t in tree.tensors(share.targets)] for share in shares]
        raise ValueError(unlike_rows([", ".join(each) for each in shapes]))
