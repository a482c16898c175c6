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

from apportion.runtime.cached_proof.data_rows import Rows, rows_digests
from apportion.runtime.cached_proof.read_recorder import OWN_VARIABLES, Reads, is_of_launcher
from apportion.runtime.proof.value_digest import seal

CONTENT_BYTES = 32 << 20
"""The bytes of files that are digested whole, the smallest first; of a larger one count size, time and pieces."""
MOST_FILES = 20_000
"""The number of files that are compared at most."""
MOST_NAMED = 500
"""The number of rows, files and variables that a proof keeps a digest of its own of, to name those that change."""
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

    def found(self, dataset: Any, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the digests of what is found under the names now, by what a person calls it: ``the file a.json``,
        ``the variable SCALE``, ``row 7 of the data``. Raises what reading a row raises. ``environment``: the variables
        as they were when the process started."""
        rows = rows_digests(dataset, None if self.rows is None else list(self.rows))
        parts = (*rows.items(), *self._files(), *self._folders(), *self._variables(environment))
        return _few({name: digest.hex() for name, digest in parts})

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
            found = os.fstat(file.fileno())
            parts: list[Any] = [found.st_size, found.st_mtime_ns]
            for piece in range(PIECES):
                file.seek(piece * max(0, found.st_size - PIECE) // max(1, PIECES - 1))
                parts.append(file.read(PIECE))
            return seal("pieces", *parts)
    except OSError as error:  # a file that is not there is not there for the run either
        return seal("no file", type(error).__name__)


def _few(parts: dict[str, str]) -> dict[str, str]:
    """Returns the parts, of which those beyond MOST_NAMED have one digest between them."""
    if len(parts) <= MOST_NAMED:
        return parts
    every = list(parts.items())
    rest = seal("others", *(text for pair in every[MOST_NAMED:] for text in pair)).hex()
    return {**dict(every[:MOST_NAMED]), f"{len(every) - MOST_NAMED:,} further files and variables": rest}


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
