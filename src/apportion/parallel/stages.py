"""A network in stages, one a rank: each computes some consecutive calls, and hands on what later ones use.

::

    stage 0        stage 1            stage 2
    conv ---- h -> conv - g ------- -> add(g, h) -> loss
         \\--- h ---------- h ------ /                          a skip connection travels through the stages between

    backward, from the last to the first: the gradients of what was handed on, h's from both of its users

Arguments of the network and weights do not travel: each stage that uses an argument loads it itself, and a weight that
several stages use is held by all of them, which sum its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from apportion import tree
from apportion.batch import Batch
from apportion.comm.group import Alone
from apportion.comm.message import broadcast_message
from apportion.graph import Unfollowed, follow, names
from apportion.parallel.cuts import Places, balanced, calls, changing_buffers, measured, named
from apportion.parallel.loss_share import LossShare
from apportion.parallel.passing import Inlet, Outlet
from apportion.parallel.pieces import Piece
from apportion.parallel.replica import Replica
from apportion.parallel.split import Part
from apportion.parallel.stage_graph import StageGraph, adopt_the_rest, prove, terms
from apportion.parallel.turns import turns
from apportion.workload import Workload, examples
from apportion.world import World


def staged(
    workload: Workload,
    world: World,
    *,
    microbatches: int = 1,
    schedule: str = "gpipe",
    cuts: Sequence[str] | None = None,
    recompute: bool = False,
) -> Callable[[nn.Module, Any], Part]:
    """What makes this rank's part of a model: a stage of it, or where there is one rank all of it."""
    if cuts is not None and len(cuts) != world.size - 1:
        raise ValueError(
            f"cuts={tuple(cuts)} make {len(cuts) + 1} stages, and there are {world.size} workers: use "
            f"workers={len(cuts) + 1}, or name {world.size - 1} layers"
        )
    if world.size > 1 and workload.carry is not None:
        raise ValueError(
            "a recurrent state that is carried would go back from the last stage to the first: use wavefront_parallel, "
            "or data_parallel"
        )

    def make(model: nn.Module, inputs: Any) -> Part:
        if world.size == 1:
            return InParts(model, inputs, microbatches)
        return Stages(
            model, inputs, world, microbatches=microbatches, schedule=schedule, cuts=cuts, recompute=recompute
        )

    return make


@final
class InParts(Part):
    """The only stage: the whole model, of one micro-batch after the other."""

    alike = True

    def __init__(self, model: nn.Module, inputs: Any, microbatches: int) -> None:
        if microbatches > 1:
            _refuse_state(model, changing_buffers(model, tree.rows(inputs, slice(0, 2))), microbatches)
        self.model, self._microbatches = model, microbatches
        self.pieces: Mapping[str, Piece] = {}

    def backward(self, replica: Replica, batch: Batch) -> Tensor:
        share, losses = LossShare(replica, Alone()), []
        total = share.total(batch)
        for part in batch.parts(self._microbatches):
            loss, weight = share(part, own=True, total=total)
            replica.backward(loss, weight)
            losses.append(loss.detach() * weight)
        return sum(losses[1:], losses[0])

    def predict(self, replica: Replica, batch: Batch) -> Any:
        return replica.predict(batch)


@final
class Stages(Part):
    """This rank's stage of a network, and how micro-batches pass through it."""

    def __init__(  # noqa: PLR0913 (what a pipeline has)
        self,
        model: nn.Module,
        inputs: Any,
        world: World,
        *,
        microbatches: int,
        schedule: str,
        cuts: Sequence[str] | None,
        recompute: bool,
    ) -> None:
        self._rank, self._size, self._group = world.rank, world.size, world.group()
        self._microbatches, self._schedule, self._recompute = microbatches, schedule, recompute
        self.most_in_flight = 0
        """Micro-batches whose activations this stage has kept at once."""
        stateful = changing_buffers(model, tree.rows(inputs, slice(0, 2)))
        if microbatches > 1 or recompute:
            _refuse_state(model, stateful, microbatches)
        graph = _followed(model)
        at = self._cut(model, graph, inputs, stateful, cuts)
        bounds = [0, *at, len(calls(graph))]
        self.cuts = tuple(names(graph)[calls(graph)[i]] for i in at)
        """The layers that the stages after the first begin with."""
        if self._rank == 0:
            prove(model, graph, bounds, self._sample(inputs))
        self._arguments = graph
        self._training = StageGraph(model, graph, bounds, self._rank)
        self._evaluation = self._for_evaluation(model, graph, at)
        self.model = self._training.module
        self._trained = [module for module in self.model.modules() if module.training]
        self.pieces = terms(model, graph, bounds, self.model)
        if self._rank == 0:
            adopt_the_rest(self.model, model, graph)
        self._open()

    def _open(self) -> None:
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        first, last = self._rank == 0, self._rank == self._size - 1
        self.before = None if first else Inlet(self._group, self._rank - 1, device)
        self.after = None if last else Outlet(self._group, self._rank + 1)
        self.gradients_in = None if last else Inlet(self._group, self._rank + 1, device)
        self.gradients_out = None if first else Outlet(self._group, self._rank - 1)

    def _cut(
        self, model: nn.Module, graph: fx.Graph, inputs: Any, stateful: Sequence[str], cuts: Sequence[str] | None
    ) -> list[int]:
        """Measured by rank 0 alone: all ranks cut at the same places."""
        if self._size == 1:
            return []
        told: Any = None
        if self._rank == 0:
            places = measured(model, graph, self._sample(inputs), stateful)
            told = [places.names, places.seconds, places.crossing]
        found = Places(*map(tuple, broadcast_message(told, self._group)))
        own = tuple(names(graph)[node] for node in calls(graph))
        assert found.names == own, "every rank follows the same network"
        return named(found, cuts) if cuts is not None else balanced(found, self._size)

    def _sample(self, inputs: Any) -> Any:
        """A micro-batch of them."""
        return tree.rows(inputs, slice(0, -(-tree.length(inputs) // self._microbatches)))

    def _for_evaluation(self, model: nn.Module, graph: fx.Graph, at: Sequence[int]) -> StageGraph:
        """The same stage of the network as it is evaluated: its own graph, where the forward asks ``self.training``."""
        with _evaluating([module for module in model.modules() if module.training]):
            evaluated = _followed(model)
        if str(evaluated) == str(graph):
            return self._training
        begins, found = [calls(graph)[i].name for i in at], [node.name for node in calls(evaluated)]
        if any(name not in found for name in begins):
            raise ValueError(
                f"{type(model).__name__} calls other layers in evaluation than in training, and a stage begins with "
                "one of them: give cuts= at layers that both have, or use data_parallel"
            )
        return StageGraph(model, evaluated, [0, *map(found.index, begins), len(found)], self._rank)

    # Training

    def backward(self, replica: Replica, batch: Batch) -> Tensor | None:
        parts = batch.parts(self._microbatches)
        passes = _Passes(self, replica, batch, parts)
        for kind, number in turns(self._schedule, self._rank, self._size, len(parts)):
            if kind == "forward":
                passes.forward(number)
            else:
                passes.backward(number)
        self.most_in_flight = max(self.most_in_flight, passes.most)
        for outlet in (self.after, self.gradients_out):
            if outlet is not None:
                outlet.finish()
        return passes.loss

    def run(self, received: Sequence[Any], batch: Batch) -> Any:
        """The stage's forward pass: what it hands on, or the outputs of the network."""
        given = self._training.takes(self._arguments, batch)
        if not self._recompute:
            return self.model(*given, *received)

        def again(*values: Any) -> Any:  # on copies: what is written to in place is not what it begins with again
            return self.model(*tree.map_tensors(Tensor.clone, values))

        return checkpoint(again, *given, *received, use_reentrant=False)

    # Evaluation

    @torch.no_grad()
    def predict(self, replica: Replica, batch: Batch) -> Any | None:
        received = self.before.receive() if self.before is not None else []
        with _evaluating(self._trained), replica.autocast():
            found = self._evaluation.module(*self._evaluation.takes(self._arguments, batch), *received)
        if self.after is None:
            return found
        self.after.send(found)
        self.after.finish()
        return None


class _Passes:
    """The passes of one batch's micro-batches through a stage."""

    def __init__(self, stages: Stages, replica: Replica, batch: Batch, parts: Sequence[Batch]) -> None:
        self._stages, self._replica, self._batch, self._parts = stages, replica, batch, parts
        self._kept: dict[int, tuple[list[_Arrival], Any]] = {}
        self.loss: Tensor | None = None
        self.most = 0

    def forward(self, number: int) -> None:
        stages, part = self._stages, self._parts[number]
        received = stages.before.receive() if stages.before is not None else []
        arrivals: list[_Arrival] = []
        values = [tree.map_tensors(lambda t: _arrived(t, arrivals), value) for value in received]
        with self._replica.autocast():
            found = stages.run(values, part)
            kept: Any = self._weighted_loss(found, part) if stages.after is None else None
        if stages.after is not None:
            stages.after.send(found)
            kept = [t for t in tree.tensors(found) if t.requires_grad]
        self._kept[number] = arrivals, kept
        self.most = max(self.most, len(self._kept))

    def backward(self, number: int) -> None:
        stages = self._stages
        arrivals, kept = self._kept.pop(number)
        if stages.gradients_in is None:
            self._replica.backward(*kept)
        else:
            pairs = [(t, g) for t, g in zip(kept, stages.gradients_in.receive(), strict=True) if g is not None]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        del kept
        if stages.gradients_out is not None:
            stages.gradients_out.send([arrival.gradient for arrival in arrivals])

    def _weighted_loss(self, outputs: Any, part: Batch) -> tuple[Tensor, float]:
        """The mean loss of a micro-batch, and its share of the terms of the batch."""
        count = self._replica.workload.count
        if count is None:
            loss, weight = self._replica.loss(outputs, part.targets), 1.0
        elif terms := part.count:
            total = float(part.size) if count is examples else self._batch.count
            loss, weight = self._replica.loss(outputs, part.targets), terms / total
        else:  # a mean of nothing is a NaN: zero, through the same layers
            zeros = [(t * 0.0).sum() for t in tree.tensors(outputs) if t.is_floating_point()]
            loss, weight = torch.stack(zeros).sum(), 0.0
        share = loss.detach() * weight
        self.loss = share if self.loss is None else self.loss + share
        return loss, weight


class _Arrival:
    """A tensor from the stage before, and its gradient once there is one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.gradient: Tensor | None = None


class _Arrive(Function):
    """What has arrived, as the result of a function: unlike a leaf it may be written to in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrival: _Arrival) -> Tensor:
        ctx.arrival, tensor, arrival.tensor = arrival, arrival.tensor, None
        assert tensor is not None
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.arrival.gradient = gradient
        return None, None


def _arrived(tensor: Tensor, arrivals: list[_Arrival]) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    arrivals.append(_Arrival(tensor.requires_grad_(False)))
    anchor = torch.empty((), device=tensor.device, requires_grad=True)
    arrived: Tensor = _Arrive.apply(anchor, arrivals[-1])
    return arrived


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


def _followed(model: nn.Module) -> fx.Graph:
    try:
        return follow(model)
    except Unfollowed as error:
        raise ValueError(
            f"{error}; so it cannot be cut into stages: put what decides or changes into a module of its own, "
            "or use data_parallel"
        ) from error


def _refuse_state(model: nn.Module, stateful: Sequence[str], microbatches: int) -> None:
    """What a forward pass over parts of the batch, or a second one, would make another network of."""
    what = f"microbatches={microbatches}" if microbatches > 1 else "recompute=True"
    why = "give {} the statistics of a part of the batch" if microbatches > 1 else "have {} see every batch twice"
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise ValueError(
                f"{what} would {why.format(name)}: use {what.split('=')[0]}={1 if microbatches > 1 else False}, "
                "layer_placement, data_parallel, or a normalisation that looks at one example (GroupNorm, LayerNorm)"
            )
    if stateful:
        raise ValueError(
            f"{what} would change the buffer {stateful[0]} more than once a step: use "
            f"{what.split('=')[0]}={1 if microbatches > 1 else False}, layer_placement, or data_parallel"
        )
