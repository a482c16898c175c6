"""The conditions under which the weights of a replica can lie in shared pages."""

from __future__ import annotations

from torch import nn

from apportion.comm.group import Alone
from apportion.comm.shared_memory_group import SharedMemoryGroup
from apportion.comm.world import World
from apportion.core import fast_paths, torch_private
from apportion.parallel.optim.elementwise import rule_of, with_average
from apportion.parallel.replica.initial_model import tied_by_memory
from apportion.parallel.replica.replica import Replica
from apportion.parallel.shared_weights.layout import is_dense


def unsuited(replica: Replica, world: World) -> str | None:
    """Return why the weights cannot lie in shared pages; None where they can."""
    workload = replica.workload
    if fast_paths.is_plain("pages"):
        return "the plain path is asked for"
    # Who is left alone finds what the others have left there; ranks that were on several hosts have left nothing.
    if world.meeting is not None or not isinstance(world.group(), SharedMemoryGroup | Alone):
        return "the ranks do not share memory"
    if workload.update is not None or workload.precision == "float16" or workload.compile:
        return "its update is not a single one of plain tensors"
    (optimizer,) = replica.optimizers.values()
    rules = [rule_of(optimizer, group) for group in optimizer.param_groups]
    if any(with_average(rule, workload.average) is None for rule in rules):
        return f"{type(optimizer).__name__} is not known to be element-wise"
    if workload.carry is not None:
        return "a recurrent state is carried"
    if any(torch_private.gradient_hooked(p) for p in replica.trainable()):
        return "a parameter has hooks"
    if not all(is_dense(p) for p in replica.trainable()):
        return "a parameter is not one block of memory"
    if any(True for _ in tied_by_memory(replica.model)):
        return "two parameters lie in one memory"
    if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in replica.model.modules()):
        return "its gradients are sparse"
    return None
