"""The networks and optimizers that cannot be trained in shards, refused by name.

``fsdp.py`` spreads what is left. torch's FSDP takes over two seconds to import, so nothing here does: a driver that
chooses a strategy, and the reference of a proof, need the refusals and spread nothing.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer, Rprop

from apportion.core import torch_private
from apportion.core.torch_private import BatchNormBase
from apportion.parallel.optim.elementwise import ELEMENTWISE
from apportion.parallel.optim.fused import needs_whole_weights
from apportion.parallel.optim.step_hooks import refuse_step_hooks
from apportion.parallel.replica.initial_model import refuse_renormalising, refuse_tied_by_memory

ON_SHARDS = tuple(kind for kind in ELEMENTWISE if kind is not Rprop)
"""The element-wise optimizers that torch computes on DTensors; Rprop writes into them by index, which it cannot."""
NOT_ELEMENTWISE = (
    "not known to update each weight by itself, and no rank has a whole parameter: use one of "
    + ", ".join(kind.__name__ for kind in ON_SHARDS)
)
WHOLE_KERNEL = (
    "fused=True, and torch's fused SGD and Adagrad update whole weights, of which no rank has one: use fused=False, "
    "Adam or AdamW, or data_parallel"
)


def refuse_optimizer(optimizer: Optimizer, *, alone: bool) -> None:
    """Raise ValueError where an optimizer cannot update shards. ``alone``: the one rank has all of every weight."""
    kind = type(optimizer)
    if kind not in ON_SHARDS:
        raise ValueError(f"{kind.__name__} is {NOT_ELEMENTWISE}, or data_parallel")
    if not alone:
        refuse_step_hooks(optimizer, "on each rank it would see a shard of every weight")
    if needs_whole_weights(optimizer) and not alone:
        raise ValueError(f"{kind.__name__} has {WHOLE_KERNEL}")


def refuse_layers(model: nn.Module, microbatches: int) -> None:
    """Raise ValueError, by the layer's name, for layers that cannot be spread over ranks, or not cut into parts."""
    refuse_tied_by_memory(model, "each rank holds a part of every weight")
    refuse_renormalising(model, "each rank would rescale what its own examples look up")
    for name, p in model.named_parameters():
        if p.dim() == 0:
            raise ValueError(f"{name} is a single number, which has no rows to spread: give it the shape (1,)")
        if torch_private.gradient_hooked(p):
            raise ValueError(
                f"{name} has a hook, which its shards would lose: put it on the layer, or use data_parallel"
            )
    dtypes = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad}
    if len(dtypes) > 1:
        kinds = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        raise ValueError(f"weights of one type travel together, and {kinds}: use one type, or data_parallel")
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise ValueError(
                f"{name} has sparse gradients, which are not summed in shards: use sparse=False, or data_parallel"
            )
        if isinstance(layer, BatchNormBase) and microbatches > 1:
            raise ValueError(
                f"microbatches={microbatches} would give {name} the statistics of a part of the batch: "
                "use microbatches=1, or a normalisation that looks at one example (GroupNorm, LayerNorm)"
            )
