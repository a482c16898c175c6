"""The digest of what one update on four rows makes of a network: its bits show what the digest of code does not see."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from apportion.core.sampling.rng import seeded_rng
from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.parallel.replica.step import reference
from apportion.runtime.proof.proof_workload import few_rows, moving, short_sequences
from apportion.runtime.proof.value_digest import seal

ROWS = 4
"""The number of rows in the update."""
SEED = 0
"""The seed of the weights, which is not the run's: another seed is another training of the same network."""
STEPS = 1000
"""The number of steps that a schedule is given, whatever the run's."""
LARGE = 1 << 20
"""The bytes from which a tensor is digested by sums of its bits, which takes a quarter of the time."""
COLUMNS = 4096
"""The number of columns into which the bits of a large tensor are laid out."""


def update_digest(workload: Workload, dataset: Any, model: Callable[[], nn.Module]) -> str:
    """Returns the digest of weights, buffers, slots and carried states after one update of one device on the CPU, in
    the run's own precision and from weights of a fixed seed. Sequences are cut short where the model takes that.
    Raises what the update raises."""
    same = moving(
        replace(
            workload,
            model=model,
            data=lambda: dataset,
            parts=None,
            seed=SEED,
            steps=STEPS,
            evaluation=None,
            compile=False,
        )
    )
    few = replace(few_rows(same, ROWS, 1, 1), steps=STEPS)
    short = short_sequences(few)
    try:
        with seeded_rng(SEED):
            short.open_data()
    except ValueError:  # the data are not sequences: a model that is built for them would be built again
        return _digest(few)
    try:
        return _digest(short)
    except Exception:  # a model that takes whole sequences alone
        return _digest(few)


def _digest(workload: Workload) -> str:
    with seeded_rng(SEED):
        return state_digest(next(iter(reference(workload))))


def state_digest(state: State) -> str:
    """Returns the digest of the bits of every tensor of a state, with its name and shape."""
    parts: list[Any] = []
    for name, tensor in sorted(state.tensors(), key=lambda pair: pair[0]):
        parts += [name, f"{tuple(tensor.shape)} {tensor.dtype}", _bits(tensor)]
    return seal("state", *parts).hex()


def _bits(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    raw = plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    made = hashlib.sha1(usedforsecurity=False)
    if raw.numel() >= LARGE:
        whole = raw.numel() // (8 * COLUMNS) * 8 * COLUMNS
        words = raw[:whole].view(torch.int64).view(-1, COLUMNS)
        made.update(words.sum(0).numpy().data)  # whole numbers, which wrap around: the same in any order
        made.update(words.sum(1).numpy().data)
        raw = raw[whole:]
    if raw.numel():
        made.update(raw.numpy().data)
    return made.digest()
