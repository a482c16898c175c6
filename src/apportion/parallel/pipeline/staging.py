"""How a network is divided into stages and a batch into micro-batches, and the refusal of what that would change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from apportion.parallel.pipeline.whole_batch import normalises


@dataclass(frozen=True, kw_only=True)
class Staging:
    """The way in which a network is divided into stages, and a batch into micro-batches."""

    microbatches: int = 1
    schedule: str = "gpipe"
    cuts: Sequence[str] | None = None
    """The layers that the stages after the first begin with; None: where stages take equally long."""
    recompute: bool = False
    """True where activations are computed again in the backward pass."""
    whole_batch_norm: bool = False
    """True where a stage with batch normalisation computes the batch at once."""

    def refuse_state(self, model: nn.Module, stateful: Sequence[str]) -> None:
        """Refuse layers and buffers of which a forward pass over parts of the batch, or a second one, would make
        another network."""
        microbatches = self.microbatches
        if self.whole_batch_norm:
            if not self.recompute:
                return
            microbatches = 1
        what, why, instead = "recompute=True", "have {} see every batch twice", "recompute=False"
        if microbatches > 1:
            what, why = f"microbatches={microbatches}", "give {} the statistics of a part of the batch"
            instead = 'batch_norm="whole", microbatches=1'
        for name, layer in model.named_modules():
            if normalises(layer):
                raise ValueError(
                    f"{what} would {why.format(name)}: use {instead}, layer_placement, data_parallel, or a "
                    "normalisation that looks at one example (GroupNorm, LayerNorm)"
                )
        if stateful:
            raise ValueError(
                f"{what} would change the buffer {stateful[0]} more than once a step: use {instead}, layer_placement, "
                "or data_parallel"
            )
