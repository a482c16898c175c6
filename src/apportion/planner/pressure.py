"""How much of the time something on this machine has to wait for a core, as Linux counts it (Documentation/accounting/
psi.rst of its sources). It is not the load: that of the last minute knows little of the last seconds."""

from __future__ import annotations

import re
from pathlib import Path

CPU = Path("/proc/pressure/cpu")


def cores_wanted(path: Path = CPU) -> float | None:
    """The share of the last ten seconds in which something that could have run waited for a core; None: not told."""
    try:
        found = re.search(r"^some avg10=([\d.]+)", path.read_text(), re.MULTILINE)
    except OSError:  # an older kernel, or another one
        return None
    return None if found is None else float(found[1]) / 100
