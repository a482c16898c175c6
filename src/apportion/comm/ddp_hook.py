"""The all-reduce in shared memory for people who stay with DistributedDataParallel, in one line of their own script::

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, apportion.comm.shared_memory_hook)

Li et al., "PyTorch Distributed", VLDB 2020, section 3.2: gradients travel in buckets, in one order on every rank, and
a hook says how.
"""
# Without `from __future__ import annotations`: DDP looks at the hook's own, which must be types and not text.

import warnings
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from apportion.comm.host_memory import host_memory, is_faster
from apportion.comm.process_group import DEADLINE_SECONDS, ProcessGroup
from apportion.comm.shared_memory_group import SharedMemoryGroup
from apportion.process import usable_cores

_known: WeakKeyDictionary[dist.ProcessGroup, SharedMemoryGroup | None] = WeakKeyDictionary()
"""The memory of each process group that has been seen; None: the group has none, or is as fast without."""


def shared_memory_hook(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP: the mean of the bucket over the ranks, in memory that they share.

    ``state``: the process group that the model was given; None for the default one. The sum is taken in rank order:
    the same bits on every rank and in every run. It is measured against the process group at the first step, and the
    faster is used. On CUDA, and where the ranks are on several hosts, it is torch's own all-reduce, with a warning.
    """
    process_group = state if state is not None else dist.group.WORLD
    assert process_group is not None, "DDP has one"
    bits = bucket.buffer()
    memory = _memory(process_group, bits.device)
    if memory is None:
        return allreduce_hook(process_group, bucket)
    memory.mean(bits)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bits)
    return done


def _memory(process_group: dist.ProcessGroup, device: torch.device) -> SharedMemoryGroup | None:
    if process_group not in _known:
        _known[process_group] = _find(process_group, device)
    return _known[process_group]


def _find(process_group: dist.ProcessGroup, device: torch.device) -> SharedMemoryGroup | None:
    if process_group.size() == 1:
        return None
    if device.type != "cpu":
        _warn(f"the model is on {device}")
        return None
    group = ProcessGroup(process_group, owned=False)
    spins = process_group.size() * torch.get_num_threads() <= usable_cores()
    memory = host_memory(group, spins=spins, deadline=_timeout(process_group))
    if memory is None:
        _warn("the ranks are not all on one host (of Linux, under one user)")
        return None
    return memory if is_faster(memory, group) else None


def _warn(why: str) -> None:
    warnings.warn(
        f"shared_memory_hook: {why}, so the gradients take torch's own all-reduce; without the hook it is the same",
        stacklevel=2,
    )


def _timeout(process_group: dist.ProcessGroup) -> float:
    """The seconds that the group itself would wait for a rank."""
    try:
        return float(process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return DEADLINE_SECONDS
