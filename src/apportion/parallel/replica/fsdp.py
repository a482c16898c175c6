"""A network whose weights, gradients and optimizer slots are spread over the ranks (torch's FSDP2), and the conversion
between its shards and whole tensors.

The gathering of weights and the summing of gradients go through our own groups: the memory of a host, and connections
between hosts; on GPUs through the process group, as FSDP does by itself. A shard is a run of rows: ``torch.chunk``
along dimension 0.

The networks and optimizers that cannot be trained so are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from apportion.comm.group import Group, collective
from apportion.comm.network import c10d_backend
from apportion.comm.process_group import ProcessGroup
from apportion.comm.world import World
from apportion.core import tree
from apportion.core.strategy import State
from apportion.core.torch_private import import_compiler_settings, is_view, version_of
from apportion.errors import ApportionError

import_compiler_settings()  # else the first layer that is spread imports all of the compiler
_CALLS_ITS_PARTS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip
"""The modules of torch that call their parts. The other composed ones (attention, a transformer layer) use weights of
their parts without calling them."""
_GATHER, _SCATTER = 0, 1


def units(model: nn.Module, least: int) -> list[nn.Module]:
    """The layers that are gathered one at a time, innermost first; the model itself, which holds the rest, is the last.

    A unit has ``least`` parameters or more, and all the layers that share one of them.
    """
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            holders.setdefault(p, set()).add(module)
    found: list[nn.Module] = []
    taken: set[nn.Parameter] = set()

    def visit(module: nn.Module) -> None:
        if not type(module).__module__.startswith("torch.") or isinstance(module, _CALLS_ITS_PARTS):
            for child in module.children():
                visit(child)
        parameters = set(module.parameters()) - taken
        inside = set(module.modules())
        whole = all(holders[p] <= inside for p in parameters)
        called = type(module).forward is not nn.Module.forward
        if module is not model and called and whole and sum(p.numel() for p in parameters) >= least:
            found.append(module)
            taken.update(parameters)

    visit(model)
    return [*found, model]


class Sharded:
    """Spreads the parameters of a model over the ranks of a world, in place; gradients are summed, not averaged.
    ``whole``: parameters that every rank keeps."""

    def __init__(self, model: nn.Module, world: World, least: int, whole: Iterable[Tensor] = ()) -> None:
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ValueError(
                f"torch {torch.__version__} sums the gradients that each rank happens to have, which need not be the "
                "same ones: fully_sharded needs a newer torch (2.13 will do), or use data_parallel"
            )
        self._model, self._group = model, world.group()
        for p in model.parameters():
            p.data = p.data.contiguous()  # channels_last: rows of a shard lie together
        mesh = _mesh(world)
        names = {module: name for name, module in model.named_modules()}
        kept: set[Any] = set(whole)
        self._written: dict[Any, int] = {}
        self._units: list[FSDPModule] = []
        for number, module in enumerate(units(model, least)):
            module.register_forward_pre_hook(partial(self._call, number))
            module.register_forward_hook(_without_views)  # before FSDP's own
            if any(not p.requires_grad and p not in kept for p in module.parameters()):
                module.register_forward_hook(self._refuse_moved)
            unit = fully_shard(module, mesh=mesh, ignored_params=kept)
            self._units.append(unit)
            # The loss is weighted by this rank's share of the batch already, so that gradients are added up as they
            # are.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            # A rank that did not use a parameter sends zeros, so that every rank sends the same parameters.
            unit.set_reduce_scatter_unused_params(True)
            if not isinstance(self._group, ProcessGroup):
                unit.set_custom_all_gather(_AllGather(self._group, number, names[module]))  # type: ignore[arg-type]
                unit.set_custom_reduce_scatter(_ReduceScatter(self._group, number, names[module]))  # type: ignore[arg-type]
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._used = [False] * len(self._parameters)
        self._calls = [0] * len(self._units)
        self._watch_use()

    def _watch_use(self) -> None:
        """Have every whole parameter say when it gets a gradient: FSDP makes it once and fills it again and again."""
        numbers = {p: number for number, p in enumerate(self._parameters)}
        places = {
            number: (module, name)
            for module in self._model.modules()
            for name, p in module.named_parameters(recurse=False)
            if (number := numbers.get(p)) is not None
        }
        for unit in self._units:
            unit.unshard()
            for number, place in places.items():
                if not isinstance(p := getattr(*place), DTensor):
                    p.register_post_accumulate_grad_hook(partial(self._use, number))
            unit.reshard()

    def _call(self, number: int, module: nn.Module, inputs: Any) -> None:
        self._calls[number] += 1

    def _refuse_moved(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Refuse a forward that writes to gathered weights, which would not be kept. torch counts such writes;
        gathering the weights does not count."""
        for name, p in module.named_parameters():
            if p.requires_grad or isinstance(p, DTensor) or p.is_inference():
                continue
            if self._written.setdefault(p, version_of(p)) != version_of(p):
                raise ValueError(
                    f"{name}, which no optimizer has, is moved by the forward of a later step and not of the first: "
                    "fully_sharded cannot keep that; move it in the first step too, or use data_parallel"
                )

    def _use(self, number: int, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            (name, *_) = [name for name, p in self._names.items() if p is self._parameters[number]]
            raise ValueError(
                f"the gradient of {name} is sparse, and is not summed in shards: look it up with sparse=False, or use "
                "data_parallel"
            )
        self._used[number] = True

    @collective
    def sum(self, loss: Tensor) -> Tensor:
        """End a step's backward passes, and return the sum of the ranks' losses; ``p.grad`` is None again where no rank
        has used a parameter, so that the optimizer skips it as on one device. Called by all ranks."""
        tail = torch.tensor([*self._calls, *self._used, 0.0], dtype=torch.float64, device=loss.device)
        tail[-1] = loss
        self._group.all_reduce(tail).wait()
        calls, used, _ = tail.split([len(self._calls), len(self._used), 1])
        if calls.tolist() != [self._group.size * own for own in self._calls]:
            raise _mismatch_error(self._group, "at the end of its step")
        for p, ranks in zip(self._parameters, used.tolist(), strict=True):
            if not ranks:
                p.grad = None
        self._calls, self._used = [0] * len(self._calls), [False] * len(self._used)
        return tail[-1].to(loss.dtype)

    @torch.no_grad()
    @collective
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], largest: float) -> None:
        """Clip the gradients as ``torch.nn.utils.clip_grad_norm_`` does; each rank measures and scales its shards.
        Called by all ranks."""
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        if not gradients:
            return
        squares = torch.stack([torch.linalg.vector_norm(g) for g in gradients]).square().sum().reshape(1)
        self._group.all_reduce(squares).wait()
        scale = (largest / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for g in gradients:
            g.mul_(scale.to(g.dtype))

    def let_go(self) -> None:
        """Free whole weights that are kept for a backward pass that does not come."""
        for unit in self._units:
            unit.reshard()

    @collective
    def whole(self, state: State) -> State:
        """The state in whole tensors, in the host's memory. Called by all ranks."""

        def gathered(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            return torch.cat(self._group.all_gather_rows(tensor.to_local())).cpu()

        return replace(
            state,
            model={name: gathered(t) for name, t in state.model.items()},
            optimizer={name: gathered(t) for name, t in state.optimizer.items()},
        )

    def spread(self, state: State, optimizers: Iterable[str]) -> State:
        """This rank's shards of a state that is given in whole tensors. ``optimizers``: the names of the optimizers."""
        owners = [f"{name}/" if name else "" for name in optimizers]

        def slot(key: str, tensor: Tensor) -> Tensor:
            name = key.rpartition("/")[0]
            (owner,) = [o for o in owners if name.startswith(o) and name.removeprefix(o) in self._names] or [""]
            return self._shards(name.removeprefix(owner), tensor)

        return replace(
            state,
            model={name: self._shards(name, t) for name, t in state.model.items()},
            optimizer={key: slot(key, t) for key, t in state.optimizer.items()},
        )

    def _shards(self, name: str, tensor: Tensor) -> Tensor:
        """The shard of a parameter, or of a slot of its shape; any other tensor is the same on every rank."""
        p: Any = self._names.get(name)
        return _shard_of(tensor, p) if isinstance(p, DTensor) and p.shape == tensor.shape else tensor

    def nbytes(self, slots: Iterable[Tensor]) -> int:
        """The bytes of the weights, the buffers and these slots that this rank has."""
        return sum(local(t).nbytes for t in (*self._model.parameters(), *self._model.buffers(), *slots))


def _without_views(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Clone outputs that are views. FSDP gathers a layer for its backward pass when the gradient of its output arrives,
    and would not see that on a view which is written to in place (``h += x``)."""
    return tree.map_tensors(lambda t: t.clone() if t.requires_grad and is_view(t) else t, outputs)


def _mesh(world: World) -> DeviceMesh:
    """The mesh of all ranks, in a row. FSDP asks for a process group, whatever its messages go through."""
    group = world.group()
    if not isinstance(group, ProcessGroup) and (not dist.is_initialized() or c10d_backend.is_ours()):
        c10d_backend.init_process_group(group)
        return init_device_mesh(world.device.type, (world.size,))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # where FSDP puts what it gathers
    # Never left: torch keeps what it has worked out for this mesh for as long as the process lives.
    ProcessGroup.connect(
        rank=world.rank, size=world.size, device=world.device, local_size=world.local_size,
        watched=world.channel is not None,
    )  # fmt: skip
    return init_device_mesh(world.device.type, (world.size,))


class _Messages:
    """A unit's collectives, as FSDP wants them (``Comm``)."""

    def __init__(self, group: Group, number: int, name: str) -> None:
        self._group, self._number, self._name = group, number, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The memory in which a message is put together."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _agree(self, kind: int, numel: int) -> None:
        """Check that every rank is at the same message: a rank would otherwise take other layers' numbers for its
        own."""
        own = torch.tensor([kind, self._number, numel])
        if bool((self._group.all_gather(own) != own).any()):
            raise _mismatch_error(self._group, f"at layer {self._name!r}")


class _AllGather(_Messages):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        own = input_tensor.view(-1)
        self._agree(_GATHER, own.numel())
        self._group.gather_into(output_tensor.view(self._group.size, own.numel()), own)


class _ReduceScatter(_Messages):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        into = output_tensor.view(-1)
        self._agree(_SCATTER, into.numel())
        self._group.reduce_scatter(input_tensor.view(self._group.size, into.numel()), into)


def _mismatch_error(group: Group, where: str) -> ApportionError:
    return ApportionError(
        f"rank {group.rank} is {where} and another rank is not: fully_sharded needs every rank to compute the same "
        "layers; make min_num_params= larger than a layer that only some examples use, or use data_parallel"
    )


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_of(tensor: Tensor, p: DTensor) -> Tensor:
    mesh = p.device_mesh
    each = -(-len(tensor) // mesh.size())
    start = mesh.get_local_rank() * each
    rows = tensor[start : start + each].to(device=p.device, dtype=p.dtype).contiguous()
    return DTensor.from_local(rows, mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
