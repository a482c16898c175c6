"""The rows of a data set that a cached proof is compared by, and their digests.

All rows count where digesting them takes little time; else as many as do, chosen by the code's key and the number of
rows. Which ones these are is kept with the proof, so that a later run reads the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from apportion.core.data.acted import ActedDataset
from apportion.core.parts import PartedDataset
from apportion.core.rng import seeded_rng
from apportion.process import seconds_with_core
from apportion.runtime.proof.value_digest import Digester, UnhashableError, seal

ROWS_SECONDS = 0.1
"""The seconds up to which every row is digested."""
SAMPLE_SECONDS = 0.05
"""The seconds that the digests of a sample may take."""
LEAST, MOST = 4, 4096
"""The numbers of rows in a sample."""
LOOK = 8
"""The number of rows between two looks at the clock."""
TRIED = 16
"""The number of rows that are read to see how long one takes."""
BLOCKS = 64
"""The number of digests that the rows have between them at most."""
PIECE = 4 << 20
"""The bytes of tensors that are digested to see how long all of them take."""
_SEED = 0x0D16
"""The seed of what rows draw as they are read here."""

Rows = list[int] | None
"""The numbers of the rows in a sample; None: all of them."""


def choose_rows(dataset: Any, key: str) -> Rows:
    """Returns the rows to digest: all, where that takes at most ROWS_SECONDS here; else a sample that is a function of
    the key and the number of rows. The first and the last row are always in it."""
    many = length(dataset)
    if many == 0 or _all_in_time(dataset):
        return None
    return sample(key, many, _affordable(dataset))


def sample(key: str, many: int, wanted: int) -> list[int]:
    """Returns ``wanted`` of the numbers below ``many``, in order; the first and the last are among them."""
    ends = {0, many - 1}
    drawn = random.Random(f"{key} {many}").sample(range(many), min(many, wanted))
    return sorted(ends | set(drawn[: max(0, wanted - len(ends))]))


def rows_digests(dataset: Any, rows: Rows) -> dict[str, bytes]:
    """Returns the digests of these rows, of some at a time, by names that a person can read: ``rows 0 to 15 of the
    data``; and of the number of all rows, with the class of the data set. Rows that there are no more have no digest.
    Raises UnhashableError where a row has none."""
    many = length(dataset)
    parts = dataset.lengths if isinstance(dataset, OpenedParts) else ()
    found = {"the number of rows": seal("rows", type(dataset).__qualname__, many, *parts)}
    chosen = range(many) if rows is None else [row for row in rows if row < many]
    each = -(-len(chosen) // BLOCKS) or 1
    digests = None if type(dataset) is TensorDataset else _digests(dataset, chosen)
    for first in range(0, len(chosen), each):
        block = chosen[first : first + each]
        if digests is None:
            digest = _digest_together(dataset, block)
        else:
            digest = seal("rows", *(one for _, one in zip(block, digests, strict=False)))
        found[_block_name(block, sampled=rows is not None)] = digest
    return found


def _digest_together(dataset: TensorDataset, block: Sequence[int]) -> bytes:
    index = slice(block.start, block.stop) if isinstance(block, range) else torch.tensor(block)
    of = Digester()
    return seal("rows", *(of(f"tensor {i} of the data", tensor[index]) for i, tensor in enumerate(dataset.tensors)))


def _block_name(block: Sequence[int], *, sampled: bool) -> str:
    if len(block) == 1:
        return f"row {block[0]} of the data"
    return f"rows {block[0]} to {block[-1]} of the data" + (f", of which {len(block)} are compared" if sampled else "")


def length(dataset: Any) -> int:
    """Returns the number of rows; 0 for a data set whose rows the network makes, which are not compared."""
    return 0 if isinstance(dataset, ActedDataset) else len(dataset)


class OpenedParts(Dataset[Any]):
    """The rows of the parts of a data set that this process has opened, one part after the other."""

    def __init__(self, dataset: PartedDataset) -> None:
        self._data: list[Any] = [dataset.open(part) for part in dataset.opened]
        self.lengths = dataset.lengths
        """The numbers of rows of all parts."""

    def __len__(self) -> int:
        return sum(len(data) for data in self._data)

    def __getitem__(self, index: int) -> Any:
        for data in self._data:
            if index < len(data):
                return data[index]
            index -= len(data)
        raise IndexError(index)


def _digests(dataset: Any, rows: Iterable[int]) -> Iterator[bytes]:
    """Yields the digest of each row; what rows draw follows one seed, in this order."""
    of = Digester()
    with seeded_rng(_SEED):
        for row in rows:
            yield of(f"row {row} of the data", dataset[row])


def _all_in_time(dataset: Any) -> bool:
    began = seconds_with_core()
    if type(dataset) is TensorDataset:
        first = [_head(t) for t in dataset.tensors]
        of, nbytes = Digester(), sum(t.nbytes for t in dataset.tensors)
        for tensor in first:
            of("the data", tensor)
        share = sum(t.nbytes for t in first) / max(1, nbytes)
        return seconds_with_core() - began <= ROWS_SECONDS * share or nbytes <= PIECE
    try:
        for number, _ in enumerate(_digests(dataset, range(length(dataset)))):
            if number % LOOK == 0 and seconds_with_core() - began > ROWS_SECONDS:
                return False
    except UnhashableError:
        return False
    return True


def _head(tensor: Tensor) -> Tensor:
    rows = max(1, PIECE * len(tensor) // max(1, tensor.nbytes))
    return tensor[:rows].clone()


def _affordable(dataset: Any) -> int:
    """Returns how many rows can be digested in SAMPLE_SECONDS, from the time that some of them take."""
    many = length(dataset)
    tried = sorted({i * (many - 1) // TRIED for i in range(TRIED)})
    began, done = seconds_with_core(), 0
    if type(dataset) is TensorDataset:
        rows_digests(dataset, tried)
        done = len(tried)
    else:
        for done, _ in enumerate(_digests(dataset, tried), start=1):  # noqa: B007 (counted)
            if seconds_with_core() - began > SAMPLE_SECONDS:
                break
    each = (seconds_with_core() - began) / done
    return max(LEAST, min(MOST, int(SAMPLE_SECONDS / max(each, 1e-9))))
