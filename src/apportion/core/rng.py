"""The global random number generators that a model or a data set may draw from: torch's, Python's and numpy's.

``fork_rng`` and ``seeded_rng`` do for all of them what ``torch.random.fork_rng`` does for torch's: what is drawn inside
is drawn again afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RngState:
    """The states of Python's, numpy's and torch's CPU generator at one moment."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> Self:
        """Copy the states of this process's generators."""
        return cls(random.getstate(), np.random.get_state(), torch.default_generator.get_state())

    def restore(self) -> None:
        """Let the generators of this process go on from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)

    def fingerprint(self) -> tuple[object, ...]:
        """Returns a value that is equal for equal states."""
        return self.python, _comparable(self.numpy), self.torch.numpy().tobytes()


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers (splitmix64, chained): equal numbers, equal seed, on every machine."""
    # The order of the numbers counts: each is added to the scrambled state of those before, so that (1, 2) and (2, 1)
    # give unrelated seeds. The constants are splitmix64's; runs that resume depend on every bit of this.
    z = 0
    for number in numbers:
        z = (z + number + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    # 63 bits: a seed fits a signed 64-bit number wherever it is stored.
    return z >> 1


def plain_rng_states() -> tuple[object, object]:
    """Returns what Python's and numpy's generators are at, as values that are equal for equal states."""
    return random.getstate(), _comparable(np.random.get_state(legacy=False))


def _comparable(state: Any) -> object:
    """Returns the state of numpy's generator, of whichever kind it is, with bytes in the place of arrays: to write 624
    numbers out takes longer than the forward pass of a small layer."""
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return tuple(map(_comparable, state)) if isinstance(state, tuple) else state


def seed_everything(seed: int) -> None:
    """Seed torch's generators of every device, numpy's and Python's, the same on every rank."""
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would write a traceback for each kind of GPU
    else:
        torch.manual_seed(seed)
    # numpy takes 32 bits; the seeds of Python and torch keep all of theirs.
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def seed_host(seed: int) -> None:
    """Seed the generators of the host alone: torch's of the CPU, numpy's and Python's."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def fork_rng(devices: Iterable[int] = ()) -> Iterator[None]:
    """Restore every generator at the end: the host's, and those of the GPUs with these numbers."""
    devices = list(devices)
    with fork_host_rng(), torch.random.fork_rng(devices, enabled=bool(devices)):
        yield


@contextmanager
def fork_host_rng() -> Iterator[None]:
    """Restore the generators of the host at the end: torch's of the CPU, numpy's and Python's."""
    before = RngState.now()
    try:
        yield
    finally:
        before.restore()


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Seed the generators of the host, and restore them at the end."""
    with fork_host_rng():
        seed_host(seed)
        yield


@contextmanager
def plain_rng_from(state: RngState) -> Iterator[None]:
    """Let Python's and numpy's generators start from this state, and restore them at the end; torch's generators go
    on."""
    before = RngState.now()
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    try:
        yield
    finally:
        random.setstate(before.python)
        np.random.set_state(before.numpy)


def gpus_in_use() -> list[int]:
    """Returns the numbers of the GPUs, once CUDA has been used in this process."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


_seeding = False
"""Whether a seed is being drawn for a generator of a rank's own, which is a strategy's draw and not the network's."""


@contextmanager
def strategy_draws() -> Iterator[None]:
    """Draw for the strategy's own ends: a proof does not say of such a draw that the network makes it."""
    global _seeding
    _seeding = True
    try:
        yield
    finally:
        _seeding = False


def strategy_is_drawing() -> bool:
    """Returns whether ``strategy_draws`` is under way."""
    return _seeding
