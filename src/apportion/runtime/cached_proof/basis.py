"""The basis of a proof beside its code: rows of the data, files, folders and environment variables, by name and
content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from apportion.runtime.cached_proof.data_rows import Rows, rows_digest
from apportion.runtime.cached_proof.read_recorder import LAUNCHED, OWN_VARIABLES, Reads
from apportion.runtime.proof.value_digest import seal

CONTENT_BYTES = 32 << 20
"""The bytes of files that are digested whole, the smallest first; of a larger one count size, time and pieces."""
MOST_FILES = 20_000
"""The number of files that are compared at most."""
PIECES, PIECE = 32, 64 << 10
"""The number of pieces of a large file, spread evenly over it, and the bytes of each."""


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
    def of(cls, reads: Reads, rows: Rows, of_rows: int) -> Self:
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
        return dict(vars(self))

    def digest(self, dataset: Any, environment: Mapping[str, str]) -> bytes:
        """Returns the digest of what is found under the names now. Raises what reading a row raises. ``environment``:
        the variables as they were when the process started."""
        found = rows_digest(dataset, None if self.rows is None else list(self.rows))
        return seal("basis", found, *self._files(), *self._folders(), *self._variables(environment))

    def changed_since(self, at: float) -> str | None:
        """Returns a file that has been written since this time, in seconds since the epoch; None where none has."""
        for path in (*self.files, *self.large_files):
            with suppress(OSError):
                if Path(path).stat().st_ctime > at:
                    return path
        return None

    @property
    def sentence(self) -> str:
        """The sample of rows in words; empty where all rows are compared."""
        return "" if self.rows is None else f"{len(self.rows):,} of {self.of_rows:,} rows were compared"

    def _files(self) -> Iterator[Any]:
        if self.files or self.large_files or self.folders:
            yield os.getcwd()  # what code makes of it may be the path of a file
        for path in self.files:
            yield from (path, file_digest(path, whole=True))
        for path in self.large_files:
            yield from (path, file_digest(path, whole=False))

    def _folders(self) -> Iterator[Any]:
        for path in self.folders:
            try:
                names = sorted(os.listdir(path))
            except OSError as error:
                names = [type(error).__name__]
            yield seal("folder", path, *names)

    def _variables(self, environment: Mapping[str, str]) -> Iterator[Any]:
        names = set(self.variables)
        if self.all_variables:
            names |= environment.keys() - LAUNCHED - OWN_VARIABLES
        for name in sorted(names):
            yield from (name, "unset") if name not in environment else (name, "set", environment[name])


def file_digest(path: str, *, whole: bool) -> bytes:
    """Returns the digest of a file: of all that it holds, or of its size, its time and some pieces of it."""
    try:
        with open(path, "rb") as file:
            if whole:
                return hashlib.file_digest(file, "sha1").digest()  # twice as fast as the others
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
    sizes = sorted((_size(path), path) for path in files)[:MOST_FILES]
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
