"""A rank's part of the loss of a global batch, weighted so that all ranks' parts add up to the mean of the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apportion.comm.differentiable import gather_rows
from apportion.comm.group import Group, collective
from apportion.core import tree
from apportion.core.data.batch import Batch, unjoined_leaf
from apportion.parallel.replica.replica import Replica


@collective
def gathered(outputs: Any, targets: Any, group: Group, *, own: bool) -> tuple[Any, Any]:
    """Outputs and targets of all ranks' rows, for a loss that couples them; gradients flow back. ``own``: the rows are
    this rank's, and not borrowed. ValueError, which names the leaf or states the shapes, where they cannot be joined.
    Called by all ranks."""
    if group.size == 1:
        return outputs, targets
    for name, value in (("outputs", outputs), ("targets", targets)):
        refuse_unjoined(value, name)
    outputs, targets = (
        tree.map_tensors(lambda t: gather_rows(t if own else t[:0], group), rows) for rows in (outputs, targets)
    )
    return outputs, targets


def refuse_unjoined(value: Any, name: str) -> None:
    """Raise ValueError, which names the leaf, where rows cannot be put behind those of another rank."""
    if unjoined := unjoined_leaf(value, name):
        raise ValueError(
            f"{unjoined}: with count=None the loss sees the rows of all ranks, which are joined tensor by tensor; "
            "return tensors with a row for each example, give count=lambda targets: ... where the loss is a mean "
            "over rows, or use one worker"
        )


class LossShare:
    """The mean loss of some of this rank's rows, and its weight in the global batch's."""

    def __init__(self, replica: Replica, group: Group) -> None:
        self._replica, self._workload, self._group = replica, replica.workload, group

    @collective
    def weighted_loss(self, batch: Batch, *, own: bool, total: float) -> tuple[Tensor, float]:
        """Run the forward on a batch that has rows; returns its loss and weight. ``own``: the rows are this rank's, and
        not borrowed; ``total``: the loss terms in all. Called by all ranks."""
        with self._replica.autocast():
            outputs = self._replica.outputs(batch)
            if self._workload.count is None:
                # The loss of the whole batch on every rank: its gradient goes back to the rows that were gathered here.
                whole = gathered(outputs, batch.targets, self._group, own=own)
                return self._replica.loss(*whole), 1.0
            if count := batch.count:
                return self._replica.loss(outputs, batch.targets), count / total
            # No terms: a mean of nothing is a NaN, and 0 times NaN is one too. Zero, through the same layers.
            zeros = [(t * 0.0).sum() for t in tree.tensors(outputs) if t.is_floating_point()]
            return torch.stack(zeros).sum(), 0.0

    def reported_factor(self) -> float:
        """The factor of a rank's weighted loss in the loss that is reported: where all ranks have one loss, each adds
        its part of it."""
        return 1.0 / self._group.size if self._workload.count is None else 1.0

    @collective
    def total(self, batch: Batch) -> float:
        """The number of loss terms in the global batch, of which ``batch`` has this rank's rows. Called by all
        ranks."""
        if self._workload.count is None:
            return 1.0
        if batch.counts_rows:
            return float(batch.size)
        if self._group.size == 1:
            return batch.count or 1.0
        count = torch.tensor([batch.count], dtype=torch.float64, device=self._replica.device)
        self._group.all_reduce(count).wait()
        return count.item() or 1.0
