"""env: the ranks are running already, and this process is one of them (torchrun, Slurm, an MPI launcher)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self, final

from apportion.core.launcher import Carried, Launcher


@final
@dataclass(frozen=True, repr=False)
class Env(Launcher):
    """Every rank runs the same script; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT say which it is."""

    device: str | None = None
    """The device type, "cpu" or "cuda"; None: the GPUs where there are any."""
    loaders: int = 0
    """The number of data-loading processes of each worker."""

    insecure: bool = False
    """True: ranks on several hosts need no secret in APPORTION_SECRET_FILE, and any process that reaches a port may
    take the place of one."""

    launched: ClassVar[bool] = True

    def with_workers(self, workers: int) -> Self:
        raise ValueError(f"workers={workers} goes with local(): {self} finds its ranks running already")

    def dispatch(self, carried: Carried) -> Any:
        return carried.on_running_ranks(self)
