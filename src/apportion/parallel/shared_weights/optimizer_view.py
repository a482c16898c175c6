"""The optimizer's state as a view of what lies in shared memory."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from apportion.parallel.replica.replica import Replica
from apportion.parallel.shared_weights.weights_memory import WeightsMemory


@final
class OptimizerView:
    """The state of a replica's optimizer, which is written into a version and shown as one is."""

    def __init__(self, replica: Replica, memory: WeightsMemory) -> None:
        self._replica, self._memory = replica, memory
        (self._optimizer,) = replica.optimizers.values()
        self._initial: dict[tuple[int, str], Tensor] = {
            (i, slot): self._optimizer.state[p][slot].clone()
            for i, p in enumerate(memory.parameters)
            for slot in memory.rule(i).slots
            if slot in self._optimizer.state.get(p, {})
        }
        """The slots that the optimizer has made before the first update."""

    def write(self, version: int) -> None:
        """Write the weights, slots and counts of this process into a version."""
        memory, weights = self._memory, self._memory.weights(version)
        for i, p in enumerate(memory.parameters):
            weights[i].copy_(p.detach())
            for slot in memory.rule(i).slots:
                kept = self._optimizer.state.get(p, {}).get(slot, self._initial.get((i, slot)))
                view = memory.view(slot, version, i)
                view.zero_() if kept is None else view.copy_(kept)
            memory.counts[version][i] = self._updates_of(p)

    def _updates_of(self, p: nn.Parameter) -> int:
        state = self._optimizer.state.get(p, {})
        if "step" in state:
            return int(state["step"])
        return self._replica.step if state else 0

    def show(self) -> None:
        """Set the optimizer's state to that of the version that the weights are of (another rank may have committed the
        next one): what is read of it afterwards is a view."""
        memory, live = self._memory, self._replica.step % self._memory.layout.versions
        for i, p in enumerate(memory.parameters):
            count, rule = int(memory.counts[live][i]), memory.rule(i)
            if not count and not any((i, slot) in self._initial for slot in rule.slots):
                self._optimizer.state.pop(p, None)
                continue
            state: dict[str, Tensor] = {slot: memory.view(slot, live, i) for slot in rule.slots}
            if rule.counted:
                state["step"] = torch.tensor(float(count))
            if state:
                self._optimizer.state[p] = state
