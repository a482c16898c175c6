"""One process that imports a workload's packages for all the processes of its proof, which are forked from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from apportion.errors import ApportionError
from apportion.runtime.launch.local import Local
from apportion.runtime.spawn.imports import Imports
from apportion.runtime.spawn.template import Spare

FEWEST = 100
"""The number of modules below which each process imports them by itself: that takes less time than to wait for one."""


@contextmanager
def shared_imports(imports: Imports, seconds: float) -> Iterator[Spare | None]:
    """Starts the process and ends it. None where there is little to import, where that takes more than ``seconds``, or
    where the process is not fit to be forked: it has threads or open files, or packages that may depend on a variable
    which the user's code has changed."""
    if len(imports.modules) < FEWEST:
        yield None
        return
    try:
        spare = Local(workers=1, device="cpu").importer(imports)
    except (ApportionError, OSError):  # the processes of the proof report why
        yield None
        return
    try:
        yield spare if spare.wait_ready(seconds) else None
    finally:
        spare.close()
