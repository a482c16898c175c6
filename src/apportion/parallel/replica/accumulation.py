"""One update of several batches: forward and backward batch by batch, whose gradients add up to that of all their
examples.

::

    update of 3 batches   backward(batch 0) * terms 0 / terms     p.grad is the mean over
                        + backward(batch 1) * terms 1 / terms     the loss terms of all
                        + backward(batch 2) * terms 2 / terms     three batches

A batch with fewer loss terms counts for less, as it would in one batch of all the examples.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.workload import Workload
from apportion.parallel.replica.replica import Replica


def batches_in(batch: Batch, workload: Workload) -> int:
    """The number of batches in the examples of an update: ``accumulate``, or fewer at the end of an epoch."""
    return max(1, -(-batch.size // workload.batch_size)) if workload.accumulate > 1 else 1


def accumulated(replica: Replica, batch: Batch, backward: Callable[[Batch], Tensor | None]) -> Tensor | None:
    """Run ``backward``, which adds the gradient of a batch's mean loss to ``p.grad``, on each batch of an update;
    returns the mean loss of the update, None where another rank has it."""
    count = batches_in(batch, replica.workload)
    # Without terms a mean is a NaN, which no weight undoes; an update that has none gives what one device gives.
    parts = [part for part in batch.parts(count) if part.count] if count > 1 else []
    if len(parts) < 2:
        return backward(batch)
    share, total = replica.share, batch.count
    mean: Tensor | None = None
    try:
        for part in parts:
            if part is not parts[0]:
                replica.again(batch.step)
            weight = part.count / total
            replica.share = share * weight
            loss = backward(part.by_itself())
            if loss is not None:
                mean = loss * weight if mean is None else mean + loss * weight
    finally:
        replica.share = share
    return mean


def refuse_accumulation(model: nn.Module, workload: Workload, source: BatchSource) -> None:
    """Raise ValueError, by name, for what ties the examples of an update together, where they are computed batch by
    batch."""
    if workload.accumulate > 1:
        from apportion.parallel.batch_coupling.analysis import refuse_coupling

        refuse_coupling(model, workload, source.sample, strategy=f"accumulate={workload.accumulate}")
