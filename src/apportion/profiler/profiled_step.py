"""A step of one device that is looked at closely: on any number of rows of its first batch, with the calls of its
network, and the time when forward ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.sampler import DataShard
from apportion.core.workload import Workload
from apportion.parallel.replica.replica import Replica
from apportion.parallel.replica.step import OneDeviceStep
from apportion.parallel.tracing.nodes import called
from apportion.parallel.tracing.tracer import Unfollowed, arguments, follow, in_place, names


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


# The calls of a network, each timed by itself in the course of a whole step: forward in order, then backward in the
# reverse order, so that a call finds in the caches what it would find there in training.


EMPTY_RUNS = 50
"""The number of runs of a backward pass that does nothing, which measure what calling autograd once for each call
costs."""


@dataclass
class TimedCall:
    """A call as it was made."""

    name: str
    """The name of the layer; empty: the loss."""
    node: fx.Node
    call: Callable[..., Any]
    args: Any
    kwargs: Any
    copies: bool
    """Does the call write into what it is given?"""
    taken: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """The tensors that the call took, each as the call that made it knows it, and as it was used here."""
    made: list[Tensor] = field(default_factory=list)
    """The outputs of the call that have a gradient."""
    forward: float = 0.0
    backward: float = 0.0


def clock(device: torch.device) -> float:
    """Return the seconds of a clock, read when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fresh(value: Any, taken: list[tuple[Tensor, Tensor]], *, copies: bool) -> Any:
    """Return the value with its tensors cut off from what made them; those that need a gradient get one of their own. A
    tensor that is given twice stays one: attention looks whether its queries are its keys."""
    known: dict[int, Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            leaf = tensor.detach().requires_grad_(tensor.requires_grad)
            taken.append((tensor, leaf))
            known[id(tensor)] = leaf.clone() if copies else leaf
        return known[id(tensor)]

    return tree.map_tensors(own, value)


def backward(made: list[Tensor], gradients: list[Tensor | None]) -> None:
    """Run the backward pass from those of the made tensors that have a gradient."""
    pairs = [(t, g) for t, g in zip(made, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


class Calls(fx.Interpreter):
    """Runs the graph of a network call by call."""

    def __init__(self, model: nn.Module, graph: fx.Graph, device: torch.device) -> None:
        super().__init__(model, graph=graph)
        self._model, self._graph, self._device = model, graph, device
        self._names = names(graph)
        self._empty = self._empty_backward()
        self.ran: list[TimedCall] = []
        self.watch: Callable[[TimedCall], Any] | None = None
        """The function that is called around each forward, with the call, and returns a context; None: forward is
        timed."""

    def _empty_backward(self) -> float:
        """Measure the seconds of a backward pass through nothing."""
        leaf = torch.zeros(1, device=self._device, requires_grad=True)
        found = []
        for _ in range(EMPTY_RUNS):
            y = leaf.view(1)
            gradient = torch.ones_like(y)
            began = clock(self._device)
            torch.autograd.backward([y], [gradient])
            found.append(clock(self._device) - began)
        return sorted(found)[len(found) // 2]

    def forward_and_backward(self, inputs: Any, loss: Callable[[Any], Tensor]) -> dict[str, tuple[float, float]]:
        """Time the calls: (forward, backward) seconds of each by its name, of the loss under ``""``."""
        for p in self._model.parameters():
            p.grad = None
        self.ran = []
        outputs = self.run(*arguments(self._graph, inputs))
        last = TimedCall("", self.ran[-1].node, loss, (outputs,), {}, copies=False)
        self._call(last)
        gradients: dict[int, Tensor] = {}
        for ran in (last, *reversed(self.ran)):
            given = [torch.ones_like(t) if ran is last else gradients.get(id(t)) for t in ran.made]
            began = clock(self._device)
            backward(ran.made, given)
            ran.backward = max(0.0, clock(self._device) - began - self._empty)
            for tensor, leaf in ran.taken:
                if leaf.grad is not None:
                    known = gradients.get(id(tensor))
                    gradients[id(tensor)] = leaf.grad if known is None else known + leaf.grad
        return {ran.name: (ran.forward, ran.backward) for ran in (*self.ran, last)}

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call_"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        ran = TimedCall(self._names[n], n, called(self._model, n), args, kwargs, copies=self._writes(n))
        self.ran.append(ran)
        return self._call(ran)

    def _call(self, ran: TimedCall) -> Any:
        args, kwargs = fresh((ran.args, ran.kwargs), ran.taken, copies=ran.copies)
        if self.watch is None:
            began = clock(self._device)
            result = ran.call(*args, **kwargs)
            ran.forward = clock(self._device) - began
        else:
            with self.watch(ran):
                result = ran.call(*args, **kwargs)
        ran.made = [t for t in tree.tensors(result) if t.requires_grad]
        return result

    def _writes(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(self._model.get_submodule(str(node.target)), "inplace", False))
        return in_place(node)


def kept_bytes(calls: Calls, inputs: Any, loss: Callable[[Any], Tensor]) -> dict[str, int]:
    """Return the bytes that each call keeps for its backward pass, beside the weights and the buffers: each block of
    memory is counted once, where it is kept first."""
    own = [*calls._model.parameters(), *calls._model.buffers(), *tree.tensors(inputs)]
    seen = {t.untyped_storage().data_ptr() for t in own}
    found: dict[str, int] = {}

    def watch(ran: TimedCall) -> Any:
        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[ran.name] = found.get(ran.name, 0) + storage.nbytes()
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    calls.watch = watch
    try:
        calls.forward_and_backward(inputs, loss)
    finally:
        calls.watch = None
    return found
