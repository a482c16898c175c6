"""A step of one device that is looked at closely: on any number of rows of its first batch, with the calls of its
network, and the time when forward ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor, fx

from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.sampler import DataShard
from apportion.core.workload import Workload
from apportion.parallel.replica.replica import Replica
from apportion.parallel.replica.step import OneDeviceStep
from apportion.parallel.tracing.tracer import Unfollowed, follow
from apportion.profiler.call_timer import Calls, TimedCall, clock


@dataclass
class Followed:
    """A network whose calls are known."""

    calls: Calls
    inputs: Any


@final
class TimedStep:
    """The workload's own step, on this rank's device."""

    def __init__(self, workload: Workload, world: World) -> None:
        self.workload, self.device = workload, world.device
        self.forward_ended = 0.0
        """The time when the loss was computed, by ``clock``."""
        loss = workload.loss
        if loss is not None:

            def timed(outputs: Any, targets: Any) -> Tensor:
                found = loss(outputs, targets)
                self.forward_ended = clock(self.device)
                return found

            workload = replace(workload, loss=timed)
        self.step = OneDeviceStep(workload, world.device)
        self.replica: Replica = self.step.replica
        self.batch = self.step.source.at(0, DataShard())
        self._known: dict[int, Followed | None] = {}

    def rows(self, rows: int) -> Batch:
        """Return about ``rows`` rows of the first batch."""
        return self.batch.parts(-(-len(self.batch) // rows))[0]

    def inputs(self, batch: Batch) -> Any:
        """Return all that the model is called with."""
        if self.workload.carry is None:
            return batch.inputs
        state = tree.cast(self.workload.carry(len(batch)), self.device, self.workload.dtype)
        given, named = tree.arguments(batch.inputs, state)
        return named or given

    def loss(self, batch: Batch) -> Callable[[Any], Tensor]:
        """Return the function that computes the loss of the model's outputs for the batch."""
        carries, targets, loss = self.workload.carry is not None, batch.targets, self.workload.loss
        assert loss is not None
        return lambda outputs: loss(outputs[0] if carries else outputs, targets)

    def forget(self) -> None:
        """Drop the gradients, and commit the step."""
        for p in self.replica.trainable():
            p.grad = None
        self.replica.commit()

    # Its calls

    def followed(self, rows: int) -> Followed | None:
        """Return the network with its calls on ``rows`` rows; None where the network cannot be followed."""
        if rows not in self._known:
            self._known[rows] = self._follow(rows)
        return self._known[rows]

    def called(self, followed: Followed, batch: Batch) -> dict[str, tuple[float, float]]:
        """Time the calls: (forward, backward) seconds of each; of the loss under ``""``."""
        with self.replica.autocast():
            return followed.calls.forward_and_backward(followed.inputs, self.loss(batch))

    def ran(self, followed: Followed, batch: Batch, name: str) -> TimedCall:
        """Return the call of a layer, as it was made last."""
        if not followed.calls.ran:
            self.called(followed, batch)
        return next(ran for ran in followed.calls.ran if ran.name == name)

    def _follow(self, rows: int) -> Followed | None:
        if self.workload.loss is None:
            return None
        model, inputs = self.replica.model, self.inputs(self.rows(rows))
        try:
            graph: fx.Graph = follow(model, inputs)
        except Unfollowed:
            return None
        return Followed(Calls(model, graph, self.device), inputs)
