"""The state of a layer of integrate-and-fire neurons, and what a step makes of it by each reset rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from apportion.exporting.spiking.graph import Neurons


@dataclass(eq=False, kw_only=True)
class Membranes:
    """The state of a layer of neurons."""

    neurons: Neurons
    v: Tensor
    threshold: Tensor
    spikes: Tensor
    count: Tensor
    unit: bool
    """Whether every threshold is 1."""
    fired: Tensor | None = None
    """Spikes of either sign, where there are two."""

    @classmethod
    def at_rest(cls, neurons: Neurons, like: Tensor) -> Membranes:
        """The state before the first step; ``like``: a tensor of the currents' shape, type and layout."""
        threshold = neurons.threshold.to(like.dtype)
        threshold = threshold.reshape(-1, *[1] * (like.ndim - 2)) if threshold.ndim else threshold
        return cls(
            neurons=neurons,
            v=torch.zeros_like(like),
            threshold=threshold,
            spikes=torch.zeros_like(like),
            count=torch.zeros_like(like),
            unit=bool((threshold == 1).all()),
            fired=torch.zeros_like(like) if neurons.reset == "signed" else None,
        )

    def step(self, current: Tensor | None) -> Tensor:
        """Add the currents (None: there are none), fire, and return the spikes, which the next step overwrites."""
        if current is not None:
            self.v += current
        {"subtract": self._subtract, "zero": self._zero, "signed": self._signed}.get(
            self.neurons.reset, self._clipped_multi
        )()
        return self.spikes

    def _reached(self) -> None:
        compare = torch.gt if self.neurons.strictly else torch.ge
        compare(self.v, self.threshold, out=self.spikes)

    def _take(self, spikes: Tensor) -> None:
        if self.unit:
            self.v -= spikes
        else:
            self.v.addcmul_(spikes, self.threshold, value=-1)

    def _subtract(self) -> None:
        self._reached()
        self._take(self.spikes)
        self.count += self.spikes

    def _zero(self) -> None:
        self._reached()
        self.v.masked_fill_(self.spikes != 0, 0)
        self.count += self.spikes

    def _clipped_multi(self) -> None:
        torch.maximum(self.v, -self.threshold, out=self.v)
        torch.div(self.v, self.threshold, rounding_mode="trunc", out=self.spikes)  # as sinabs rounds
        self.spikes.clamp_(min=0)
        self._take(self.spikes)
        self.count += self.spikes

    def _signed(self) -> None:
        assert self.neurons.levels is not None
        assert self.fired is not None
        torch.ge(self.v, self.threshold, out=self.spikes)
        self.spikes *= self.count < self.neurons.levels
        self.spikes -= ((self.v < 0) & (self.count > 0)).to(self.v.dtype)
        self._take(self.spikes)
        self.count += self.spikes
        self.fired += self.spikes.abs()


def fired(neurons: Neurons, currents: Iterable[Tensor], each: Tensor) -> Iterator[Tensor]:
    """The spikes of each step, which the next step overwrites; ``each``: what flows in every step besides."""
    state: Membranes | None = None
    for current in currents:
        if state is None:
            state = Membranes.at_rest(neurons, current)
        state.v += each
        yield state.step(current)
