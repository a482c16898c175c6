"""env: the ranks are running already, and this process is one of them (torchrun, Slurm, an MPI launcher)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from apportion.core.value import Value


@final
@dataclass(frozen=True, repr=False)
class Env(Value):
    """Every rank runs the same script; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT say which it is."""

    device: str | None = None
    """The device type, "cpu" or "cuda"; None: the GPUs where there are any."""
    loaders: int = 0
    """The number of data-loading processes of each worker."""

    insecure: bool = False
    """True: ranks on several hosts need no secret in APPORTION_SECRET_FILE, and whoever reaches a port may take one's
    place."""

    launched = True
    """True: the ranks are running already."""
