"""The parameters and buffers that a stage which runs the network's own forward holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import nn

from apportion.core.torch_private import buffers_of, modules_of, parameters_of
from apportion.parallel.partition.tensor_shards import TensorShard
from apportion.parallel.pipeline.eager_forward import Recorded


def held(
    model: nn.Module, records: Sequence[Recorded], bounds: Sequence[int], rank: int
) -> tuple[nn.Module, Mapping[str, TensorShard]]:
    """A module with the parameters and buffers that a stage uses, under the plain names, and the shards of those
    parameters that several stages use, of whose gradient each has one term. The parameters that the stage does not hold
    have no numbers in the network from now on."""
    uses = [_used(model, records, begin, end) for begin, end in itertools.pairwise(bounds)]
    everything = set[int]().union(*uses)
    own = uses[rank] | ({id(t) for t in model.parameters()} - everything if rank == 0 else set())
    called = {id(b) for record in records for module in record.modules for b in module.buffers()}
    own |= {id(b) for b in model.buffers() if id(b) not in called}
    holder, pieces = nn.Module(), dict[str, TensorShard]()
    persistent = set(model.state_dict())
    for path, module in model.named_modules(remove_duplicate=False):
        for name, p in parameters_of(module).items():
            if p is not None and id(p) in own:
                where = f"{path}.{name}".lstrip(".")
                _owner(holder, path).register_parameter(name, p)
                if sum(id(p) in use for use in uses) > 1:
                    pieces[where] = TensorShard(tuple(p.shape), partial=True)
        for name, b in buffers_of(module).items():
            if b is not None and id(b) in own:
                keeps = f"{path}.{name}".lstrip(".") in persistent
                _owner(holder, path).register_buffer(name, b, persistent=keeps)
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in parameters_of(module).items():
            if p is not None and id(p) not in own:
                meta = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
                parameters_of(module)[name] = empty.setdefault(id(p), meta)
    return holder, pieces


def _owner(holder: nn.Module, path: str) -> nn.Module:
    for step in filter(None, path.split(".")):
        if step not in modules_of(holder):
            holder.add_module(step, nn.Module())
        holder = holder.get_submodule(step)
    return holder


def _used(model: nn.Module, records: Sequence[Recorded], begin: int, end: int) -> set[int]:
    """The parameters and buffers that the calls of a stage, and the functions between these, use."""
    found: set[int] = set()
    for record in records:
        for module in record.modules[begin:end]:
            found |= {id(t) for t in (*module.parameters(), *module.buffers())}
        for p, places in record.parameters.items():
            if any(begin <= max(0, place - 1) < end for place in places):
                found.add(p)
    return found
