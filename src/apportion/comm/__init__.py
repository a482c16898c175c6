"""How ranks talk: to each other (group), and to their supervisor (channel). ``shared_memory_hook``: for those who stay
with DistributedDataParallel."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.comm.ddp_hook import shared_memory_hook as shared_memory_hook

__all__ = ["shared_memory_hook"]


def __getattr__(name: str) -> Any:
    if name != "shared_memory_hook":
        raise AttributeError(f"apportion.comm has no {name!r}")
    from apportion.comm.ddp_hook import shared_memory_hook  # torch.distributed takes long to import

    globals()[name] = shared_memory_hook
    return shared_memory_hook
