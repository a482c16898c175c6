"""The synchronous update of one host: weights once, each rank reduces and updates its own slice.

::

    every rank    forward, backward: its gradient, written once where all see it
                  arrive A, wait for all
                  its slice of the live version, and everyone's gradient of it -> the same slice of the other version
                  arrive B, wait for all
                  commit = c + 1: the other version is live

No rank writes the live version, and the commit word is the same whoever writes it: a worker that dies at any point
leaves a whole version behind, and the step that it was in is done again with the same draws (so with the same bits).
Sums are taken in rank order. Each rank does its part of the optimizer's work, so that is divided too.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apportion.comm.group import Alone, Group, collective
from apportion.comm.shared_memory_group import SharedMemoryGroup
from apportion.comm.world import World
from apportion.core import fast_paths, torch_private
from apportion.core.data.batch import Batch
from apportion.errors import StateLost
from apportion.parallel.ops.factored_linear import factored, plain_layers, redirect
from apportion.parallel.optim.elementwise import ElementwiseRule, FlatPiece, rule_of
from apportion.parallel.replica.gradient_buckets import dense as in_full
from apportion.parallel.replica.initial_model import tied_by_memory
from apportion.parallel.replica.replica import Replica
from apportion.parallel.shared_weights.layout import (
    VERSIONS,
    FactoredLayer,
    SharedLayout,
    SharedRegion,
    is_dense,
    regions_of,
    shaped,
)

PIECE = 1 << 16
"""The number of elements of a piece: with its slots it stays in a core's second-level cache between the operations on
it."""
FACTORED_PIECE = 1 << 20
"""The number of elements of a piece whose gradient is a matrix product: below some 256 rows that loses a third of its
speed."""
_COMMIT, _READY = 0, 1
_LOSS, _ALL_USED, _SQUARES = 0, 1, 2
_START, _ROWS, _DENSE = 0, 1, 2


def unsuited(replica: Replica, world: World) -> str | None:
    """Return why the weights cannot lie in shared pages; None where they can."""
    workload = replica.workload
    if fast_paths.is_plain("pages"):
        return "the plain path is asked for"
    if not isinstance(
        world.group(), SharedMemoryGroup | Alone
    ):  # who is left alone finds what the others have left there
        return "the ranks do not share memory"
    if workload.update is not None or workload.precision == "float16" or workload.compile:
        return "its update is not a single one of plain tensors"
    (optimizer,) = replica.optimizers.values()
    if any(rule_of(optimizer, group) is None for group in optimizer.param_groups):
        return f"{type(optimizer).__name__} is not known to be element-wise"
    if workload.carry is not None:
        return "a recurrent state is carried"
    if any(torch_private.gradient_hooked(p) for p in replica.trainable()):
        return "a parameter has hooks"
    if not all(is_dense(p) for p in replica.trainable()):
        return "a parameter is not one block of memory"
    if any(True for _ in tied_by_memory(replica.model)):
        return "two parameters lie in one memory"
    if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in replica.model.modules()):
        return "its gradients are sparse"
    return None


@dataclass(frozen=True)
class _SlicePart:
    """A piece of this rank's slice: consecutive elements of a region, with one count and one source of gradient."""

    region: SharedRegion
    first: int
    """The number of the first parameter in the piece."""
    versions: tuple[FlatPiece, ...]
    gradients: tuple[Tensor, ...]
    """The gradient of each rank."""
    scratch: Tensor
    layer: int
    """The number of the factored layer, -1: none. Then ``rows`` are those of its weight."""
    rows: slice


class SharedUpdate:
    """The weights of a replica in shared pages, and their update."""

    def __init__(self, replica: Replica, world: World) -> None:
        self._replica = replica
        self._parameters = replica.trainable()
        (self._optimizer,) = replica.optimizers.values()
        rules: list[tuple[Any, ElementwiseRule]] = []
        for group in self._optimizer.param_groups:
            rule = rule_of(self._optimizer, group)
            assert rule is not None
            rules.append((group, rule))
        regions = regions_of(rules, self._parameters)
        self._batch_size = replica.workload.batch_size
        layers = self._find_layers()
        self._forward = replica.forward
        self.layout = SharedLayout(
            regions=regions,
            buffers=[(p.tensor.shape, p.tensor.dtype) for p in self._forward.places if not p.parameter],
            frozen=[(p.tensor.shape, p.tensor.dtype) for p in self._forward.places if p.parameter],
            layers=[
                FactoredLayer(i, m.in_features, m.out_features, m.weight.dtype)
                for i, m, is_factored in layers
                if is_factored
            ],
            rows=self._batch_size,
            parameters=len(self._parameters),
            seats=world.seats,
        )
        self._memory = world.shared(world.another("weights"), self.layout.nbytes)
        self._map()
        self._place = {
            i: (r, start)
            for r, region in enumerate(regions)
            for i, start in zip(region.parameters, region.starts, strict=True)
        }
        self._views = [[self._view("weights", v, i) for i in range(len(self._parameters))] for v in range(VERSIONS)]
        self._layer_of = {layer.parameter: k for k, layer in enumerate(self.layout.layers)}
        self._own: list[Tensor] = []
        self._written = [False] * len(self._parameters)
        self._many = 0
        self._initial = self._initial_slots()
        for i, p in enumerate(self._parameters):
            p.register_post_accumulate_grad_hook(lambda p, i=i: self._take(i, p))
        for i, module, _ in layers:
            redirect(module, lambda x, dy, i=i: self._take_product(i, x, dy))
        self._batch: Batch | None = None
        self._fresh = world.generation > 0
        """Tells whether this process has never had the weights."""
        self._used_by: Any = None
        self._cursor = [0] * len(self.layout.layers)
        self.seconds = 0.0

    def _find_layers(self) -> list[tuple[int, nn.Linear, bool]]:
        """Return (number of the weight, layer, whether it is factored) of each plain Linear layer."""
        numbers: dict[Tensor, int] = {p: i for i, p in enumerate(self._parameters)}
        found = [(numbers[m.weight], m) for m in plain_layers(self._replica.model) if m.weight in numbers]
        return [(i, m, factored(m.weight, self._batch_size)) for i, m in found]

    def _map(self) -> None:
        layout, memory = self.layout, self._memory

        def flat(name: str) -> Tensor:
            return layout.tensor(memory, name)

        self._commit = ctypes.c_int64.from_buffer(memory, 8 * _COMMIT)
        self._ready = ctypes.c_int64.from_buffer(memory, 8 * _READY)
        self._lines = flat("line").view(layout.seats, 8).numpy()
        self._used = flat("used").view(layout.seats, -1).numpy()
        self._rows = flat("rows").view(layout.seats, len(layout.layers), 3).numpy()
        self._counts = [flat(f"counts/{v}").numpy() for v in range(VERSIONS)]
        self._flat = [
            [
                FlatPiece(flat(f"weights/{v}/{r}"), tuple(flat(f"{s}/{v}/{r}") for s in region.rule.slots))
                for r, region in enumerate(layout.regions)
            ]
            for v in range(VERSIONS)
        ]
        self._kept = [
            [
                *(flat(f"buffer/{v}/{b}").view(shape) for b, (shape, _) in enumerate(layout.buffers)),
                *(flat(f"frozen/{v}/{k}").view(shape) for k, (shape, _) in enumerate(layout.frozen)),
            ]
            for v in range(VERSIONS)
        ]
        self._told = [flat(f"told/{v}").numpy() for v in range(VERSIONS)]
        self._gradients = [
            [flat(f"gradient/{seat}/{r}") for r in range(len(layout.regions))] for seat in range(layout.seats)
        ]
        self._inputs = [flat(f"inputs/{k}").view(-1, layer.inputs) for k, layer in enumerate(layout.layers)]
        self._outputs = [flat(f"outputs/{k}").view(-1, layer.outputs) for k, layer in enumerate(layout.layers)]

    def _view(self, part: str, version: int, i: int) -> Tensor:
        r, start = self._place[i]
        piece, slots = self._flat[version][r], self._rule(i).slots
        flat = piece.weights if part == "weights" else piece.slots[slots.index(part)]
        return shaped(flat, start, self._parameters[i])

    def _rule(self, i: int) -> ElementwiseRule:
        return self.layout.regions[self._place[i][0]].rule

    def _initial_slots(self) -> dict[tuple[int, str], Tensor]:
        """Return the slots that the optimizer has made before the first update."""
        return {
            (i, slot): self._optimizer.state[p][slot].clone()
            for i, p in enumerate(self._parameters)
            for slot in self._rule(i).slots
            if slot in self._optimizer.state.get(p, {})
        }

    # Where this rank stands

    @collective
    def attach(self, world: World, group: Group) -> None:
        """Take this rank's slice of the weights, and go on from what is committed. Called by all ranks."""
        self._group, self._rank, self._size = group, world.rank, world.size
        meeting = group.meeting if isinstance(group, SharedMemoryGroup) else None
        self._arrive, self._wait = (meeting.arrive, meeting.wait) if meeting else (_nothing, _nothing)
        self._own = [
            shaped(self._gradients[self._rank][self._place[i][0]], self._place[i][1], p)
            for i, p in enumerate(self._parameters)
        ]
        self._parts = self._cut(self._slice(coalesced=True))
        self._single: list[_SlicePart] | None = None
        known = group.all_gather(torch.tensor([0 if self._fresh else 1])).flatten()
        if not self._ready.value:
            if not known.any():
                raise StateLost("no worker is left that had the weights")
            self._publish()
        self._fresh = False
        self.restore()

    def _publish(self) -> None:
        """Make the weights as this process has them (every rank has the same) the live version. The commit word comes
        with them: were it written elsewhere, a death in between would leave it to the state before."""
        if not self._fresh:
            self._commit.value = self._replica.step
            self._write(self._commit.value % VERSIONS)
        self._group.barrier()
        self._ready.value = 1

    def _write(self, live: int) -> None:
        for i, p in enumerate(self._parameters):
            self._views[live][i].copy_(p.detach())
            for slot in self._rule(i).slots:
                kept = self._optimizer.state.get(p, {}).get(slot, self._initial.get((i, slot)))
                view = self._view(slot, live, i)
                view.zero_() if kept is None else view.copy_(kept)
            self._counts[live][i] = self._updates_of(p)
        self._forward.write(self._kept[live], self._told[live])

    def _updates_of(self, p: nn.Parameter) -> int:
        state = self._optimizer.state.get(p, {})
        if "step" in state:
            return int(state["step"])
        return self._replica.step if state else 0

    def restore(self) -> None:
        """Make this process's weights and buffers the live version; what was begun after it is forgotten."""
        live = self._commit.value % VERSIONS
        with self._replica.settled:
            self._replica.catch_up(self._commit.value)
            self._bind(live)
            self._forward.read(self._kept[live], self._told[live])
        counts = self._counts[live]
        self._uniform = bool(len(counts) == 0 or (counts == counts[0]).all())

    def _bind(self, version: int) -> None:
        for p, view in zip(self._parameters, self._views[version], strict=True):
            p.data = view

    def _slice(self, *, coalesced: bool) -> list[tuple[int, int, int]]:
        """Return (region, from element, to element) of this rank's slice, cut at every parameter, or only where it must
        be."""
        ends = np.cumsum([0, *(region.length for region in self.layout.regions)])
        total = int(ends[-1])
        cuts = [self._cut_point(total * rank // self._size, ends) for rank in (self._rank, self._rank + 1)]
        found = []
        for r, region in enumerate(self.layout.regions):
            edges = {0, region.length}
            following = [*region.starts[1:], region.length]
            for i, start, after in zip(region.parameters, region.starts, following, strict=True):
                if i in self._layer_of:  # and the gap behind it by itself
                    edges |= {start, start + self._parameters[i].numel(), after}
                elif not coalesced:
                    edges |= {start}
            first, last = (min(max(cut - int(ends[r]), 0), region.length) for cut in cuts)
            inside = sorted({first, last, *(e for e in edges if first < e < last)})
            found += [(r, a, b) for a, b in itertools.pairwise(inside) if b > a]
        return found

    def _cut_point(self, wanted: int, ends: Any) -> int:
        """Return a place near the wanted one where two ranks' slices may meet."""
        for r, region in enumerate(self.layout.regions):
            if not ends[r] <= wanted < ends[r + 1]:
                continue
            element = wanted - int(ends[r])
            k = region.number_at(element)
            i, start = region.parameters[k], region.starts[k]
            if i in self._layer_of:
                if element >= start + self._parameters[i].numel():  # in the gap after it
                    return int(ends[r]) + start + self._parameters[i].numel()
                width = self._parameters[i].shape[1]
                return int(ends[r]) + start + (element - start + width // 2) // width * width
            step = 64 // region.dtype.itemsize
            return int(ends[r]) + element // step * step
        return int(ends[-1])

    def _cut(self, ranges: Sequence[tuple[int, int, int]]) -> list[_SlicePart]:
        self._scratches: dict[torch.dtype, Tensor] = {}
        parts = []
        for r, first, last in ranges:
            region = self.layout.regions[r]
            k = region.number_at(first)
            i, start = region.parameters[k], region.starts[k]
            layer = self._layer_of.get(i, -1)
            if layer >= 0 and first >= start + self._parameters[i].numel():  # the gap after it
                continue
            width = self._parameters[i].shape[1] if layer >= 0 else 1
            step = max(1, FACTORED_PIECE // width) * width if layer >= 0 else PIECE
            for a in range(first, last, step):
                b = min(a + step, last)
                rows = slice((a - start) // width, (b - start) // width)
                parts.append(self._part(r, slice(a, b), layer, rows))
        return parts

    def _part(self, r: int, at: slice, layer: int, rows: slice) -> _SlicePart:
        region = self.layout.regions[r]
        versions = tuple(
            FlatPiece(flat[r].weights[at], tuple(slot[at] for slot in flat[r].slots)) for flat in self._flat
        )
        gradients = tuple(self._gradients[rank][r][at] for rank in range(self._size))
        first = region.parameters[region.number_at(at.start)]
        if self._replica.workload.clip_grad_norm is not None:
            scratch = torch.empty(at.stop - at.start, dtype=region.dtype)
        else:
            most = max(PIECE, FACTORED_PIECE if layer >= 0 else 0, at.stop - at.start)
            kept = self._scratches.get(region.dtype)
            if kept is None or kept.numel() < most:
                kept = self._scratches[region.dtype] = torch.empty(most, dtype=region.dtype)
            scratch = kept[: at.stop - at.start]
        return _SlicePart(region, first, versions, gradients, scratch, layer, rows)

    # This rank's gradient

    def begin(self, batch: Batch) -> None:
        """Prepare for a backward pass of these rows."""
        self._batch = batch
        self._written = [False] * len(self._written)
        self._many = 0
        self._cursor = [0] * len(self._cursor)
        if len(self._cursor):
            own = self._rows[self._rank]
            own[:, _START] = batch.rows.start
            own[:, _ROWS:] = 0

    def _first(self, i: int) -> bool:
        """Return whether this is the first contribution to this parameter's gradient in this step."""
        if self._written[i]:
            return False
        self._written[i] = True
        self._many += 1
        return True

    def _take(self, i: int, p: nn.Parameter) -> None:
        if p.grad is None:  # it went another way
            return
        if p.grad.layout is not torch.strided:
            p.grad = in_full(p, self._optimizer, self._replica.names[p])
        layer = self._layer_of.get(i)
        if layer is None:
            fresh = self._first(i)
        else:
            fresh = not self._rows[self._rank, layer, _DENSE]
            self._rows[self._rank, layer, _DENSE] = 1
            self._first(i)
        if fresh:
            self._own[i].copy_(p.grad)
        else:
            self._own[i].add_(p.grad)
        p.grad = None

    def _take_product(self, i: int, x: Tensor, dy: Tensor) -> None:
        layer = self._layer_of.get(i)
        if layer is None:
            self._add_product(i, x, dy, fresh=self._first(i))
            return
        assert self._batch is not None
        self._first(i)
        done, own = self._cursor[layer], self._rows[self._rank, layer]
        if done + len(x) <= len(self._batch):
            at = slice(self._batch.rows.start + done, self._batch.rows.start + done + len(x))
            self._inputs[layer][at].copy_(x)
            self._outputs[layer][at].copy_(dy)
            self._cursor[layer] = own[_ROWS] = done + len(x)
        elif len(self._batch):  # more rows than examples: a layer that is called for each place, or twice
            self._add_product(i, x, dy, fresh=not own[_DENSE])
            own[_DENSE] = 1

    def _add_product(self, i: int, x: Tensor, dy: Tensor, *, fresh: bool) -> None:
        if fresh:
            torch.mm(dy.t(), x, out=self._own[i])
        else:
            self._own[i].addmm_(dy.t(), x)

    # The update

    def __call__(self, loss: Tensor | None, weight: float) -> Tensor:
        """Make one update with everyone's gradients; returns the sum over ranks of weight times loss."""
        replica, line = self._replica, self._lines[self._rank]
        line[_LOSS] = 0.0 if loss is None else float(loss) * weight
        line[_ALL_USED] = all_used = self._many == len(self._written)
        if not all_used:
            self._used[self._rank] = self._written
        with (
            replica.settled
        ):  # somebody may be copying the live version, until others could write it in their next step
            self._arrive()
        self._wait()
        began = time.perf_counter()
        total = sum(self._lines[rank, _LOSS] for rank in range(self._size))
        commit = self._commit.value
        old, new = commit % VERSIONS, (commit + 1) % VERSIONS
        waited, used = self._group.waited, self._used_now()
        self._update(used, old, new)
        if self._rank == 0:
            self._counts[new][:] = self._counts[old] + (1 if used is None else used)
            if self._forward.places:
                self._forward.write(self._kept[new], self._told[new])
        self._group.barrier()
        self._commit.value = commit + 1
        self.seconds += time.perf_counter() - began - (self._group.waited - waited)
        with replica.settled:
            self._bind(new)
            replica.advance()
        return torch.tensor(total, dtype=loss.dtype if loss is not None else torch.get_default_dtype())

    def _used_now(self) -> Any:
        """Return which parameters any rank has used, by number; None: every rank has used all of them."""
        if all(self._lines[rank, _ALL_USED] for rank in range(self._size)):
            self._used_by = None
            return None
        shown = [self._used[rank] | bool(self._lines[rank, _ALL_USED]) for rank in range(self._size)]
        self._used_by = np.stack(shown)
        return self._used_by.any(0)

    def _update(self, used: Any, old: int, new: int) -> None:
        self._uniform = self._uniform and used is None
        parts = self._parts if self._uniform else self._each_parameter()
        live = parts if used is None else [part for part in parts if used[part.first]]
        if self._replica.workload.clip_grad_norm is None:
            for part in live:
                self._apply(part, self._gradient(part), old, new)
        else:
            scale = self._clip([self._gradient(part) for part in live])
            for part in live:
                self._apply(part, part.scratch if scale == 1.0 else part.scratch.mul_(scale), old, new)
        for part in parts if used is not None else ():
            if not used[part.first]:
                _keep(part.versions[old], part.versions[new])

    def _each_parameter(self) -> list[_SlicePart]:
        """Return the slice in pieces of one parameter each: some have had more updates than others."""
        if self._single is None:
            self._single = self._cut(self._slice(coalesced=False))
        return self._single

    def _apply(self, part: _SlicePart, gradient: Tensor, old: int, new: int) -> None:
        count = int(self._counts[old][part.first]) + 1
        group = self._optimizer.param_groups[part.region.group]
        part.region.rule.update(group, count, gradient, part.versions[old], part.versions[new])

    def _gradient(self, part: _SlicePart) -> Tensor:
        """Return the sum of the gradients over ranks, in rank order."""
        if part.layer >= 0:
            return self._product(part)
        by = self._used_by
        givers = (
            part.gradients
            if by is None
            else [g for g, used in zip(part.gradients, by[:, part.first], strict=True) if used]
        )
        if len(givers) == 1:
            return part.scratch.copy_(givers[0])
        torch.add(givers[0], givers[1], out=part.scratch)
        for gradient in givers[2:]:
            part.scratch.add_(gradient)
        return part.scratch

    def _product(self, part: _SlicePart) -> Tensor:
        """Return the gradient of a factored layer's rows as a product of every rank's factors."""
        table = self._rows[: self._size, part.layer]
        inputs, outputs = self._inputs[part.layer], self._outputs[part.layer]
        found = part.scratch.view(part.rows.stop - part.rows.start, -1)
        fresh = True
        for start, stop in _stretches(table):
            product = outputs[start:stop, part.rows].t()
            if fresh:
                torch.mm(product, inputs[start:stop], out=found)
            else:
                found.addmm_(product, inputs[start:stop])
            fresh = False
        for gradient, dense in zip(part.gradients, table[:, _DENSE], strict=True):
            if dense:
                part.scratch.copy_(gradient) if fresh else part.scratch.add_(gradient)
                fresh = False
        return part.scratch.zero_() if fresh else part.scratch

    def _clip(self, gradients: Sequence[Tensor]) -> float:
        """Return the factor that torch's clip_grad_norm_ scales by; each element's square is counted by the rank that
        owns it."""
        most = self._replica.workload.clip_grad_norm
        assert most is not None
        norms = [float(g.norm(dtype=torch.float64)) for g in gradients]
        self._lines[self._rank, _SQUARES] = sum(norm * norm for norm in norms)
        self._group.barrier()
        norm = math.sqrt(sum(float(self._lines[rank, _SQUARES]) for rank in range(self._size)))
        scale = most / (norm + 1e-6)
        return 1.0 if scale >= 1.0 else scale  # also where it is no number: torch then makes the whole gradient none

    # State

    def show(self) -> None:
        """Set the optimizer's state to that of the version that the weights are of (another rank may have committed the
        next one): what is read of it afterwards is a view."""
        live = self._replica.step % VERSIONS
        for i, p in enumerate(self._parameters):
            count, rule = int(self._counts[live][i]), self._rule(i)
            if not count and not any((i, slot) in self._initial for slot in rule.slots):
                self._optimizer.state.pop(p, None)
                continue
            state: dict[str, Tensor] = {slot: self._view(slot, live, i) for slot in rule.slots}
            if rule.counted:
                state["step"] = torch.tensor(float(count))
            if state:
                self._optimizer.state[p] = state

    def loading(self) -> None:
        """Prepare for loading another state: it must not be loaded into the live version."""
        for p in self._parameters:
            p.data = p.data.clone()

    @collective
    def loaded(self) -> None:
        """Make the state that the replica has loaded the live version. Called by all ranks."""
        self._group.barrier()
        self._ready.value = 0
        self._group.barrier()
        self._publish()
        self.restore()

    @property
    def kept(self) -> memoryview:
        """The memory of both versions of weights, slots and buffers: once a host."""
        return self._memory[: self.layout.kept]


def _nothing() -> None:
    pass


def _keep(old: FlatPiece, new: FlatPiece) -> None:
    new.weights.copy_(old.weights)
    for slot, before in zip(new.slots, old.slots, strict=True):
        slot.copy_(before)


def _stretches(table: Any) -> list[tuple[int, int]]:
    """Return the stretches (from, to) of rows that ranks have written, where consecutive ones are joined."""
    joined: list[tuple[int, int]] = []
    for start, rows, _ in table.tolist():
        if not rows:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], start + rows)
        else:
            joined.append((start, start + rows))
    return joined
