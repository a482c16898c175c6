"""Records what the optimizer steps of a network do on this rank: the gradients before each, the weights after it.

The events are those of a checked script (``script_check/record.py``), so that the same comparisons read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from apportion.script_check.recording.names import plain
from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import LARGEST_WHOLE, values

LABEL = "model"


class StepRecording:
    """The optimizer steps that this process makes."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder, self._model = recorder, model
        self._sampled = sum(parameter.numel() for parameter in model.parameters()) > LARGEST_WHOLE
        self._optimizers = list[Optimizer]()
        self._made = dict[int, int]()
        self._depth = dict[int, int]()
        self._before = dict[str, Any]()

    def begin(self) -> None:
        """Record the weights, and every step from now on."""
        self._recorder.emit(
            "network",
            label=LABEL,
            weights={name: values(tensor) for name, tensor in self.tensors()},
            trainable=[name for name, parameter in self.parameters() if parameter.requires_grad],
            modules={f"{LABEL}.{plain(name)}": type(each).__name__ for name, each in self._model.named_modules()},
        )
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The names and parameters of the network."""
        for name, parameter in self._model.named_parameters():
            yield f"{LABEL}.{plain(name)}", parameter

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The names, parameters and buffers of the network."""
        yield from self.parameters()
        yield from self._buffers()

    def set_weights(self, weights: dict[str, Any]) -> None:
        """Set the parameters and buffers to values by name, as far as the names and shapes are the same."""
        with torch.no_grad():
            for name, tensor in self.tensors():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if name in weights and weights[name].shape == tuple(local.shape):
                    local.copy_(torch.as_tensor(weights[name]))

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self._model.named_buffers():
            yield f"{LABEL}.{plain(name)}", buffer

    def _stepped(self, optimizer: Optimizer, number: int) -> dict[str, Tensor]:
        """The parameters of the network, and those that this optimizer changes beside them."""
        found = dict(self.parameters())
        own = {id(parameter) for parameter in found.values()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        others = {f"optimizer{number}.{n}": p for n, p in enumerate(held) if id(p) not in own}
        return {**found, **others}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] = depth = self._depth.get(id(optimizer), 0) + 1
        if depth > 1:  # torch calls the hooks again where a subclass calls super().step()
            return
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        number = next(n for n, each in enumerate(self._optimizers) if each is optimizer)
        self._before = {
            "optimizer": number,
            "type": type(optimizer).__name__,
            "rates": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "gradients": {
                name: None if parameter.grad is None else values(parameter.grad, self._sampled)
                for name, parameter in self._stepped(optimizer, number).items()
            },
            "site": self._recorder.site(),
        }

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] -= 1
        if self._depth[id(optimizer)]:
            return
        number = self._before["optimizer"]
        self._made[number] = self._made.get(number, 0) + 1
        self._recorder.step += 1
        self._recorder.emit(
            "step",
            **self._before,
            number=self._made[number],
            weights={n: values(p, self._sampled) for n, p in self._stepped(optimizer, number).items()},
            buffers={n: values(b, self._sampled) for n, b in self._buffers()},
        )
