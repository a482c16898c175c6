"""Rows of all parts that are sent to one rank, for what a single process has to compute: the reference of a proof.

Examples are sent as nests of tuples, lists and dicts of tensors, arrays, numbers and text. Nothing is pickled, so that
reading what another rank has sent runs no code.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from apportion.comm.group import broadcast_message, bytes_of, collective, gather_messages
from apportion.comm.world import World
from apportion.core.parts import PartedDataset
from apportion.core.sampler import DataShard
from apportion.errors import ApportionError

_HEAD = struct.Struct("<Q")
_PLAIN = (bool, int, float, str, type(None))


def encode(examples: Sequence[Any]) -> bytearray:
    """The examples as bytes. Raises ValueError where one holds something else, such as an image of a library."""
    tensors: list[Tensor] = []
    nests = [_taken_apart(example, tensors) for example in examples]
    kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    head = json.dumps({"nests": nests, "tensors": kinds}).encode()
    found = bytearray(_HEAD.pack(len(head)) + head)
    for tensor in tensors:
        if tensor.numel():
            found += bytes_of(tensor).numpy().tobytes()
    return found


def decode(data: bytearray) -> list[Any]:
    """The examples that ``encode`` made the bytes of."""
    (length,) = _HEAD.unpack_from(data)
    at = _HEAD.size + length
    head = json.loads(data[_HEAD.size : at])
    tensors = []
    for name, shape in head["tensors"]:
        tensor, at = _tensor(data, at, getattr(torch, name), shape)
        tensors.append(tensor)
    return [_put_together(nest, tensors) for nest in head["nests"]]


def _tensor(data: bytearray, at: int, dtype: torch.dtype, shape: Sequence[int]) -> tuple[Tensor, int]:
    """The tensor whose bytes begin at a place, and the place where they end."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty([*shape], dtype=dtype), at
    if not 0 < nbytes <= len(data) - at:  # before anything is allocated
        raise ValueError(f"a tensor of {nbytes:,} bytes is said to be in the {len(data) - at:,} bytes that are left")
    flat = torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=at).clone()
    return flat.view(dtype).view([*shape]), at + nbytes


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """A value as plain JSON, its tensors by their numbers."""
    kind = type(value)
    if kind is Tensor and value.layout is torch.strided:
        tensors.append(value.detach().cpu().resolve_conj().resolve_neg().contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        tensors.append(torch.from_numpy(np.array(value, order="C")))
        return {"number" if isinstance(value, np.generic) else "array": len(tensors) - 1}
    if kind in (tuple, list):
        return {kind.__name__: [_taken_apart(item, tensors) for item in value]}
    if kind is dict:
        return {"dict": [[_taken_apart(k, tensors), _taken_apart(v, tensors)] for k, v in value.items()]}
    if kind in _PLAIN:
        return {"plain": value}
    raise ValueError(
        f"an example holds a {kind.__module__}.{kind.__qualname__}, and between hosts go tensors, numpy arrays, "
        "numbers and text alone, in tuples, lists and dicts: let the data set make tensors of it"
    )


def _put_together(nest: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    ((kind, value),) = nest.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].numpy()
    if kind == "number":
        return tensors[value].numpy()[()]
    if kind == "plain":
        return value
    if kind == "dict":
        return {_put_together(k, tensors): _put_together(v, tensors) for k, v in value}
    items = [_put_together(item, tensors) for item in value]
    return tuple(items) if kind == "tuple" else items


MOST_BYTES = 256 << 20
"""The most bytes of rows that one rank sends."""


class RowsNotSentError(ApportionError):
    """Rows cannot be sent to another rank: they cannot be read, or hold what does not travel."""


@final
class SentPart(Dataset[Any]):
    """One part, of which some rows were sent here: as long as the part, so that a row has the number that it has
    there."""

    def __init__(self, part: int, length: int, rows: Mapping[int, Any]) -> None:
        self._part, self._length, self._rows = part, length, dict(rows)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        if index not in self._rows:
            raise ApportionError(
                f"row {index} of part {self._part} was not sent to this host: of its {self._length} rows "
                f"{len(self._rows)} were"
            )
        return self._rows[index]


@final
@dataclass(frozen=True)
class SentRows:
    """The parts of which rows were sent, as ``Workload.data``."""

    parts: tuple[SentPart, ...]
    rows: int
    """The number of rows that were sent in all."""

    def __call__(self, part: int) -> SentPart:
        return self.parts[part]


@collective
def send_rows(
    dataset: PartedDataset, wanted: Sequence[Collection[int]], shards: Sequence[DataShard], world: World
) -> SentRows | None:
    """Send the wanted rows of each part to rank 0; returns them there, and None on the other ranks. ``shards``: the
    share of every rank, of which the first that has a part sends its rows. Called by all ranks. Raises
    RowsNotSentError, on all of them, where rows cannot be sent."""
    senders = _senders(shards, dataset.parts)
    own = [part for part, sender in enumerate(senders) if sender == world.rank]
    data, failed = bytearray(), None
    try:
        data = encode([dataset.open(part)[at] for part in own for at in wanted[part]]) if own else data
        if len(data) > MOST_BYTES:
            raise ValueError(f"{len(data):,} bytes of rows are more than the {MOST_BYTES:,} that a rank sends")
    except Exception as error:  # whatever the data set raises, all ranks have to know
        failed = f"{dataset.where}: {error}"
    messages = gather_messages([len(data), failed], world.group(), device=world.device)
    if reasons := [reason for _, reason in messages if reason is not None]:
        raise RowsNotSentError(f"the rows of all parts cannot be sent to rank 0: {reasons[0]}")
    if world.rank != 0:
        if data:
            world.group().send(torch.frombuffer(data, dtype=torch.uint8).to(world.device), 0).wait()
        return None
    found: dict[int, SentPart] = {}
    for rank, (nbytes, _) in enumerate(messages):
        examples = iter(decode(data if rank == 0 else _received(world, rank, nbytes)) if nbytes else ())
        for part in (part for part, sender in enumerate(senders) if sender == rank):
            found[part] = SentPart(part, dataset.lengths[part], {at: next(examples) for at in wanted[part]})
    return SentRows(tuple(found[part] for part in range(dataset.parts)), sum(map(len, wanted)))


@collective
def broadcast_rows(dataset: PartedDataset, rows: int, world: World) -> list[Any] | None:
    """Send the first rows of the first part to all ranks, spread evenly over it; None, on all of them, where they
    cannot be sent. Called by all ranks."""
    data = None
    if world.rank == 0:
        try:
            length = dataset.lengths[0]
            data = encode([dataset.open(0)[i * length // rows] for i in range(min(rows, length))])
        except Exception:  # the run will tell why
            data = None
    nbytes = broadcast_message(None if data is None else len(data), world.group(), device=world.device)
    if nbytes is None or not 0 <= nbytes <= MOST_BYTES:
        return None
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
    if data is not None:
        buffer.copy_(torch.frombuffer(data, dtype=torch.uint8))
    world.group().broadcast(buffer)
    return decode(bytearray(buffer.cpu().numpy().tobytes()))


def _received(world: World, rank: int, nbytes: int) -> bytearray:
    if not 0 <= nbytes <= MOST_BYTES:
        raise ApportionError(
            f"rank {rank} says that it sends {nbytes:,} bytes of rows: at most {MOST_BYTES:,} are taken"
        )
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=world.device)
    world.group().receive(buffer, rank).wait()
    return bytearray(buffer.cpu().numpy().tobytes())


def _senders(shards: Sequence[DataShard], parts: int) -> list[int]:
    """The first rank that has each part."""
    first: dict[int, int] = {}
    for rank, shard in enumerate(shards):
        for part in range(*(shard.parts or (0, 0))):
            first.setdefault(part, rank)
    return [first[part] for part in range(parts)]
