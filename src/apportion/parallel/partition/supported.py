"""The workloads and optimizers that a network in parts can be trained with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch.optim import Optimizer

from apportion.core.workload import Workload
from apportion.parallel.optim.elementwise import BY_PARAMETER, ELEMENTWISE
from apportion.parallel.optim.step_hooks import refuse_step_hooks
from apportion.parallel.partition.tensor_shards import ShardLayout


def refuse_workload(workload: Workload) -> None:
    """Raise ValueError where a workload asks for what no part can give."""
    for given, why in (
        (workload.compile, "compile=True would compile a network that waits for other ranks: use compile=False, or"),
        (
            workload.precision == "float16",
            'precision="float16" scales the loss by what whole gradients overflow at: use "bfloat16", or',
        ),
    ):
        if given:
            raise ValueError(f"{why} data_parallel")


def refuse_optimizers(
    optimizers: Mapping[str, Optimizer], searching: Collection[str], layout: ShardLayout, ranks: int
) -> None:
    """Raise ValueError where an optimizer needs to see what other ranks hold. ``searching``: names of those that
    evaluate the loss themselves."""
    holders = layout.holders.values()
    cut = any(piece.index is not None for held in holders for _, piece in held)
    spread = cut or any(len(held) < ranks for held in holders)
    known = ELEMENTWISE if cut else BY_PARAMETER
    for name, optimizer in optimizers.items():
        kind = type(optimizer)
        if name in searching:
            raise ValueError(
                f"{kind.__name__} evaluates the loss several times an update: use map_reduce or single_device"
            )
        if spread and kind not in known:
            raise ValueError(
                f"{kind.__name__} is not known to update each {'weight' if cut else 'parameter'} by itself, and no "
                f"rank has all of them: use one of {', '.join(k.__name__ for k in known)}, or data_parallel"
            )
        if spread:
            refuse_step_hooks(
                optimizer, f"on each rank it would see a part of the {'weights' if cut else 'parameters'}"
            )
