"""A network as one stage, which computes one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apportion.comm.group import Alone
from apportion.core import tree
from apportion.core.data.batch import Batch, rows_of
from apportion.core.rng import RngState, plain_rng_from
from apportion.parallel.ops.factored_linear import Products, plain_layers
from apportion.parallel.partition.part import Part
from apportion.parallel.partition.tensor_shards import TensorShard
from apportion.parallel.pipeline.cut_points import changing_buffers
from apportion.parallel.pipeline.staging import Staging
from apportion.parallel.pipeline.whole_batch import normalises, refuse_coupled
from apportion.parallel.replica.loss_weighting import LossShare
from apportion.parallel.replica.replica import Replica


@final
class InParts(Part):
    """The only stage: the whole model, which computes one micro-batch after the other."""

    alike = True

    def __init__(self, model: nn.Module, inputs: Any, staging: Staging) -> None:
        microbatches = staging.microbatches
        if microbatches > 1 or staging.recompute:
            stateful = changing_buffers(model, rows_of(inputs, slice(0, 2)))
            staging.refuse_state(model, stateful)
            if stateful or any(map(normalises, model.modules())):
                microbatches = 1
        if microbatches > 1:
            refuse_coupled(model, inputs, microbatches)
        self.model, self._microbatches = model, microbatches
        if staging.recompute:
            _recompute(model)
        self._products = Products(plain_layers(model) if microbatches > 1 else ())
        self.pieces: Mapping[str, TensorShard] = {}

    def backward(self, replica: Replica, batch: Batch) -> Tensor:
        share, losses = LossShare(replica, Alone()), []
        total = share.total(batch)
        parts = batch.parts(self._microbatches)
        for part in parts:
            if part is not parts[0]:
                replica.decide(batch.step)
            loss, weight = share.weighted_loss(part, own=True, total=total)
            replica.backward(loss, weight)
            self._products.add_up()
            losses.append(loss.detach() * weight)
        return sum(losses[1:], losses[0])

    def predict(self, replica: Replica, batch: Batch) -> Any:
        return replica.predict(batch)


def checkpointed(run: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """The result of ``run``, computed again in the backward pass: on copies, since a tensor that was written to in
    place is no longer what the pass began with, and with the draws of the first time."""

    def again(*values: Any, **named: Any) -> Any:
        values, named = tree.map_tensors(Tensor.clone, (values, named))
        return run(*values, **named)

    drawn = plain_rng_from(RngState.now())
    return checkpoint(again, *values, use_reentrant=False, context_fn=lambda: (nullcontext(), drawn), **named)


def _recompute(model: nn.Module) -> None:
    """Make the forward passes of a model in training be computed again in the backward pass, from now on."""
    run = model.forward

    def forward(*values: Any, **named: Any) -> Any:
        return checkpointed(run, *values, **named) if torch.is_grad_enabled() else run(*values, **named)

    model.forward = forward
