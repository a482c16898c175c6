"""The contributions that replicas which train on their own exchange, and their average.

A contribution is what a replica has changed since the average that it began with: the change of its weights and
buffers, and its optimizer's slots as they are. The new average is the old one plus the mean of the changes, weighted by
the examples seen; or, with an outer optimizer, one of its steps along that mean (Douillard et al., "DiLoCo", 2023).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from apportion.comm.shared_layout import TensorRegions
from apportion.core.torch_private import buffers_of
from apportion.parallel.replica.forward_state import ForwardTensor, digest
from apportion.parallel.replica.replica import Replica


@dataclass(frozen=True)
class Outer:
    """The outer optimizer: SGD with Nesterov's momentum, whose gradient is the old average less the mean."""

    lr: float
    momentum: float


@dataclass(frozen=True)
class Contribution:
    """The tensors of a contribution, or of an average; the same order everywhere."""

    weights: list[Tensor]
    """The parameters that are trained, then buffers of floating numbers: their changes in a contribution, their values
    in an average."""
    counts: list[Tensor]
    """The buffers of whole numbers, as they are."""
    slots: list[Tensor]
    """The optimizer's slots, as they are."""
    has: Tensor
    """The flags of the slots, (slots): 1 where there is one; torch makes them at a parameter's first update."""
    momentum: list[Tensor]
    """The outer optimizer's momentum, in an average; empty without an outer optimizer."""


class ReplicaTensors:
    """The tensors that replicas of one workload average, and their places in a stretch of memory. ``moved``: what else
    a forward pass changes."""

    def __init__(self, replica: Replica, outer: Outer | None, moved: Sequence[ForwardTensor] = ()) -> None:
        self.replica, self.outer = replica, outer
        model = replica.model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # By name: a forward pass may put a new tensor in the old one's place.
        seen: set[int] = set()
        places = []
        for module in model.modules():
            for name, b in buffers_of(module).items():
                if b is not None and b.numel() and id(b) not in seen:
                    seen.add(id(b))
                    places.append((buffers_of(module), name, b.is_floating_point() or b.is_complex()))
        places += [
            (p.owner, p.key, p.tensor.is_floating_point() or p.tensor.is_complex())
            for p in moved
            if p.parameter and p.tensor.numel()
        ]
        self._moved = moved
        self._floating = [(owner, name) for owner, name, floating in places if floating]
        self._whole = [(owner, name) for owner, name, floating in places if not floating]
        self.slots = _slots_to_come(replica)

    def weights_and_counts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this replica's weights and counts, as they are now."""
        floating = [t for owner, name in self._floating if (t := owner[name]) is not None]
        whole = [t for owner, name in self._whole if (t := owner[name]) is not None]
        return [*(p.detach() for p in self.parameters), *floating], whole

    def _like(self) -> Iterator[Tensor]:
        weights, counts = self.weights_and_counts()
        yield from (*weights, *counts, *self.slots.values())
        yield torch.empty(max(1, len(self.slots)), dtype=torch.uint8)
        if self.outer is not None:
            yield from self.parameters

    @property
    def nbytes(self) -> int:
        """The bytes that one ``Contribution`` takes in memory."""
        regions = TensorRegions()
        for like in self._like():
            regions.add(like.dtype, *like.shape)
        return regions.nbytes

    def contribution_in(self, memory: memoryview | bytearray, offset: int = 0) -> Contribution:
        """Return the contribution whose tensors lie in this memory from ``offset`` on."""
        regions = TensorRegions()
        views = [regions.add(like.dtype, *like.shape).of(memory, offset) for like in self._like()]
        weights, counts = self.weights_and_counts()
        a, b = len(weights), len(weights) + len(counts)
        c = b + len(self.slots)
        return Contribution(views[:a], views[a:b], views[b:c], views[c], views[c + 1 :])

    def new(self) -> Contribution:
        """Return a contribution of zeros in memory of its own."""
        return self.contribution_in(bytearray(self.nbytes))

    def write_slots(self, parts: Contribution) -> None:
        """Write this replica's slots, as they are now, into a contribution."""
        slots = dict(self.replica.optimizers.slots())
        for i, name in enumerate(self.slots):
            parts.has[i] = name in slots
            if name in slots:
                parts.slots[i].copy_(slots[name])

    def named_slots(self, parts: Contribution) -> dict[str, Tensor]:
        """Return the slots that are there, by name."""
        return {n: t for n, t, has in zip(self.slots, parts.slots, parts.has.tolist(), strict=False) if has}

    def _averaged(self, parts: Contribution) -> dict[int, Tensor]:
        """Return the tensors of an average, by the identity of this replica's tensors."""
        weights, counts = self.weights_and_counts()
        own = (*self.parameters, *weights[len(self.parameters) :], *counts)
        return {id(t): a for t, a in zip(own, (*parts.weights, *parts.counts), strict=True)}

    def extra_buffers(self, parts: Contribution) -> dict[str, Tensor]:
        """Return the buffers of an average that ``state_dict()`` leaves out, where training has changed them."""
        averaged = self._averaged(parts)
        found = {p.name: averaged[id(p.tensor)] for p in self._moved if not p.parameter and id(p.tensor) in averaged}
        return {p.name: found[p.name] for p in self._moved if p.name in found and digest(found[p.name]) != p.built}

    def model_state(self, parts: Contribution) -> dict[str, Tensor]:
        """Return an average as the model's ``state_dict``; what is not averaged (frozen parameters) is this
        replica's."""
        model, averaged = self.replica.model, self._averaged(parts)
        now: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        now |= dict(model.named_buffers(remove_duplicate=False))
        return {k: averaged.get(id(now.get(k)), v) for k, v in model.state_dict().items()}


def average(
    frame: ReplicaTensors,
    old: Contribution,
    new: Contribution,
    given: Iterable[tuple[float, Contribution]],
    total: float,
) -> None:
    """Write the next average into ``new``, from weighted contributions; ``total``: the sum of the weights. The same
    contributions in the same order give the same bits."""
    if not total:
        copy_parts(old, new)
        return
    for change in new.weights:
        change.zero_()
    for before, after in zip(old.counts, new.counts, strict=True):
        after.copy_(before)
    seen = [0.0] * len(new.slots)
    for weight, parts in given:
        if weight:
            _add(parts, weight, total, new, seen)
    for i, (before, after) in enumerate(zip(old.slots, new.slots, strict=True)):
        new.has[i] = bool(seen[i]) or old.has[i]
        if not seen[i]:
            after.copy_(before)
    step_outer(frame, new.weights, old.momentum, new.momentum)
    for before, after in zip(old.weights, new.weights, strict=True):
        after.add_(before)


def step_outer(frame: ReplicaTensors, changes: Sequence[Tensor], old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Turn the mean changes of the weights, in place, into those that the outer optimizer makes of them, where there is
    one. ``old``, ``new``: its momentum before and after, which may be the same tensors."""
    if frame.outer is None:
        return
    for change, before, after in zip(
        changes, old, new, strict=False
    ):  # the buffers, which come last, are no optimizer's
        torch.mul(before, frame.outer.momentum, out=after).sub_(change)
        change.sub_(after, alpha=frame.outer.momentum).mul_(frame.outer.lr)


def _add(parts: Contribution, weight: float, total: float, into: Contribution, seen: list[float]) -> None:
    """Add one contribution to the sum of the changes, and to the means of the slots; ``seen``: the weight in each
    mean."""
    for change, own in zip(into.weights, parts.weights, strict=True):
        change.add_(own, alpha=weight / total)
    for most, count in zip(into.counts, parts.counts, strict=True):
        torch.maximum(most, count, out=most)
    for i, has in enumerate(parts.has.tolist()[: len(parts.slots)]):
        if has:
            mean, own = into.slots[i], parts.slots[i]
            seen[i] += weight
            if seen[i] == weight:
                mean.copy_(own)
            else:  # so the mean of equal values is that value
                mean.add_(own - mean, alpha=weight / seen[i])


def copy_parts(source: Contribution, target: Contribution) -> None:
    """Copy every tensor of one contribution into another."""
    for mine, theirs in (
        (source.weights, target.weights),
        (source.counts, target.counts),
        (source.slots, target.slots),
        ([source.has], [target.has]),
        (source.momentum, target.momentum),
    ):
        for a, b in zip(mine, theirs, strict=True):
            b.copy_(a)


def _slots_to_come(replica: Replica) -> Mapping[str, Tensor]:
    """Return the slots that the optimizers will keep, by name: found by an update of a copy."""
    if replica.optimizers.searching:
        kind = type(replica.optimizers[min(replica.optimizers.searching)]).__name__
        raise ValueError(f"{kind} searches along the loss of one batch, which replicas do not share: use map_reduce")
    # Of the parameters, not of the model: what it makes of them anew before each call cannot be copied.
    own = list(replica.model.named_parameters())
    parameters, optimizers = copy.deepcopy(([p for _, p in own], dict(replica.optimizers)))
    copies = dict(zip((id(p) for _, p in own), parameters, strict=True))
    names: dict[Any, str] = {copies[id(p)]: name for name, p in own}
    embeddings = [m for m in replica.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    sparse = {copies[id(m.weight)] for m in embeddings if id(m.weight) in copies}
    found = {}
    for owner, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p).to_sparse(1) if p in sparse else torch.zeros_like(p)
        optimizer.step()
        for p, slots in optimizer.state.items():
            for slot, value in slots.items():
                if isinstance(value, Tensor):
                    found[f"{owner}/{names[p]}/{slot}".lstrip("/")] = value
                elif value is not None:
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {slot} of {names[p]} as a {type(value).__name__}: only "
                        "optimizers whose state is tensors can be averaged"
                    )
    return {name: torch.empty_like(t, device="meta") for name, t in found.items()}


@final
class ContributionBytes:
    """The layout of the tensors of contributions in memory that is sent: weights and counts, with ``slots`` the
    optimizer's slots and their flags, and with ``momentum`` the outer optimizer's. ``like``: one of their shapes and
    types."""

    def __init__(self, like: Contribution, *, slots: bool, momentum: bool = False) -> None:
        self._slots = slots
        regions = TensorRegions()
        self._weights = [regions.add(t.dtype, *t.shape) for t in like.weights]
        self._counts = [regions.add(t.dtype, *t.shape) for t in like.counts]
        self._rest = [regions.add(t.dtype, *t.shape) for t in (*like.slots, like.has)] if slots else []
        self._momentum = [regions.add(t.dtype, *t.shape) for t in like.momentum] if momentum else []
        self.nbytes = regions.nbytes

    def write(self, parts: Contribution) -> bytearray:
        """Return new memory with the tensors of a contribution."""
        memory = bytearray(self.nbytes)
        self._copy(parts, self.contribution_in(memory))
        return memory

    def read(self, memory: bytearray, into: Contribution) -> None:
        """Copy the tensors in a memory into a contribution; slots that did not travel stay as they are there."""
        self._copy(self.contribution_in(memory), into)

    def contribution_in(self, memory: bytearray) -> Contribution:
        """Return the contribution whose tensors lie in a memory; without slots, where these did not travel."""
        weights = [region.of(memory) for region in self._weights]
        counts = [region.of(memory) for region in self._counts]
        *slots, has = [region.of(memory) for region in self._rest] or [torch.zeros(1, dtype=torch.uint8)]
        return Contribution(weights, counts, slots, has, [region.of(memory) for region in self._momentum])

    def _copy(self, source: Contribution, target: Contribution) -> None:
        tensors: list[tuple[list[Tensor], list[Tensor]]] = [
            (source.weights, target.weights),
            (source.counts, target.counts),
        ]
        if self._slots:
            tensors += [(source.slots, target.slots), ([source.has], [target.has])]
        if self._momentum:
            tensors.append((source.momentum, target.momentum))
        for mine, theirs in tensors:
            for a, b in zip(mine, theirs, strict=True):
                b.copy_(a)
