"""The recurrent state that follows each row of the batch through the data (truncated back-propagation through time)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apportion.comm.group import Group, collective
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.torch_private import pytree


class Carry:
    """This rank's rows of the carried state.

    ``make(n)`` gives the state for n rows, any pytree; in which dimension of each tensor the rows are is found by
    comparing ``make(1)`` with ``make(2)``: for an LSTM's (layers, n, hidden) it is 1.
    """

    def __init__(self, make: Callable[[int], Any], device: torch.device, dtype: torch.dtype) -> None:
        self._make, self._device, self._dtype = make, device, dtype
        self._dims = [_row_dim(a, b) for a, b in zip(tree.tensors(make(1)), tree.tensors(make(2)), strict=True)]
        self._state: Any = None
        self._next: list[Any] = []

    def fresh(self, n: int) -> Any:
        """The state of n rows that have seen nothing."""
        return tree.cast(self._make(n), self._device, self._dtype)

    def initial_state(self, batch: Batch) -> Any:
        """The state that these rows start with."""
        if self._state is None or batch.start or not len(batch):
            return self.fresh(max(1, len(batch)))
        if batch.rows.start == batch.rows.stop:  # a borrowed row: its state is elsewhere, and its gradient is 0
            return self.fresh(len(batch))
        return self._slice(self._state, batch.rows.start - batch.first_lane, len(batch))

    def put(self, state: Any) -> None:
        """Keep the state that the next rows (in order) end with; it counts from ``commit`` on."""
        self._next.append(tree.map_tensors(Tensor.detach, state))

    def commit(self) -> None:
        """End the step: the next one starts from the states that were put."""
        if len(self._next) == 1:
            self._state = self._next[0]
        elif self._next:
            leaves = [pytree.tree_leaves(s) for s in self._next]
            joined = [torch.cat(parts, d) for parts, d in zip(zip(*leaves, strict=True), self._dims, strict=True)]
            self._state = pytree.tree_unflatten(joined, pytree.tree_structure(self._next[0]))
        self._next = []

    @property
    def row_count(self) -> int:
        """The number of rows that the state is of."""
        return 0 if self._state is None else int(pytree.tree_leaves(self._state)[0].shape[self._dims[0]])

    def _slice(self, state: Any, start: int, n: int) -> Any:
        leaves, structure = pytree.tree_flatten(state)
        return pytree.tree_unflatten(
            [t.narrow(d, start, n).contiguous() for t, d in zip(leaves, self._dims, strict=True)], structure
        )

    @collective
    def gather(self, group: Group, rows: int | None) -> dict[str, Tensor]:
        """Gather all ranks' rows of each leaf, whole. ``rows``: how many of the rows here are this rank's (a borrowed
        one is not; None: all). Empty before the first step. Called by all ranks."""
        if self._state is None:
            return {}
        gathered = {}
        for i, (leaf, dim) in enumerate(zip(pytree.tree_leaves(self._state), self._dims, strict=True)):
            parts = group.all_gather_rows(leaf.movedim(dim, 0)[:rows].contiguous())
            gathered[str(i)] = torch.cat(parts).movedim(0, dim).contiguous()
        return gathered

    def load(self, gathered: dict[str, Tensor], rows: slice) -> None:
        """Take this rank's rows out of the whole."""
        self._next = []
        if not gathered:
            self._state = None
            return
        n = rows.stop - rows.start
        structure = pytree.tree_structure(self.fresh(max(1, n)))
        leaves = []
        for i, dim in enumerate(self._dims):
            whole = gathered[str(i)].to(self._device)
            # After a short batch fewer rows than lanes are left: the next step starts an epoch, and uses none of them.
            start = min(rows.start, whole.shape[dim])
            leaves.append(whole.narrow(dim, start, min(n, whole.shape[dim] - start)).clone())
        self._state = pytree.tree_unflatten(leaves, structure)


def _row_dim(one: Tensor, two: Tensor) -> int:
    differing = [d for d, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if (a, b) == (1, 2)]
    if len(differing) != 1:
        raise ValueError(
            f"carry(1) gives a tensor of shape {tuple(one.shape)} and carry(2) one of {tuple(two.shape)}: "
            "exactly one dimension must be the number of rows"
        )
    return differing[0]
