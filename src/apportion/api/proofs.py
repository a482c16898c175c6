"""The proofs that earlier runs have made and later ones reuse: listed, and removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apportion.runtime.cached_proof import store

ALL = "all"
"""The name that stands for every cached proof."""
LEAST_LETTERS = 4
"""The number of letters at the beginning of a name that are enough to give it, where no other begins so."""


def list_proofs() -> list[dict[str, Any]]:
    """Returns each cached proof as plain JSON, the newest first: ``name``, ``workload``, ``strategy``, ``workers``,
    ``verdict``, ``made``, ``bytes``, ``rows`` (the number of those that are compared; None: all), ``of_rows``, and the
    names of the ``files``, ``folders`` and ``variables``."""
    return [
        {
            "name": proof.name,
            "workload": proof.workload,
            "strategy": proof.strategy,
            "workers": proof.workers,
            "verdict": proof.verdict,
            "made": proof.made,
            "bytes": proof.bytes,
            "rows": None if proof.basis.rows is None else len(proof.basis.rows),
            "of_rows": proof.basis.of_rows,
            "files": [*proof.basis.files, *proof.basis.large_files],
            "folders": list(proof.basis.folders),
            "variables": list(proof.basis.variables),
        }
        for proof in store.cached_proofs()
    ]


def remove_proofs(names: Sequence[str]) -> int:
    """Removes the cached proofs of these names, or of what these names begin with; ``all`` removes every one. Returns
    how many were removed. Raises ValueError where a name is of none or of several."""
    if ALL in names:
        return store.remove_all()
    proofs = store.cached_proofs()
    chosen = {proof.name: proof for name in names for proof in [_one(name, proofs)]}
    for proof in chosen.values():
        store.remove(proof)
    return len(chosen)


def _one(name: str, proofs: Sequence[store.CachedProof]) -> store.CachedProof:
    found = [proof for proof in proofs if len(name) >= LEAST_LETTERS and proof.name.startswith(name)]
    if len(found) != 1:
        which = "no cached proof has this name" if not found else f"{len(found)} cached proofs begin so"
        raise ValueError(f"{name!r}: {which}; `apportion proofs` lists them, and 'all' removes every one")
    return found[0]
