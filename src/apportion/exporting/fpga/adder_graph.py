"""Products with a constant matrix as few additions of shifted numbers: alkaid's solver of the multiplication of a
vector by a constant matrix, which shares what several outputs have in common (Sun et al., 2025, arXiv:2507.04535).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.errors import ProgramMissing
from apportion.exporting.fpga.netlist import Term


def products(matrix: NDArray[np.int64], terms: Sequence[Term]) -> list[Term]:
    """Return matrix @ terms: the terms of its rows, with the operations that they need added to the netlist."""
    netlist = terms[0].netlist
    moving = np.array([term.op is not None for term in terms])
    used = np.flatnonzero(matrix.any(axis=0) & moving)
    added = (matrix @ np.array([term.constant for term in terms], dtype=np.int64)).tolist()
    if not used.size:
        return [Term(netlist, None, constant=c) for c in added]
    ranges = [replace(terms[n], constant=0).range for n in used.tolist()]
    first, second = _solver()(
        np.ascontiguousarray(matrix[:, used].T, dtype=np.float32),
        qintervals=[(float(x.low), float(x.high), 1.0) for x in ranges],
        latencies=[0.0] * len(used),
    )
    given = np.empty(len(used), dtype=object)
    given[:] = [replace(terms[n], constant=0) for n in used.tolist()]
    found = second(first(given, quantize=False), quantize=False)
    made = [x if isinstance(x, Term) else Term(netlist, None) for x in found]
    return [x + c for x, c in zip(made, added, strict=True)]


def version() -> str:
    """Return the version of alkaid."""
    _solver()
    found: str = importlib.metadata.version("alkaid")
    return found


def _solver() -> Any:
    try:
        from alkaid.cmvm import cmvm_solve
    except ImportError:
        raise ProgramMissing(
            "the target verilog needs the package alkaid, which is not installed: pip install 'apportion[fpga]'"
        ) from None
    return cmvm_solve
