"""The files of cached proofs: a folder for each digest of code, with a file for each proof that was made of it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.core.json_data import cache_folder, keep
from apportion.runtime.cached_proof.basis import Basis


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
