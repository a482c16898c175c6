"""Checks whether the ranks still hold equal what they must hold equal, by digests, so that asking costs few bytes.

A digest of a tensor is a sum over its bytes, taken as whole numbers of 64 bits, each times a weight of its place: one
pass at the speed of the memory. It finds what went wrong by itself; it does not protect against deliberate changes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.comm.group import Group, collective, gather_messages
from apportion.errors import RanksDiffer

_ROW = 256
_ODD = 0x9E3779B97F4A7C15
_WORD = (1 << 63) - 1


@dataclass(frozen=True)
class Replicated:
    """Tensors that are equal on all ranks of a group, to the bit, by names that a person can read. A name that only
    some of them have is compared among those."""

    group: Group
    tensors: Mapping[str, Tensor]


def apart_from(shared: memoryview, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that do not lie in this memory, which the ranks have in common."""
    begin = torch.frombuffer(shared, dtype=torch.uint8).data_ptr()
    return {k: t for k, t in tensors.items() if not begin <= t.untyped_storage().data_ptr() < begin + shared.nbytes}


@collective
def check_replicated(held: Iterable[Replicated], *, rank: int, step: int, device: torch.device) -> None:
    """Raise RanksDiffer, on every rank, where one holds another tensor than the others. Called by all ranks, between
    steps.

    ``rank``: this one's, in the world; ``step``: updates so far, for the message.
    """
    for replicated in held:
        group = replicated.group
        if group.size == 1:
            continue
        digests = {name: tensor_digest(tensor) for name, tensor in replicated.tensors.items()}
        # At first one number for all of them, which is enough where all is well.
        names = zlib.crc32("\n".join(digests).encode())
        total = zlib.crc32(np.array([*digests.values()], dtype=np.int64).tobytes())
        reports = group.all_gather(torch.tensor([names, total], dtype=torch.int64, device=device)).tolist()
        if all(one == reports[0] for one in reports):
            continue
        # All ranks come here or none: each compares the same gathered numbers.
        answers = gather_messages({"rank": rank, "digests": digests}, group, device=device)
        found = difference([(answer["rank"], answer["digests"]) for answer in answers])
        if found is not None:
            raise RanksDiffer(_text(*found, step))


def difference(reports: Sequence[tuple[int, Mapping[str, int]]]) -> tuple[str, int, int, int] | None:
    """Compare the (rank, digests by name) of all ranks: the first tensor that differs, a rank that holds another one
    than most, a rank that holds what most do, and how many tensors differ; None where all are equal."""
    held: dict[str, list[tuple[int, int]]] = {}
    for rank, digests in reports:
        for name, digest in digests.items():
            held.setdefault(name, []).append((rank, digest))
    differ = [name for name, holders in held.items() if len({digest for _, digest in holders}) > 1]
    if not differ:
        return None
    holders = held[differ[0]]
    most = Counter(digest for _, digest in holders).most_common(1)[0][0]  # the first rank's, where there are as many
    other = next(rank for rank, digest in holders if digest != most)
    return differ[0], other, next(rank for rank, digest in holders if digest == most), len(differ)


def _text(name: str, rank: int, most: int, count: int, step: int) -> str:
    more = f", and so are {count - 1} more tensors" if count > 2 else ", and so is 1 more tensor" if count == 2 else ""
    return (
        f"after step {step} {name} on rank {rank} is not what it is on rank {most}{more}: all ranks must hold it "
        "alike, to the bit. Something changes it outside the update, or makes it of what only one rank sees; "
        "`apportion check` compares every step. The checkpoints are of steps before: resume=True goes on from the last"
    )


def tensor_digest(tensor: Tensor) -> int:
    """A number of 63 bits that is the digest of the bytes of a dense tensor, its dtype and its shape."""
    head = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    plain = tensor.detach()
    if plain.layout != torch.strided or plain.is_meta or not plain.numel():
        return head
    flat = plain.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return (_sum(flat.numpy()) if flat.device.type == "cpu" else _sum_there(flat)) * 31 + head & _WORD


def _sum(data: np.ndarray[Any, Any]) -> int:
    words = data[: len(data) // 8 * 8].view(np.int64)
    rows = words[: len(words) // _ROW * _ROW].reshape(-1, _ROW)
    # int64 arithmetic wraps round, on the CPU and on a GPU alike, and is exact modulo 2**64: the order of the additions
    # does not matter, other than for floats.
    sums = np.dot(rows, _weights(_ROW))
    tail = np.dot(words[rows.size :], _weights(_ROW)[: len(words) - rows.size])
    rest = int.from_bytes(data[len(words) * 8 :].tobytes(), "little")
    return int(np.dot(sums, _weights(len(sums)))) + 3 * int(tail) + 5 * rest


def _sum_there(data: Tensor) -> int:
    """The weighted sum over the bytes of a tensor that is on another device than the CPU."""
    padded = torch.nn.functional.pad(data, (0, -data.numel() % (8 * _ROW)))
    rows = padded.view(torch.int64).view(-1, _ROW)
    inner, outer = (torch.from_numpy(_weights(n)).to(data.device) for n in (_ROW, len(rows)))
    return int(((rows * inner).sum(1) * outer).sum())


def _weights(count: int) -> np.ndarray[Any, Any]:
    return _powers(1 << max(0, count - 1).bit_length())[:count]


@cache
def _powers(count: int) -> np.ndarray[Any, Any]:
    """The given number of odd numbers, all of them different."""
    # Odd weights are invertible modulo 2**64: a change of a single word always changes the sum.
    return ((np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_ODD)) | np.uint64(1)).view(np.int64)
