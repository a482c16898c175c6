"""The resources that the workers of one start share, which the driver holds for them."""

from __future__ import annotations

import socket
from typing import Any, final

from apportion.comm.channel import SharedMemoryOwner
from apportion.comm.membership import Membership
from apportion.runtime.supervisor.watchdog import Watchdog
from apportion.runtime.worker import progress


@final
class SharedResources:
    """Memory, and a store where ranks with GPUs find each other. ``replaceable``: whether there is a page of the
    membership, since workers may be replaced; ``on_cpu``: the ranks exchange through memory alone, and need no
    store."""

    def __init__(self, ranks: int, *, replaceable: bool, on_cpu: bool) -> None:
        self.memory = SharedMemoryOwner()
        try:
            self.watch = Watchdog(progress.lines(self.memory.map("progress", progress.NBYTES * ranks)))
            self.members: Membership | None = None
            if replaceable:
                page = memoryview(self.memory.map("members", Membership.nbytes(ranks)))
                self.members = Membership(page, ranks)
                self.members.begin()
            self._store = _open_store() if ranks > 1 and not on_cpu else None
        except BaseException:
            self.memory.close()
            raise
        self.port = self._store.port if self._store is not None else 0
        """The port of the store; 0 where there is none."""

    def close(self) -> None:
        """Lets go of the memory, which ranks that map it keep; nothing else may hold this object any more."""
        self.memory.close()


def _open_store() -> Any:
    """Returns a store that is reachable from this host alone."""
    import torch.distributed as dist  # what computes on the CPU needs none

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        port = listening.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
