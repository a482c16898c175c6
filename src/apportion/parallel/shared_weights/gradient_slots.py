"""The gradient of each rank in shared memory: what a backward pass writes where all ranks see it.

A layer that is factored leaves the rows of its inputs and of its output gradients, from which the rank that owns a
part of its weight makes that part's gradient; every other parameter leaves its gradient as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from apportion.core.data.batch import Batch
from apportion.core.fault_points import reached
from apportion.parallel.ops.factored_linear import redirect
from apportion.parallel.replica.gradient_buckets import dense
from apportion.parallel.replica.replica import Replica
from apportion.parallel.shared_weights.layout import shaped
from apportion.parallel.shared_weights.weights_memory import WeightsMemory

_START, _ROWS, DENSE = 0, 1, 2
"""Words of a rank for each factored layer: the first row that it has written, how many, and whether a whole gradient is
there besides (1)."""


@final
class GradientSlots:
    """The slots of all ranks; this process writes those of its own.

    ``layers``: the number of the weight, and the layer, of each plain Linear layer.
    """

    def __init__(self, memory: WeightsMemory, replica: Replica, layers: Sequence[tuple[int, nn.Linear]]) -> None:
        layout, tensor = memory.layout, memory.tensor
        self._memory, self._replica = memory, replica
        (self._optimizer,) = replica.optimizers.values()
        self.gradients = [
            [tensor(f"gradient/{worker}/{r}") for r in range(len(layout.regions))] for worker in range(layout.workers)
        ]
        self.inputs = [tensor(f"inputs/{k}").view(-1, layer.inputs) for k, layer in enumerate(layout.layers)]
        self.outputs = [tensor(f"outputs/{k}").view(-1, layer.outputs) for k, layer in enumerate(layout.layers)]
        self.rows = tensor("rows").view(layout.workers, len(layout.layers), 3).numpy()
        self._layer_of = {layer.parameter: k for k, layer in enumerate(layout.layers)}
        self._own: list[Tensor] = []
        self._rank = 0
        self._written = [False] * len(memory.parameters)
        self._written_count = 0
        self._batch: Batch | None = None
        self._cursor = [0] * len(layout.layers)
        for i, p in enumerate(memory.parameters):
            p.register_post_accumulate_grad_hook(lambda p, i=i: self._collect(i, p))
        for i, module in layers:
            redirect(module, lambda x, dy, i=i: self._collect_product(i, x, dy))

    def attach(self, rank: int) -> None:
        """Write the gradients of this rank from now on."""
        self._rank, place = rank, self._memory.place
        self._own = [
            shaped(self.gradients[rank][place[i][0]], place[i][1], p) for i, p in enumerate(self._memory.parameters)
        ]

    @property
    def used(self) -> list[bool] | None:
        """Flags that say which parameters this step has a gradient of; None: all."""
        return None if self._written_count == len(self._written) else self._written

    def begin_batch(self, batch: Batch) -> None:
        """Prepare for a backward pass of these rows."""
        self._batch = batch
        self._written = [False] * len(self._written)
        self._written_count = 0
        self._cursor = [0] * len(self._cursor)
        if len(self._cursor):
            own = self.rows[self._rank]
            own[:, _START] = batch.rows.start
            own[:, _ROWS:] = 0

    def _mark_written(self, i: int) -> bool:
        """Return whether this is the first contribution to this parameter's gradient in this step."""
        if self._written[i]:
            return False
        self._written[i] = True
        self._written_count += 1
        return True

    def _collect(self, i: int, p: nn.Parameter) -> None:
        if p.grad is None:  # it went another way
            return
        if p.grad.layout is not torch.strided:
            p.grad = dense(p, self._optimizer, self._replica.names[p])
        layer = self._layer_of.get(i)
        if layer is None:
            fresh = self._mark_written(i)
        else:
            fresh = not self.rows[self._rank, layer, DENSE]
            self.rows[self._rank, layer, DENSE] = 1
            self._mark_written(i)
        if fresh:
            self._own[i].copy_(p.grad)
        else:
            self._own[i].add_(p.grad)
        # The gradient is in shared memory now. Were it left here, autograd would add the next one to it, and it would
        # count twice.
        p.grad = None

    def _collect_product(self, i: int, x: Tensor, dy: Tensor) -> None:
        layer = self._layer_of.get(i)
        if layer is None:
            self._add_product(i, x, dy, fresh=self._mark_written(i))
        else:
            assert self._batch is not None
            self._mark_written(i)
            done, own = self._cursor[layer], self.rows[self._rank, layer]
            if done + len(x) <= len(self._batch):
                at = slice(self._batch.rows.start + done, self._batch.rows.start + done + len(x))
                self.inputs[layer][at].copy_(x)
                self.outputs[layer][at].copy_(dy)
                self._cursor[layer] = own[_ROWS] = done + len(x)
            elif len(self._batch):  # more rows than examples: a layer that is called for each place, or twice
                self._add_product(i, x, dy, fresh=not own[DENSE])
                own[DENSE] = 1
        reached("gradient")

    def _add_product(self, i: int, x: Tensor, dy: Tensor, *, fresh: bool) -> None:
        if fresh:
            torch.mm(dy.t(), x, out=self._own[i])
        else:
            self._own[i].addmm_(dy.t(), x)
