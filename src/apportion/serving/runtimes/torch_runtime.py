"""The runtime for a torch module, or a program of ``torch.export``, where the model cannot be written as ONNX. Past its
deadline it stops at the next module, or the next operation of a program.

Modules of several members are computed in turn or, where they are of one architecture, all at once with their weights
stacked (``torch.func.vmap``), whichever is faster on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, stack_module_state, vmap

from apportion.core.torch_private import pytree
from apportion.exporting.target import called, input_names, output_names
from apportion.serving.protocol.datatypes import NAMES, Array
from apportion.serving.runtimes.exported_archive import checked
from apportion.serving.runtimes.runtime import Expired, Runtime, Spec

TURNS = 5
TOLERANCE = 1e-4
"""The largest difference between the outputs of the two ways, relative to the largest output: vmap computes with other
kernels."""


class InOrder(nn.Module):
    """A module whose outputs are given as a list, in another order."""

    def __init__(self, module: nn.Module, order: Sequence[int]) -> None:
        super().__init__()
        self.module, self._order = module, order

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        found = pytree.tree_leaves(self.module(*args, **kwargs))
        return [found[n] for n in self._order]


class InTurn(nn.Module):
    """Modules that are computed in turn: the outputs are those of the first, then of the second, and so on."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(modules)

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return [x for member in self.members for x in pytree.tree_leaves(member(*args, **kwargs))]


class Stacked(nn.Module):
    """Modules that are computed in one pass: the outputs are those of the first, then of the second, and so on. Raises
    RuntimeError where they are of different architectures."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self._parameters_stacked, self._buffers_stacked = stack_module_state(list(modules))
        self.first, self._many = modules[0], len(modules)

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Any:
            return functional_call(self.first, (parameters, buffers), args, kwargs)

        found = pytree.tree_leaves(vmap(one)(self._parameters_stacked, self._buffers_stacked))
        return [x[n] for n in range(self._many) for x in found]


def together(modules: Sequence[nn.Module], sample: Any) -> nn.Module:
    """Return the faster of ``InTurn`` and ``Stacked``. ``sample``: the inputs that each module is called with."""
    in_turn = InTurn(modules)
    with torch.inference_mode():
        try:
            stacked = Stacked(modules)
            pairs = zip(called(stacked, sample), called(in_turn, sample), strict=True)
        except Exception:  # of another architecture, or of operations that vmap does not know
            return in_turn
        if not all(_alike(ours, theirs) for ours, theirs in pairs):
            return in_turn
        taken: dict[nn.Module, list[float]] = {in_turn: [], stacked: []}
        for _ in range(TURNS):
            for module, own in taken.items():
                began = time.perf_counter()
                called(module, sample)
                own.append(time.perf_counter() - began)
    return min(taken, key=lambda module: sorted(taken[module])[TURNS // 2])


def _alike(some: Tensor, other: Tensor) -> bool:
    if some.shape != other.shape or some.dtype != other.dtype:
        return False
    if not some.is_floating_point():
        return torch.equal(some, other)
    return bool((some - other).abs().max() <= TOLERANCE * other.abs().max() + 1e-7) if some.numel() else True


_FROM_TORCH = {
    torch.bool: "BOOL", torch.uint8: "UINT8", torch.uint16: "UINT16", torch.uint32: "UINT32", torch.uint64: "UINT64",
    torch.int8: "INT8", torch.int16: "INT16", torch.int32: "INT32", torch.int64: "INT64",
    torch.float16: "FP16", torch.float32: "FP32", torch.float64: "FP64", torch.bfloat16: "BF16",
}  # fmt: skip

OTHERS = 16
"""The number of examples of a run's data that are looked at for other sizes than the first one's."""

assert {*_FROM_TORCH.values()} | {"BYTES"} == {*NAMES.values()} | {"BF16"}


@final
class TorchRuntime(Runtime):
    """A torch module as a program of a member. ``sample``: inputs of one example or more, as the module is called with
    them; its dimension 0 is the example. ``channels_last``: images go through the module in that order."""

    def __init__(self, module: nn.Module, sample: Any, *, threads: int = 1, channels_last: bool = False) -> None:
        self._threads = threads
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._deadline = float("inf")
        module.to(memory_format=self._format)  # type: ignore[call-overload]
        self._module = _stopped(module, self._check)
        leaves, self._tree = pytree.tree_flatten(sample)
        self.runtime = f"torch {torch.__version__.partition('+')[0]}" + (" channels_last" if channels_last else "")
        self.inputs = tuple(map(_spec, input_names(sample), leaves))
        torch.set_num_threads(threads)
        with torch.inference_mode():
            outputs = self._call(leaves)
        self.outputs = tuple(map(_spec, output_names(outputs), pytree.tree_leaves(outputs)))

    def run(self, inputs: Sequence[Array], deadline: float) -> list[Array]:
        """Compute the outputs for these inputs, as ``Runtime.run`` says."""
        if torch.get_num_threads() != self._threads:  # it is the process's, who has other programs as well
            torch.set_num_threads(self._threads)
        self._deadline = deadline
        try:
            self._check()
            with torch.inference_mode():
                outputs = self._call([_tensor(x, s.datatype) for x, s in zip(inputs, self.inputs, strict=True)])
            self._check()
        except (RuntimeError, IndexError, TypeError, KeyError, AttributeError, AssertionError) as error:
            raise ValueError(str(error).partition("\n")[0]) from error
        finally:
            self._deadline = float("inf")  # the module is its owner's too
        return [_array(x) for x in pytree.tree_leaves(outputs)]

    def _call(self, leaves: Sequence[Tensor]) -> Any:
        images = [x.contiguous(memory_format=self._format) if x.ndim == 4 else x for x in leaves]
        sample = pytree.tree_unflatten(images, self._tree)
        return called(self._module, sample)

    def _check(self, *_: object) -> None:
        if time.monotonic() > self._deadline:
            raise Expired


def _stopped(module: nn.Module, check: Any) -> nn.Module:
    """Return the module with a look at the clock between its parts."""
    if isinstance(module, fx.GraphModule) and not any(True for _ in module.children()):
        return _ByNode(module, check)
    for part in module.modules():
        part.register_forward_pre_hook(check)
    return module


class _ByNode(nn.Module):
    """A graph without modules, which is run one operation at a time."""

    def __init__(self, graph: fx.GraphModule, check: Any) -> None:
        super().__init__()
        self.graph, self._check = graph, check

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        check = self._check

        class Stopping(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                check()
                return super().run_node(n)

        # fx runs a graph by itself on inputs by position alone
        return self.graph(*args, **kwargs) if kwargs else Stopping(self.graph).run(*args)


def _spec(name: str, tensor: Tensor) -> Spec:
    return Spec(name, _FROM_TORCH[tensor.dtype], (None, *tensor.shape[1:]) if tensor.ndim else ())


def _tensor(array: Array, datatype: str) -> Tensor:
    if not array.flags.writeable:  # torch warns of such
        array = array.copy()
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if datatype == "BF16" else tensor


def _array(tensor: Tensor) -> Array:
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def opened(path: Path) -> tuple[nn.Module, Any]:
    """Return (the module, inputs of one example or more) of a run, a checkpoint, or a program of torch.export."""
    if path.is_file():
        try:
            with checked(path, lambda pickled: torch.load(BytesIO(pickled.read()), weights_only=True)) as archive:
                program = torch.export.load(archive)
        except OSError:
            raise
        except Exception as error:  # a file that does not hold a program raises errors of many classes
            raise ValueError(f"{path} is not a program of torch.export that can be served: {error}") from error
        if program.example_inputs is None:
            raise ValueError(f"{path} has no example inputs: save it with those that it was exported with")
        _check_rows(program, path)
        args, kwargs = program.example_inputs
        if args and kwargs:
            raise ValueError(f"{path} takes arguments by position and by name: export it with one kind")
        return program.module(), kwargs or (args[0] if len(args) == 1 else args)
    from apportion.runtime.checkpoint.load import load, workload_of

    workload = workload_of(path, trust=True)  # whose code it names was asked when the run was pinned
    data = workload.open_data() if workload.parts is None else workload.open_part(0)
    inputs, _ = workload.collate([data[0]])
    return load(path, trust=True), inputs


def other_samples(path: Path, sample: Any) -> list[Any]:
    """Return inputs of other sizes than the sample's, beyond the number of examples, that the model of a run, a
    checkpoint or a program takes: those that the data has, or one size more of what the program leaves free."""
    if path.is_file():
        return _one_more(path, sample)
    from apportion.runtime.checkpoint.load import workload_of

    workload = workload_of(path, trust=True)
    data = workload.open_data() if workload.parts is None else workload.open_part(0)
    try:
        size = len(data)  # type: ignore[arg-type]
    except TypeError:
        return []
    shapes, found = {_shapes(sample)}, []
    for at in sorted({size * n // OTHERS for n in range(OTHERS)}):
        inputs, _ = workload.collate([data[at]])
        if _shapes(inputs) not in shapes:
            shapes.add(_shapes(inputs))
            found.append(inputs)
    return found


def _one_more(path: Path, sample: Any) -> list[Any]:
    """Return the sample with one more of each size, beyond dimension 0, that the program of a file leaves free."""
    with checked(path, lambda pickled: torch.load(BytesIO(pickled.read()), weights_only=True)) as archive:
        program = torch.export.load(archive)
    values = [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in program.graph_signature.user_inputs
    ]
    leaves, tree = pytree.tree_flatten(sample)
    wider = []
    for leaf, value in zip(leaves, values, strict=True):
        for dim in [dim for dim, n in enumerate(value.shape) if dim and not isinstance(n, int)]:
            leaf = torch.cat([leaf, leaf.narrow(dim, 0, 1)], dim)
        wider.append(leaf)
    other = pytree.tree_unflatten(wider, tree)
    return [] if _shapes(other) == _shapes(sample) else [other]


def _shapes(inputs: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x.shape[1:]) for x in pytree.tree_leaves(inputs))


def _check_rows(program: torch.export.ExportedProgram, path: Path) -> None:
    """Raise ValueError where the program takes a fixed number of examples, more than one."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or node.name not in program.graph_signature.user_inputs or not value.ndim:
            continue
        if isinstance(rows := value.shape[0], int) and rows > 1:
            raise ValueError(
                f"{path} takes {rows} examples at once and no other number: export it with "
                "dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), one for each input"
            )


def leaves_of(sample: Any) -> list[Array]:
    """Return the first row of each tensor."""
    return [_array(x[:1]) for x in pytree.tree_leaves(sample)]


def loaded(path: str, *, threads: int, channels_last: bool) -> TorchRuntime:
    """Load the program that a ``Source`` of torch names."""
    module, sample = opened(Path(path))
    return TorchRuntime(module, sample, threads=threads, channels_last=channels_last)


def loaded_together(
    members: Mapping[str, str], *, outputs: Sequence[Sequence[str]] | None, threads: int, channels_last: bool
) -> TorchRuntime:
    """Load these as one program, whose outputs are those of the first, then of the second, and so on. ``outputs``: the
    names of each member's outputs in the order of the first's; None takes them as they come. Raises ValueError where
    the members do not take the same inputs, or give other outputs than each other."""
    torch.set_num_threads(threads)
    modules, samples = zip(*(opened(Path(path)) for path in members.values()), strict=True)
    names, sample = list(members), samples[0]
    specs, ordered, ends = [], [], list[str]()
    for at, (name, module) in enumerate(zip(names, modules, strict=True)):
        try:
            with torch.inference_mode():
                found = called(module, sample)
        except Exception as error:  # whatever a module raises
            raise ValueError(f"in_graph: {name} does not take what {names[0]} does: {error}") from error
        given = output_names(found)
        order = [given.index(wanted) for wanted in (given if outputs is None else outputs[at])]
        leaves = pytree.tree_leaves(found)
        specs.append([(leaves[n].dtype, leaves[n].shape) for n in order])
        ordered.append(module if order == [*range(len(leaves))] else InOrder(module, order))
        ends += [f"{name}/{given[n]}" for n in order]
    if other := next((n for n, own in zip(names, specs, strict=True) if own != specs[0]), None):
        raise ValueError(f"in_graph: {names[0]} and {other} have different outputs")
    program = TorchRuntime(together(ordered, sample), sample, threads=threads, channels_last=channels_last)
    program.outputs = tuple(replace(spec, name=n) for spec, n in zip(program.outputs, ends, strict=True))
    return program
