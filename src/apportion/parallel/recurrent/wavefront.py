"""A recurrent net whose layers are on different ranks: the wavefront, forward and backward.

::

    layer 3  rank 1            .  .  .  .  .  .  0  1  2  3        rank r has the layers r, r + n, r + 2n, ...
    layer 2  rank 0            .  .  .  .  0  1  2  3              each works through the chunks of the time in order,
    layer 1  rank 1      .  0  1  2  3                             one chunk behind the layer below; backward the same
    layer 0  rank 0      0  1  2  3                                from the upper right to the lower left
                         time -->

A rank is never idle between two of its layers: when it is through with one, the next one's first chunks are there. It
waits at the ends alone, for the length of a chunk. What it sends goes off as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from apportion.comm.group import Group, Work
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.modes import evaluating
from apportion.core.torch_private import buffers_of, parameters_of
from apportion.parallel.partition.part import Part
from apportion.parallel.partition.tensor_shards import TensorShard
from apportion.parallel.recurrent.cut import Cut
from apportion.parallel.recurrent.graph import Graphs
from apportion.parallel.recurrent.layer import LSTMLayer, RecurrentLayer, chunk_length, chunks, layer
from apportion.parallel.replica.carried_state import Carry
from apportion.parallel.replica.replica import Replica


@dataclass
class ChunkRun:
    """The record of a forward pass, as the backward pass needs it."""

    pieces: list[slice]
    x: Tensor | None
    """The input of the first layer, as the model has made it, time-major; None on the other ranks."""
    top: Tensor | None = None
    """The last layer's outputs; None on the other ranks."""
    ended: tuple[Tensor, ...] = ()
    """The states of all layers, where they were asked for."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """The results of dropout on ones, by layer."""


@final
class WavefrontPart(Part):
    """This rank's layers; on the rank of the first one what comes before them, on the rank of the last one what comes
    after."""

    def __init__(self, cut: Cut, group: Group, chunk: int | None, seen: Carry | None) -> None:
        """Build this rank's part. ``seen``: the state that follows the rows of an evaluation set, where one is
        carried."""
        net = cut.net
        self._cut, self._group, self._chunk, self._seen = cut, group, chunk, seen
        self._ranks, self._rank, self._layer_count = group.size, group.rank, net.num_layers
        self._numbers = range(group.rank, net.num_layers, group.size)
        self._layers: dict[int, RecurrentLayer] = {number: layer(net, number) for number in self._numbers}
        self._last = (net.num_layers - 1) % group.size
        self._net = net
        self._widths = [net.proj_size or net.hidden_size] + [net.hidden_size] * isinstance(net, nn.LSTM)
        self._memory: dict[tuple[str, int], Tensor] = {}
        self._sent: list[Work] = []
        self.model = cut.model
        self.pieces = self._keep_own()
        self._training = [m for m in self.model.modules() if m.training]

    def _keep_own(self) -> dict[str, TensorShard]:
        """Let go of the tensors that other ranks hold; returns the shards of those whose gradients come from two
        ranks."""
        cut, path = self._cut, self._cut.path
        before = cut.used_names(cut.training.before) | cut.used_names(cut.evaluation.before)
        after = cut.used_names(cut.training.after) | cut.used_names(cut.evaluation.after)
        tensors: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        tensors |= dict(self.model.named_buffers(remove_duplicate=False))
        prefix = f"{path}." if path else ""
        recurrent = {prefix + name: int(name.rpartition("_l")[2]) for name, _ in cut.net.named_parameters()}
        holders: dict[int, set[int]] = {}
        for name, tensor in tensors.items():
            ranks = holders.setdefault(id(tensor), set())
            if name in recurrent:
                ranks.add(recurrent[name] % self._ranks)
            ranks |= ({0} if name in before else set()) | ({self._last} if name in after else set())
        pieces = {}
        for name, tensor in tensors.items():
            ranks = holders[id(tensor)] or {0}  # no layer uses it
            if self._rank not in ranks:
                _forget(self.model, name)
            elif len(ranks) > 1 and isinstance(tensor, nn.Parameter):
                pieces[name] = TensorShard(tuple(tensor.shape), partial=True)
        self._net._flat_weights = []  # it would hold them on
        return pieces

    # Forward

    def _forward(
        self, graphs: Graphs, batch: Batch, state: Sequence[Any], *, training: bool
    ) -> tuple[Any, Any, ChunkRun]:
        """Run the forward pass; returns the outputs (on the last layer's rank), the state to carry on (where one is),
        and what backward needs."""
        cut, rows_first = self._cut, self._net.batch_first
        loads = self._rank in (0, self._last) or graphs.hx is not None or graphs.state_is_computed
        known = cut.arguments(batch.inputs if loads else None, *state)
        x = cut.evaluate(graphs.before, graphs.x, graphs, known, None) if self._rank == 0 else None
        if x is not None and x.dim() != 3:
            raise ValueError(f"the recurrent layers get {x.dim()} dimensions, and need time, rows and features: 3")
        x = x.transpose(0, 1) if x is not None and rows_first else x
        *shape, length = self._broadcast_shape(x)
        begun = cut.evaluate(graphs.begun, graphs.hx, graphs, known, None)
        ran = ChunkRun(chunks(shape[0], length), x)
        leaves = self._zeros(shape[1]) if graphs.hx is None else tuple(tree.tensors(begun))
        for number in self._numbers:
            y = self._run_layer(number, shape, leaves, ran, training=training)
        if self._seen is not None or graphs.uses_state:
            ran.ended = self._ended(shape[1], leaves)
        outputs = carried = None
        if self._rank == self._last:
            ran.top = y.detach().requires_grad_(training)
            if training and graphs.uses_state:
                ran.ended = tuple(t.requires_grad_() for t in ran.ended)
            top = ran.top.transpose(0, 1) if rows_first else ran.top
            outputs = cut.evaluate(graphs.after, graphs.outputs, graphs, known, (top, self._as_state(ran.ended)))
        if self._seen is not None:
            carried = cut.evaluate(graphs.ended, graphs.state, graphs, known, (None, self._as_state(ran.ended)))
        return outputs, carried, ran

    def _broadcast_shape(self, x: Tensor | None) -> list[int]:
        """Time, rows and the length of a chunk, which the first rank knows."""
        known = [0, 0, 0] if x is None else [*x.shape[:2], self._chunk or self._length(*x.shape[:2])]
        known_rows = torch.tensor(known, dtype=torch.int64)
        if self._rank > 0:
            self._group.receive(known_rows, self._rank - 1).wait()
        if self._rank + 1 < self._ranks:
            self._sent.append(self._group.send(known_rows, self._rank + 1))
        return [int(number) for number in known_rows]

    def _length(self, time: int, rows: int) -> int:
        short = all(isinstance(own, LSTMLayer) for own in self._layers.values())
        return chunk_length(time, rows, self._ranks, self._layer_count // self._ranks, short=short)

    def _zeros(self, rows: int) -> tuple[Tensor, ...]:
        weight = self._layers[self._rank].weights[0]
        return tuple(weight.new_zeros(self._layer_count, rows, width) for width in self._widths)

    def _as_state(self, leaves: tuple[Tensor, ...]) -> Any:
        """The state in the form in which the recurrent module gives it."""
        return leaves if isinstance(self._net, nn.LSTM) or not leaves else leaves[0]

    def _cached(self, what: str, number: int, shape: tuple[int, ...]) -> Tensor:
        """The memory of a layer, the same from step to step: fresh pages cost time."""
        weight, kept = self._layers[number].weights[0], self._memory.get((what, number))
        if kept is None or kept.shape != shape:
            kept = self._memory[what, number] = weight.new_empty(shape)
        return kept

    def _run_layer(
        self, number: int, shape: list[int], begun: tuple[Tensor, ...], ran: ChunkRun, *, training: bool
    ) -> Tensor:
        """Run a layer; returns its outputs, which are sent on chunk by chunk."""
        own, is_last = self._layers[number], number == self._layer_count - 1
        inputs = self._cached("x", number, (*shape, own.inputs))
        # All chunks are asked for at once: each arrives while those before it are computed.
        works = [self._group.receive(inputs[p], (number - 1) % self._ranks) for p in ran.pieces if number > 0]
        if is_last and not training:  # the caller may keep the outputs
            y = inputs.new_empty((*shape, own.outputs))
        else:
            y = self._cached("y", number, (*shape, own.outputs))
        own.begin_pass(inputs, y, tuple(t[number] for t in begun), training=training)
        for at, piece in enumerate(ran.pieces):
            if number > 0:
                works[at].wait()
            else:
                assert ran.x is not None
                inputs[piece].copy_(ran.x.detach()[piece])
            own.forward(piece)
            if not is_last:
                self._send(self._dropped(y, number, piece, ran.masks) if training else y[piece], number + 1)
        return y

    def _dropped(self, y: Tensor, number: int, piece: slice, masks: dict[int, Tensor]) -> Tensor:
        """The values of a chunk that the next layer gets: dropout is between the layers."""
        if not self._net.dropout:
            return y[piece]
        if number not in masks:
            # For all chunks at once, so that the draws do not depend on how the time is cut.
            masks[number] = nn.functional.dropout(torch.ones_like(y), self._net.dropout, training=True)
        return y[piece] * masks[number][piece]

    def _send(self, tensor: Tensor, number: int) -> None:
        """Send a tensor to the rank of a layer."""
        self._sent.append(self._group.send(tensor, number % self._ranks))
        self._group.all_waits.move_on()

    def _ended(self, rows: int, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The states of all layers, on every rank. It waits for the slowest rank, as the backward pass does anyway."""
        most = -(-self._layer_count // self._ranks)
        whole = []
        for i, leaf in enumerate(like):
            own = leaf.new_zeros((most, rows, leaf.shape[2]))
            for place, number in enumerate(self._numbers):
                own[place] = self._layers[number].state[i]
            gathered = self._group.all_gather(own)  # (ranks, most, rows, width): layer l is [l % ranks, l // ranks]
            whole.append(gathered.transpose(0, 1).flatten(0, 1)[: self._layer_count].contiguous())
        return tuple(whole)

    # Backward

    def backward(self, replica: Replica, batch: Batch) -> Tensor | None:
        state = () if replica.carry is None else (replica.carry.initial_state(batch),)
        graphs = self._cut.training
        outputs, carried, ran = self._forward(graphs, batch, state, training=True)
        if replica.carry is not None:
            replica.carry.put(carried)
        loss = None
        if self._rank == self._last:
            loss = replica.loss(outputs, batch.targets)
            replica.backward(loss, 1.0)
            loss = loss.detach()
        else:  # this rank waits for the loss
            for piece in reversed(ran.pieces):
                self._layers[self._numbers[-1]].ahead(piece)
        self._backward(graphs, ran)
        self._wait_for_sent()
        return loss

    def _wait_for_sent(self) -> None:
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def _backward(self, graphs: Graphs, ran: ChunkRun) -> None:
        dstates = self._gradients_of(ran) if graphs.uses_state else ()
        for number in reversed(self._numbers):
            dx = self._back_layer(number, ran, tuple(t[number] for t in dstates))
        if ran.x is not None and ran.x.requires_grad:
            ran.x.backward(dx)
        for own in self._layers.values():
            own.finish()

    def _gradients_of(self, ran: ChunkRun) -> tuple[Tensor, ...]:
        """The gradients of the states that all layers ended in."""
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad.contiguous() for t in ran.ended]
        for gradient in gradients:
            self._group.broadcast(gradient, source=self._last)
        return tuple(gradients)

    def _back_layer(self, number: int, ran: ChunkRun, dstate: tuple[Tensor, ...]) -> Tensor | None:
        """Run a layer's backward pass; returns the gradient of its inputs, which is sent on chunk by chunk."""
        own, (time, rows) = self._layers[number], self._memory["x", number].shape[:2]
        works: list[Work] = []
        if number == self._layer_count - 1:
            assert ran.top is not None
            dy = torch.zeros_like(ran.top) if ran.top.grad is None else ran.top.grad
        else:
            dy = self._cached("dy", number, (time, rows, own.outputs))
            works = [self._group.receive(dy[p], (number + 1) % self._ranks) for p in reversed(ran.pieces)]
        asked = number > 0 or (ran.x is not None and ran.x.requires_grad)
        dx = self._cached("dx", number, (time, rows, own.inputs)) if asked else None
        own.begin_backward(dstate or (None,) * len(own.state))
        for at, piece in enumerate(reversed(ran.pieces)):
            if works:
                works[at].wait()
            if number in ran.masks:
                dy[piece].mul_(ran.masks[number][piece])
            own.backward(piece, dy[piece], None if dx is None else dx[piece])
            if number > 0 and dx is not None:
                self._send(dx[piece], number - 1)
        return dx

    def close(self) -> None:
        self._sent.clear()
        self._memory.clear()

    # Evaluation

    @torch.no_grad()
    def predict(self, replica: Replica, batch: Batch) -> Any | None:
        state = () if self._seen is None else (self._seen.initial_state(batch),)
        with evaluating(self._training):
            outputs, carried, _ = self._forward(self._cut.evaluation, batch, state, training=False)
        if self._seen is not None:
            self._seen.put(carried)
            self._seen.commit()
        self._wait_for_sent()
        return outputs


def _forget(model: nn.Module, name: str) -> None:
    """Remove the tensor of this name from the model."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    parameters_of(module).pop(own, None)
    if own in buffers_of(module):
        buffers_of(module).pop(own)
