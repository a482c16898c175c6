"""The layers that a network is made of, in the order in which it computes: one tracer for what plans, cuts or exports
it.

torch.fx follows a sample's way through the forward functions; layers of torch are taken whole, and so is a module whose
forward cannot be followed (it decides by the numbers in a tensor, changes itself, draws numbers of its own). A network
that is such a module itself is followed by hooks: then its layers are known, and not what lies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from apportion.core import tree
from apportion.core.rng import fork_rng
from apportion.core.torch_private import attention_on_cpu, buffers_of, forward_hook_tables, parameters_of, version_of
from apportion.parallel.tracing.nodes import target_name
from apportion.parallel.tracing.side_effects import put_into
from apportion.parallel.tracing.tracer import Unfollowed, arguments, follow, names
from apportion.parallel.tracing.uncompiled import uncompiled

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One call of a module, or of a function between modules, for the sample that was traced."""

    name: str
    """The module's path, with ``#2`` at its second call; for a function a name such as ``add``, ``add_1``."""
    kind: str
    """The name of the module's class, or of the function."""
    module: str | None
    """The path of the module; None for a function."""
    inputs: tuple[str, ...]
    """The names of the layers, or of the arguments of the network, that the layer takes its inputs from."""
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    parameter_bytes: int
    """The bytes of those parameters that no layer before this one has used."""
    activation_bytes: int
    """The bytes of the layer's outputs."""
    flops: int
    """The floating-point operations of the layer's forward pass; a multiplication and an addition are two."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The layers of a network, in order of execution."""

    layers: tuple[Layer, ...]
    followed: bool
    """True if all that happens between the layers is known, so that it can be cut there; else ``untraceable`` says why
    not."""
    untraceable: str | None = None

    @property
    def flops(self) -> int:
        """The floating-point operations of the forward pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of the parameters that are used."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """The bytes of all layers' outputs."""
        return sum(layer.activation_bytes for layer in self.layers)


def trace(model: nn.Module, sample: Any) -> Network:
    """The network, for inputs as the model is called with (``Batch.inputs``). The model computes once, as it would in
    training; its buffers and the random numbers that come next stay as they were."""
    try:
        graph = follow(model, sample)
    except Unfollowed as error:
        with undisturbed(model):
            return Network(layers=tuple(_hooked(model, sample)), followed=False, untraceable=str(error))
    with undisturbed(model):
        return Network(layers=tuple(_interpreted(model, graph, sample)), followed=True)


# Computing


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Compute without a trace: the model's buffers and numbers stay as they were, and so do the parameters without
    gradient (a teacher that the forward moves) or that an embedding rescales (``max_norm``), and what is drawn next; no
    gradients are kept, no hooks stay, and nothing is compiled. Gives a function that names the buffers, parameters
    without gradient and numbers that have changed so far."""
    modules = dict(model.named_modules())
    held = [
        (f"{path}.{name}".lstrip("."), holder, name, t, None if t is None else _Kept(t))
        for path, module in modules.items()
        for holder in (buffers_of(module), parameters_of(module))
        for name, t in holder.items()
        if holder is buffers_of(module) or (t is not None and not t.requires_grad)
    ]
    rescaled = [m.weight for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm]
    before_scaling = [weight.detach().clone() for weight in rescaled]
    numbers = [(path, module, _numbers(module)) for path, module in modules.items()]
    hooks = _hooks(model)
    devices = sorted({t.device.index or 0 for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"})

    def changed() -> list[str]:
        found = [path for path, holder, name, _, kept in held if _differs(holder.get(name), kept)]
        for path, module, before in numbers:
            now = _numbers(module)
            found += [f"{path}.{k}".lstrip(".") for k in {**before, **now} if now.get(k, None) != before.get(k, None)]
        return found

    try:
        with torch.no_grad(), fork_rng(devices), uncompiled():
            yield changed
    finally:
        with torch.no_grad():
            for _, holder, name, tensor, kept in held:
                if tensor is not None and kept is not None:
                    put_into(tensor, kept.value, kept.pointer)
                holder[name] = tensor
            for weight, before_it in zip(rescaled, before_scaling, strict=True):
                weight.copy_(before_it)
        for _, module, before in numbers:
            for name in _numbers(module).keys() - before.keys():
                del module.__dict__[name]
            module.__dict__.update(before)
        for found, known in hooks:
            for number in found.keys() - known.keys():
                del found[number]


def settle(model: nn.Module, call: Callable[[], Any]) -> None:
    """Let a forward put the hooks on its layers that it puts there when it is called first, and note that it has: each
    look at the network would see it do so, and each part of it would do so by itself. ``call`` makes a pass."""
    tensors = {name for name, _ in (*model.named_buffers(), *model.named_parameters())}
    before = _hooks(model)
    with undisturbed(model) as changed:
        call()
        hooks, names, numbers = _hooks(model), set(changed()), [(m, _numbers(m)) for m in model.modules()]
        more = any(len(now) > len(then) for (now, _), (_, then) in zip(hooks, before, strict=True))
        if not more or names & tensors:
            return
        call()
        same = all(found.keys() == known.keys() for found, known in hooks) and set(changed()) == names
        same = same and all(_numbers(module) == then for module, then in numbers)
    if same:
        for found, known in hooks:
            found.update(known)
        for module, then in numbers:
            module.__dict__.update(then)


def _hooks(model: nn.Module) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """The tables in which layers have the hooks of their forward, each with a copy of what is in it now."""
    return [(hooks, dict(hooks)) for module in model.modules() for hooks in forward_hook_tables(module)]


class _Kept:
    """The value of a tensor as it was, with its address and its version."""

    def __init__(self, tensor: Tensor) -> None:
        self.value, self.pointer = tensor.detach().clone(), tensor.data_ptr()
        counted = isinstance(tensor, nn.Parameter) and not tensor.is_inference()
        self.version = version_of(tensor) if counted else None


def _differs(now: Tensor | None, kept: _Kept | None) -> bool:
    """Return whether a tensor differs from what it was. A parameter that was written to counts as different even
    if its values are the same: a teacher network begins as a copy of its student."""
    if now is None or kept is None:
        return (now is None) != (kept is None)
    if kept.version is not None and (version_of(now) != kept.version or now.data_ptr() != kept.pointer):
        return True
    return now.shape != kept.value.shape or not torch.equal(now, kept.value)


def _numbers(module: nn.Module) -> dict[str, Any]:
    """The attributes of a layer that are numbers, booleans or strings."""
    return {name: value for name, value in module.__dict__.items() if isinstance(value, bool | int | float | str)}


class _Counter:
    """A counter of FLOPs so far: torch's counter, which counts nothing of recurrent layers, and a formula for those."""

    def __init__(self, model: nn.Module) -> None:
        flops = {} if attention_on_cpu is None else {attention_on_cpu: _attention_flops}
        self._counter = FlopCounterMode(display=False, custom_mapping=flops)
        self._extra, self._before = 0, 0
        self._handles = []
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                self._handles.append(module.register_forward_pre_hook(self._count_before))
                self._handles.append(module.register_forward_hook(self._add_recurrent))

    def __enter__(self) -> _Counter:
        self._counter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    @property
    def flops(self) -> int:
        return self._counter.get_total_flops() + self._extra

    def _count_before(self, *_: Any) -> None:
        self._before = self._counter.get_total_flops()

    def _add_recurrent(self, module: Any, inputs: Any, _: Any) -> None:
        self._extra += recurrent_flops(module, inputs[0]) - (self._counter.get_total_flops() - self._before)


def _attention_flops(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """The FLOPs of an attention with q (B, heads, T, E), k (B, heads, S, E) and v (B, heads, S, D)."""
    batch, heads, length, width = q
    return 2 * batch * heads * length * k[2] * (width + v[3])


def recurrent_flops(layer: nn.RNNBase, x: Any) -> int:
    """The FLOPs of the forward pass of an LSTM, GRU or RNN: its matrix products. x (B, T, in), in any order, or
    packed."""
    data = x.data if isinstance(x, nn.utils.rnn.PackedSequence) else x
    rows = data.numel() // layer.input_size  # each row of each step
    gates = {"LSTM": 4, "GRU": 3}.get(layer.mode, 1)
    out = layer.proj_size or layer.hidden_size
    directions = 2 if layer.bidirectional else 1
    flops = 0
    for number in range(layer.num_layers):
        inputs = layer.input_size if number == 0 else directions * out
        flops += directions * 2 * gates * layer.hidden_size * (inputs + out)
        flops += directions * 2 * layer.proj_size * layer.hidden_size
    return flops * rows


def _interpreted(model: nn.Module, graph: fx.Graph, sample: Any) -> Iterator[Layer]:
    called, found = names(graph), {}
    seen: set[Any] = set()
    sources: dict[fx.Node, tuple[str, ...]] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            before = counter.flops
            inputs = tree.tensors(self.fetch_args_kwargs_from_env(n))
            result = super().run_node(n)
            record(n, inputs, result, counter.flops - before)
            return result

    def record(node: fx.Node, inputs: list[Tensor], result: Any, flops: int) -> None:
        outputs = tree.tensors(result)
        taken = tuple(dict.fromkeys(name for source in node.all_input_nodes for name in sources.get(source, ())))
        if node.op == "placeholder":
            sources[node] = (called[node],)
        elif node.op.startswith("call_") and outputs:
            sources[node] = (called[node],)
            module = str(node.target) if node.op == "call_module" else None
            found[node] = Layer(
                name=called[node],
                kind=_kind(model, node),
                module=module,
                inputs=taken,
                input_shapes=tuple(tuple(t.shape) for t in inputs),
                output_shapes=tuple(tuple(t.shape) for t in outputs),
                parameter_bytes=_new_bytes(_parameters(model, node), seen),
                activation_bytes=sum(t.nbytes for t in outputs),
                flops=flops,
            )
        else:  # a size, or what is not computed: its users take from what it was taken from
            sources[node] = taken

    with _Counter(model) as counter:
        Recorder(model, graph=graph).run(*arguments(graph, sample))
    return iter(found.values())


def _kind(model: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        return type(model.get_submodule(str(node.target))).__name__
    return target_name(node)


def _parameters(model: nn.Module, node: fx.Node) -> list[nn.Parameter]:
    """The parameters that a node uses."""
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    attributes = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [parameters[name] for name in attributes if name in parameters]


def _new_bytes(parameters: list[nn.Parameter], seen: set[Any]) -> int:
    new = [p for p in parameters if p not in seen]
    seen.update(new)
    return sum(p.nbytes for p in dict.fromkeys(new))


def _hooked(model: nn.Module, sample: Any) -> Iterator[Layer]:
    """The modules without modules inside, as they are called; the tensors that they hand on tell which takes from
    which."""
    found: list[Layer] = []
    made = {id(t): (t, "input") for t in tree.tensors(sample)}
    seen: set[Any] = set()
    calls: dict[str, int] = {}

    def hook(path: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls[path] = calls.get(path, 0) + 1
        name = path or type(module).__name__
        name = name if calls[path] == 1 else f"{name}#{calls[path]}"
        inputs, outputs = tree.tensors([args, kwargs]), tree.tensors(result)
        taken = [made[id(t)][1] for t in inputs if id(t) in made]
        found.append(
            Layer(
                name=name,
                kind=type(module).__name__,
                module=path,
                inputs=tuple(dict.fromkeys(taken)),
                input_shapes=tuple(tuple(t.shape) for t in inputs),
                output_shapes=tuple(tuple(t.shape) for t in outputs),
                parameter_bytes=_new_bytes(list(module.parameters()), seen),
                activation_bytes=sum(t.nbytes for t in outputs),
                flops=counter.flops - before[path],
            )
        )
        made.update({id(t): (t, name) for t in outputs})  # kept, so that no other tensor takes its place

    before: dict[str, int] = {}
    handles = []
    counter = _Counter(model)  # its hooks go first
    for path, module in model.named_modules():
        if any(True for _ in module.children()):
            continue

        def before_call(*_: Any, path: str = path) -> None:
            before[path] = counter.flops

        def after_call(module: nn.Module, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            hook(path, module, args, kwargs, result)

        handles.append(module.register_forward_pre_hook(before_call))
        handles.append(module.register_forward_hook(after_call, with_kwargs=True))
    try:
        with counter:
            tree.call(model, sample)
    finally:
        for handle in handles:
            handle.remove()
    return iter(found)
