"""Communication of ranks with each other (``group``) and with their supervisor (``channel``).

``shared_memory_hook`` is for programs that stay with DistributedDataParallel.
"""

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
