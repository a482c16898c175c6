"""A workload's model as it is before the first step, in the precision that is asked for; and what no step could begin
with, refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from apportion.core import tree
from apportion.core.modes import begin_training
from apportion.core.torch_private import DispatchMode
from apportion.core.workload import Workload


def fresh_model(workload: Workload, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """The model, on the device, in training mode; its floating and complex tensors in the dtype (None: as they are)."""
    model = workload.make_model()
    _refuse_lazy(model)
    _refuse_meta(model)
    workload.must_know(type(module) for module in model.modules())
    model = in_precision(model.to(device=device), dtype)
    begin_training(model)
    return model


def in_precision(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Cast the model's floating and complex tensors to this dtype, in place. Complex ones stay complex, and weights or
    buffers that lie in one memory still do; ``nn.Module.to`` sees to neither."""
    tensors = (*model.parameters(), *model.buffers())
    if dtype is None or all(t.dtype in (dtype, dtype.to_complex()) for t in tensors if _is_cast(t)):
        return model
    tied = list(tied_by_memory(model))
    views = list(_views_of_buffers(model, dtype))
    complexes = [p for p in model.parameters() if p.is_complex()]
    values = [p.data.to(dtype.to_complex()) for p in complexes]
    buffers = [
        (module, name, b.to(dtype.to_complex()))
        for module in model.modules()
        for name, b in module.named_buffers(recurse=False, remove_duplicate=False)
        if b.is_complex()
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values to real", UserWarning)
        model.to(dtype=dtype)
    for p, value in zip(complexes, values, strict=True):
        p.data = value
    for module, name, buffer in buffers:
        setattr(module, name, buffer)
    for module, name, view in views:
        setattr(module, name, view)
    parameters = dict(model.named_parameters())
    for tie in tied:
        whole = parameters[tie.name].data
        other = parameters[tie.other]
        other.data = whole.as_strided(other.shape, tie.stride, whole.storage_offset() + tie.offset)
    return model


def memory_of(tensor: Tensor) -> int:
    """Returns a number that tensors have in common which lie in one memory, as views of one another do: a change of one
    of them changes the others."""
    strided = tensor.layout is torch.strided and tensor.untyped_storage().data_ptr()
    return tensor.untyped_storage().data_ptr() if strided else id(tensor)


def _views_of_buffers(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields the buffers that share a memory, as views of one memory in this dtype, with where they belong."""
    places: dict[int, list[tuple[nn.Module, str, Tensor]]] = {}
    for module in model.modules():
        for name, b in module.named_buffers(recurse=False, remove_duplicate=False):
            if b.is_floating_point() and b.layout is torch.strided:
                places.setdefault(memory_of(b), []).append((module, name, b))
    for shared in places.values():
        first = shared[0][2]
        if len(shared) == 1 or any(b.dtype != first.dtype for _, _, b in shared):
            continue
        memory = first.new_empty(0).set_(first.untyped_storage()).to(dtype)
        made = {id(b): memory.as_strided(b.shape, b.stride(), b.storage_offset()) for _, _, b in shared}
        yield from ((module, name, made[id(b)]) for module, name, b in shared)


@dataclass(frozen=True)
class Tie:
    """Two parameters that lie in one memory (``c.weight.data = a.weight.data``)."""

    name: str
    """The name of the parameter that has all of the memory which both share."""
    other: str
    offset: int
    """The element of the first parameter at which the other begins."""
    stride: tuple[int, ...]
    """The stride of the other parameter."""


def tied_by_memory(model: nn.Module) -> Iterator[Tie]:
    """The parameters that lie in another's memory; ValueError where one lies in it by a part."""
    spans: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, p in model.named_parameters():
        if p.layout is torch.strided and p.numel() and p.untyped_storage().data_ptr():
            first = int(p.storage_offset())
            last = first + sum((int(n) - 1) * int(s) for n, s in zip(p.shape, p.stride(), strict=True))
            spans.setdefault(p.untyped_storage().data_ptr(), []).append((first, last, name, p))
    for together in spans.values():
        together.sort(key=lambda span: (span[0], -span[1]))
        start, end, whole, held = together[0]
        for first, last, name, p in together[1:]:
            if first > end:
                start, end, whole, held = first, last, name, p
                continue
            if last > end or p.dtype != held.dtype:
                raise ValueError(
                    f"{whole} and {name} share a part of their memory: give each a tensor of its own, or make one "
                    "parameter of what they share and cut it in the forward"
                )
            yield Tie(whole, name, first - start, p.stride())


def refuse_tied_by_memory(model: nn.Module, why: str) -> None:
    """Raise ValueError where two parameters lie in one memory. ``why``: what the strategy does with each."""
    for tie in tied_by_memory(model):
        raise ValueError(
            f"{tie.name} and {tie.other} are two parameters in one memory, and {why}: make them one parameter "
            f"(as c.weight = a.weight), or use data_parallel"
        )


def refuse_renormalising(model: nn.Module, why: str) -> None:
    """Raise ValueError where an embedding rescales the rows that it looks up, in place. ``why``: what becomes of
    that."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ValueError(
                f"{name or type(layer).__name__} has max_norm={layer.max_norm:g}, which rescales its weight while the "
                f"forward runs, and {why}: leave max_norm out and rescale what the layer gives, or use layer_placement "
                "or single_device"
            )


def refuse_written(model: nn.Module, look: Callable[[], object]) -> None:
    """Raise ValueError where a training pass writes to weights that are trained, as a critic does that clamps them:
    what is written to gathered weights is lost. ``look`` makes a pass, of which nothing stays. A write under a
    condition that does not hold yet is not seen."""
    from apportion.parallel.tracing.network import undisturbed  # what it counts FLOPs with takes long to import

    trained = {memory_of(p): name for name, p in model.named_parameters() if p.requires_grad}
    values = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]
    writes = _Writes(trained)
    try:
        with undisturbed(model), writes:
            look()
    except Exception:  # with update= a model need not have a forward; any other mistake is raised by the first step
        pass
    finally:
        for p, before in values:
            p.data.copy_(before)
    for name in writes.found:
        raise ValueError(
            f"the forward of {type(model).__name__} writes to {name}, of which each rank has a shard, and what is "
            "written to the gathered weight is lost: compute with a value, as in F.linear(x, weight.clamp(-1, 1)), or "
            "use data_parallel or single_device"
        )


class _Writes(DispatchMode):
    """Finds the operations that write to tensors which lie in these memories, by the names of the memories."""

    def __init__(self, memories: Mapping[int, str]) -> None:
        super().__init__()
        self._memories = memories
        self.found: dict[str, None] = {}
        """The names of the tensors that were written to, in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}  # out=, which is always given by name
        given = [(a, args[i] if i < len(args) else named.get(a.name)) for i, a in enumerate(func._schema.arguments)]
        written = [
            value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in tree.tensors(written):
            if (name := self._memories.get(memory_of(tensor))) is not None:
                self.found[name] = None
        return func(*args, **named)


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _refuse_lazy(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        tensors = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        if any(is_lazy(t) for t in tensors):
            raise ValueError(
                f"{name or 'the model'} ({type(layer).__name__}) has no shape before its first call, and its weights "
                "are dealt out before: give it its sizes, or call the model once on an example before model= returns it"
            )


def _refuse_meta(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values: make the network without torch.device('meta'), or "
                "call to_empty(device='cpu') and initialise it before model= returns it"
            )
