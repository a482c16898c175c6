"""A worker's model on flat weights: its parameters lie in one vector, its gradients are gathered into another
(``FlatModel``); and the hyperparameters of every batch's update, as the schedule has them (``HyperTable``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apportion.core.torch_private import foreach_add, foreach_copy
from apportion.parallel.optim.hyperparameters import StoreRule
from apportion.parallel.parameter_store.memory.shard_layout import StoreLayout
from apportion.parallel.replica.forward_state import ForwardTensor, digest


class FlatModel:
    """A model whose parameters lie in one flat vector. ``weights`` become the parameters' memory; the values that the
    parameters have are kept. ``moved``: the tensors that a forward pass changes beside the buffers that a state holds;
    they are read and written with the buffers."""

    def __init__(
        self, model: nn.Module, layout: StoreLayout, weights: Tensor, moved: Sequence[ForwardTensor] = ()
    ) -> None:
        self.model, self.layout, self._moved = model, layout, moved
        self._places = {id(p): view for p, view in zip(layout.parameters, layout.views(weights), strict=True)}
        with torch.no_grad():
            for p in layout.parameters:
                view = self._places[id(p)]
                view.copy_(p)
                p.data = view

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return the parameters' values now, in a flat vector of its own."""
        flat = torch.zeros(self.layout.total, dtype=self.layout.dtype)
        for p, view in zip(self.layout.parameters, self.layout.views(flat), strict=True):
            view.copy_(p)
        return flat

    def move(self, weights: Tensor) -> None:
        """Make the parameters lie in this memory from now on: their values are what it contains."""
        for p, view in zip(self.layout.parameters, self.layout.views(weights), strict=True):
            p.data = view

    # Gradients

    @torch.no_grad()
    def gather(self, views: list[Tensor], *, first: bool) -> list[bool]:
        """Gather every ``p.grad`` into these views of a flat gradient (where this is the ``first``), or add it to what
        they contain; then set it to None. Returns which parameters had one."""
        had = [p.grad is not None for p in self.layout.parameters]
        into, gradients = [], []
        for p, view, has in zip(self.layout.parameters, views, had, strict=True):
            if has:
                assert p.grad is not None
                into.append(view)
                gradients.append(p.grad.to_dense() if p.grad.is_sparse else p.grad)
            elif first:
                view.zero_()
        if into:
            (foreach_copy if first else foreach_add)(into, gradients)
        for p in self.model.parameters():
            p.grad = None
        return had

    # Buffers

    @property
    def buffer_numbers(self) -> int:
        """The number of elements of the buffers that a state holds."""
        return sum(b.numel() for _, b in self._buffers())

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers by name, looked up anew: a model may put another tensor under the name."""
        kept = self.model.state_dict(keep_vars=True)
        found = [(name, b) for name, b in kept.items() if isinstance(b, Tensor) and not isinstance(b, nn.Parameter)]
        return found + [(place.name, place.tensor) for place in self._moved]

    def read_buffers(self, into: Tensor) -> Tensor:
        """Copy the buffers as they are into a flat vector."""
        at = 0
        for _, b in self._buffers():
            into[at : at + b.numel()] = b.detach().reshape(-1)
            at += b.numel()
        return into

    @torch.no_grad()
    def write_buffers(self, flat: Tensor) -> None:
        """Set the buffers to the values of a flat vector."""
        at = 0
        for _, b in self._buffers():
            b.copy_(flat[at : at + b.numel()].view(b.shape))
            at += b.numel()

    def state(self, weights: Tensor, buffers: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return copies of the model's state with these weights and buffers instead of its own; and of the buffers
        beside it that training has changed."""
        views = dict(zip(map(id, self.layout.parameters), self.layout.views(weights), strict=True))
        state: dict[str, Tensor] = {}
        beside: dict[str, Tensor] = {}
        at = 0
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) in views:
                state[name] = views[id(value)].clone()
            elif isinstance(value, nn.Parameter):
                state[name] = value.detach().clone()
            else:
                part = buffers[at : at + value.numel()].view(value.shape)
                state[name] = part.to(value.dtype, copy=True)
                at += value.numel()
        for place in self._moved:
            own = place.tensor
            part = buffers[at : at + own.numel()].view(own.shape)
            (state if place.parameter else beside)[place.name] = part.to(own.dtype, copy=True)
            at += own.numel()
        return state, {
            p.name: beside[p.name] for p in self._moved if p.name in beside and digest(beside[p.name]) != p.built
        }


class HyperTable:
    """The hyperparameters of each batch's update, as the schedule has them: those of batch t after t steps of it."""

    def __init__(self, rule: StoreRule, optimizer: Optimizer, schedule: Any) -> None:
        self._rule, self._optimizer, self._schedule = rule, optimizer, schedule
        self._first, self._rows = 0, [self._read()]

    def _read(self) -> list[list[float]]:
        return [self._rule.hyper_of(group) for group in self._optimizer.param_groups]

    def start_from(self, step: int, load: Callable[[Optimizer, Any], None]) -> None:
        """Go on from a state: ``load`` puts it into the optimizer and the schedule."""
        load(self._optimizer, self._schedule)
        self._first, self._rows = step, [self._read()]

    def at(self, batch: int) -> list[list[float]]:
        """Return the hyperparameters of each group for the update with this batch."""
        if self._schedule is None:
            return self._rows[0]
        while batch >= self._first + len(self._rows):
            self._optimizer._opt_called = True  # type: ignore[attr-defined] # a schedule warns without
            self._schedule.step()
            row = self._read()
            self._rows.append(self._rows[-1] if row == self._rows[-1] else row)
        return self._rows[max(0, batch - self._first)]
