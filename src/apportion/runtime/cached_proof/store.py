"""The files of cached proofs: a folder for each digest of code, with a file for each proof that was made of it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.data import Dataset, TensorDataset

from apportion.core.data.acted import ActedDataset
from apportion.core.json_data import cache_folder, keep
from apportion.core.parts import PartedDataset
from apportion.core.rng import seeded_rng
from apportion.process import seconds_with_core
from apportion.runtime.cached_proof.read_recorder import OWN_VARIABLES, Reads, is_of_launcher
from apportion.runtime.proof.value_digest import Digester, seal


@dataclass(frozen=True, kw_only=True)
class CachedProof:
    """A proof as it is kept."""

    name: str
    """The name of its file, without the ending."""
    path: Path
    key: str
    """The key of what it holds for."""
    basis: Basis
    parts: Mapping[str, str]
    """The digests of what it was made on, by what a person calls each: files, variables, rows, one update."""
    code_parts: Mapping[str, str]
    """The digests of the parts of the code, in the same way."""
    how: Mapping[str, Any]
    """The numbers of ranks and threads, the device, and what else decides how the workload is trained."""
    workload: str
    strategy: str
    workers: int
    verdict: str
    made: str
    """When it was made, local time: ``2026-11-27 23:41:05``."""
    settled: Mapping[str, Any]
    """The answer, as plain JSON."""

    @property
    def bytes(self) -> int:
        """The size of its file."""
        return self.path.stat().st_size


def now() -> str:
    """Returns the time that a proof which is made now is recorded with."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def keep_proof(code: str, name: str, about: Mapping[str, Any], basis: Basis, settled: Mapping[str, Any]) -> None:
    """Keeps a proof for the next run; where nothing can be written, the next run makes its own. ``about``: the fields
    of a ``CachedProof`` beside these."""
    try:
        keep(_folder() / code / f"{name}.json", {**about, "basis": basis.to_json(), "settled": settled})
    except RuntimeError:  # the user has no home folder
        pass


def proofs_of(code: str) -> list[CachedProof]:
    """Returns the proofs of this code, the newest first."""
    return sorted(_read(_folder() / code), key=lambda proof: proof.made, reverse=True)


def cached_proofs() -> list[CachedProof]:
    """Returns all cached proofs, the newest first."""
    folder = _folder()
    codes = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted((proof for code in codes for proof in _read(code)), key=lambda proof: proof.made, reverse=True)


def latest_proof(code: str, workload: str, strategy: str, workers: int) -> CachedProof | None:
    """Returns the newest proof of a workload of this name under this strategy, one of the same code where there is one;
    None where there is none at all."""
    wanted = workload, strategy, workers
    for proofs in (proofs_of, lambda _: cached_proofs()):
        for proof in proofs(code):
            if (proof.workload, proof.strategy, proof.workers) == wanted:
                return proof
    return None


def remove(proof: CachedProof) -> None:
    """Removes a cached proof, and its folder where it was the last in it."""
    proof.path.unlink(missing_ok=True)
    with suppress(OSError):
        proof.path.parent.rmdir()


def remove_all() -> int:
    """Removes every cached proof, those of earlier versions too; returns how many there were."""
    count = len(cached_proofs())
    shutil.rmtree(_folder(), ignore_errors=True)
    return count


def _read(folder: Path) -> Iterator[CachedProof]:
    """Yields the proofs in a folder; a file of another version, or a damaged one, counts as absent."""
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            stored = json.loads(path.read_text())
            about = {name: stored[name] for name in _ABOUT}
            basis = Basis.from_json(stored["basis"])
            yield CachedProof(name=path.stem, path=path, basis=basis, settled=stored["settled"], **about)


_ABOUT = ("key", "parts", "code_parts", "how", "workload", "strategy", "workers", "verdict", "made")


def _folder() -> Path:
    return cache_folder("proofs")


# The basis of a cached proof beside its code: rows of the data, files, folders and environment variables, by name and
# by digest.
#
# All rows count where digesting them takes little time; else a sample, chosen by the code's key and the number of
# rows. The basis names the rows, so that a later run reads the same ones.


CONTENT_BYTES = 32 << 20
"""The bytes of files that are digested whole, the smallest first; of a larger one count size, time and pieces."""
PIECES, PIECE = 32, 64 << 10
"""The number of pieces of a large file, spread evenly over it, and the bytes of each."""
ROWS_SECONDS = 0.1
"""The seconds up to which every row is digested; a sample may take half of them."""
LEAST, MOST = 4, 4096
"""The numbers of rows in a sample."""
LOOK = 8
"""The number of rows between two looks at the clock."""
BLOCKS = 64
"""The number of digests that the rows have between them at most."""
HEAD = 4 << 20
"""The bytes of tensors that are digested to see how long all of them take."""
_SEED = 0x0D16
"""The seed of what rows draw while they are digested."""

Rows = list[int] | None
"""The numbers of the rows in a sample; None: all of them."""


@dataclass(frozen=True, kw_only=True)
class Basis:
    """The names of what a proof was made on: a run that finds the same under all of them may reuse the proof."""

    rows: tuple[int, ...] | None
    """The numbers of the rows that are compared; None: all."""
    of_rows: int
    """The number of rows of the data set."""
    files: tuple[str, ...]
    """The paths of the files that were read, and are compared whole."""
    large_files: tuple[str, ...]
    """The paths of those that are compared by size, time and pieces."""
    folders: tuple[str, ...]
    """The paths of the folders that were listed."""
    variables: tuple[str, ...]
    """The names of the environment variables that were asked for."""
    all_variables: bool = False
    """True where the whole environment is compared."""

    @classmethod
    def from_reads(cls, reads: Reads, rows: Rows, of_rows: int) -> Self:
        """Makes the basis of what was read, and of these rows."""
        whole, large = _by_size(reads.files)
        return cls(
            rows=None if rows is None else tuple(rows),
            of_rows=of_rows,
            files=whole,
            large_files=large,
            folders=tuple(sorted(reads.folders)),
            variables=tuple(sorted(reads.variables)),
            all_variables=reads.all_variables,
        )

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Makes the value that ``to_json`` has described. Raises TypeError where it is not one."""
        tuples = {name: tuple(stored[name]) for name in ("files", "large_files", "folders", "variables")}
        return cls(**{**stored, **tuples, "rows": None if stored["rows"] is None else tuple(stored["rows"])})

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, from which ``from_json`` makes the same value."""
        return asdict(self)

    def digests_now(self, dataset: Any, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the digests of what the names stand for now, by what a person calls it: ``the file a.json``,
        ``the variable SCALE``, ``row 7 of the data``. Raises what reading a row raises. ``environment``: the variables
        as they were when the process started."""
        rows = rows_digests(dataset, None if self.rows is None else list(self.rows))
        parts = (*rows.items(), *self._files(), *self._folders(), *self._variables(environment))
        return {name: digest.hex() for name, digest in parts}

    def changed_since(self, at: float) -> str | None:
        """Returns a file that has been written since this time, in seconds since the epoch; None where none has."""
        for path in (*self.files, *self.large_files):
            with suppress(OSError):
                # The time of the inode counts: that of the contents can be set to any value, as tar and rsync do.
                if Path(path).stat().st_ctime > at:
                    return path
        return None

    @property
    def sentence(self) -> str:
        """The sample of rows in words; empty where all rows are compared."""
        return "" if self.rows is None else f"{len(self.rows):,} of {self.of_rows:,} rows were compared"

    def _files(self) -> Iterator[tuple[str, bytes]]:
        if self.files or self.large_files or self.folders:  # what code makes of it may be the path of a file
            yield "the working directory", seal("folder", os.getcwd())
        for path in self.files:
            yield f"the file {path}", file_digest(path, whole=True)
        for path in self.large_files:
            yield f"the file {path}", file_digest(path, whole=False)

    def _folders(self) -> Iterator[tuple[str, bytes]]:
        for path in self.folders:
            try:
                names = sorted(os.listdir(path))
            except OSError as error:
                names = [type(error).__name__]
            yield f"the names in the folder {path}", seal("folder", *names)

    def _variables(self, environment: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
        names = set(self.variables)
        if self.all_variables:
            # Variables that a launcher or a terminal sets anew for each run would make every proof stale; code that
            # asks for one of them by name has it in ``variables``.
            names |= {name for name in environment.keys() - OWN_VARIABLES if not is_of_launcher(name)}
        for name in sorted(names):
            value = ("unset",) if name not in environment else ("set", environment[name])
            yield f"the variable {name}", seal("variable", *value)


def file_digest(path: str, *, whole: bool) -> bytes:
    """Returns the digest of a file: of all that it holds, or of its size, its time and some pieces of it."""
    try:
        with open(path, "rb") as file:
            if whole:
                return hashlib.file_digest(file, "sha1").digest()  # twice as fast as the others
            # The descriptor is asked, not the path: size, time and pieces are then of one file, though another is
            # renamed over it.
            found = os.fstat(file.fileno())
            parts: list[Any] = [found.st_size, found.st_mtime_ns]
            for piece in range(PIECES):
                file.seek(piece * max(0, found.st_size - PIECE) // max(1, PIECES - 1))
                parts.append(file.read(PIECE))
            return seal("pieces", *parts)
    except OSError as error:  # a file that is not there is not there for the run either
        return seal("no file", type(error).__name__)


def _by_size(files: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the files that are compared whole, and those that are compared by pieces."""
    sizes = sorted((_size(path), path) for path in files)
    whole, large, total = list[str](), list[str](), 0
    for size, path in sizes:
        total += size
        (whole if total <= CONTENT_BYTES else large).append(path)
    return tuple(whole), tuple(large)


def _size(path: str) -> int:
    try:
        found = Path(path).stat()
    except OSError:
        return 0
    return found.st_size


# The rows of the data


def choose_rows(dataset: Any, key: str) -> Rows:
    """Returns the rows to digest: all, where that takes at most ROWS_SECONDS; else a sample that is a function of the
    key and the number of rows. The first and the last row are always in it. Raises UnhashableError where a row has no
    digest."""
    count = length(dataset)
    affordable = _rows_in_time(dataset, count)
    return None if affordable >= count else sample(key, count, max(LEAST, min(MOST, affordable // 2)))


def sample(key: str, count: int, wanted: int) -> list[int]:
    """Returns ``wanted`` of the numbers below ``count``, in order; the first and the last are among them."""
    ends = {0, count - 1}
    drawn = random.Random(f"{key} {count}").sample(range(count), min(count, wanted))
    return sorted(ends | set(drawn[: max(0, wanted - len(ends))]))


def rows_digests(dataset: Any, rows: Rows) -> dict[str, bytes]:
    """Returns the digests of these rows, of some at a time, by names that a person can read: ``rows 0 to 15 of the
    data``; and of the number of all rows, with the class of the data set. A row that is no longer there has no digest.
    Raises UnhashableError where a row has none."""
    count = length(dataset)
    parts = dataset.lengths if isinstance(dataset, OpenedParts) else ()
    found = {"the number of rows": seal("rows", type(dataset).__qualname__, count, *parts)}
    chosen = range(count) if rows is None else [row for row in rows if row < count]
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
    # Rows that are augmented at random would otherwise have another digest each time.
    with seeded_rng(_SEED):
        for row in rows:
            yield of(f"row {row} of the data", dataset[row])


def _rows_in_time(dataset: Any, count: int) -> int:
    """Returns how many rows can be digested in ROWS_SECONDS, up to ``count``."""
    # The time is that in which this process had a core: a busy machine must not make the sample smaller.
    began = seconds_with_core()
    if type(dataset) is TensorDataset:
        nbytes = sum(t.nbytes for t in dataset.tensors)
        if nbytes <= HEAD:
            return count
        head = range(max(1, HEAD * count // nbytes))
        _digest_together(dataset, head)
        return min(count, int(len(head) * ROWS_SECONDS / max(seconds_with_core() - began, 1e-9)))
    for number, _ in enumerate(_digests(dataset, range(count)), start=1):
        if number % LOOK == 0 and seconds_with_core() - began > ROWS_SECONDS:
            return number
    return count
