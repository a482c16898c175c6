"""The parameters of a model that updates change, by the optimizer that has them; and those that stay frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import nn
from torch.optim import Optimizer


@final
class TrainedParameters:
    """The parameters that asked for a gradient when the step was built, and that an optimizer has."""

    def __init__(
        self, model: nn.Module, optimizers: Mapping[str, Optimizer], names: Mapping[nn.Parameter, str]
    ) -> None:
        self._model, self._optimizers, self._names = model, optimizers, names
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._owned = {
            name: [p for p in self._trainable if any(p is q for g in optimizer.param_groups for q in g["params"])]
            for name, optimizer in optimizers.items()
        }
        owned = {id(p) for parameters in self._owned.values() for p in parameters}
        self.idle = [p for p in self._trainable if id(p) not in owned]
        """The parameters that get gradients, and that no optimizer was given."""
        self.frozen = [
            p
            for optimizer in optimizers.values()
            for group in optimizer.param_groups
            for p in group["params"]
            if not p.requires_grad
        ]
        """The parameters that an optimizer has, and that did not ask for a gradient when the step was built."""

    def may_thaw(self) -> None:
        """Count parameters as trained that are frozen now and given to an optimizer: where one process has all
        gradients, they may get one at any step."""
        frozen = {id(p) for p in self.frozen}
        self._trainable = [p for p in self._model.parameters() if p.requires_grad or id(p) in frozen]
        for name, optimizer in self._optimizers.items():
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._owned[name] = [p for p in self._trainable if id(p) in own]
        self.frozen = []

    def of(self, optimizer: str | None = None) -> list[nn.Parameter]:
        """The parameters that updates change, of one optimizer or of all, in the model's order."""
        if optimizer is not None:
            return self._owned[optimizer]
        idle = {id(p) for p in self.idle}
        return [p for p in self._trainable if id(p) not in idle]

    def refuse_thawed(self) -> None:
        """Raise ValueError where a parameter that was frozen has got a gradient."""
        for p in self.frozen:
            if p.grad is not None:
                raise ValueError(
                    f"{self._names[p]} was frozen when the training began and has a gradient now, and which gradients "
                    "the ranks sum is settled at the beginning: let model= return it with requires_grad=True and "
                    "freeze it in the forward for as long as it should stand, or use single_device"
                )
