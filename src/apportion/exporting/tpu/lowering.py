"""A program of torch.export becomes StableHLO for several platforms at once, as jax.export keeps it.

::

    aten graph -- torchax, an operator a function of jax --> function of (weights, inputs) -- jax.export --> StableHLO
                                                             jax.value_and_grad, SGD: the training step

A program is lowered for the CPU too, in the same module: what is run here is what is lowered for the TPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from apportion.core.torch_private import pytree
from apportion.exporting.blamed_layer import first_line
from apportion.exporting.tpu.jax_packages import jax_package, torchax_package
from apportion.exporting.tpu.traced import (
    DECIDES,
    TracedProgram,
    buffers_written,
    named_layer,
    refuse_what_no_program_is,
    user_outputs,
)

Weights = Mapping[str, Any]
"""The parameters and buffers of a network by name, as arrays of numpy or jax."""
_NARROW, _WIDE = "in which two right programs differ by more than 1e-5", "which no TPU has"
_REFUSED = {
    **dict.fromkeys((torch.float16, torch.bfloat16), _NARROW),
    **dict.fromkeys((torch.float64, torch.complex128), _WIDE),
}
"""The types of weights that are refused, and why."""


@dataclass(frozen=True, eq=False)
class JaxFunction:
    """A program as a function of jax."""

    traced: TracedProgram
    call: Callable[..., tuple[list[Any], dict[str, Any]]]
    """Takes the weights and then the inputs, and returns (outputs, new values of the buffers that change)."""


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """How programs are lowered."""

    platforms: tuple[str, ...]
    precision: str
    """jax's name for the precision of products: "highest" is float32, "default" is the platform's fastest."""

    def lowered(self, function: Callable[..., Any], *arguments: Any, dynamic: bool) -> Any:
        """Return ``jax.export.Exported`` of a function at arguments of these shapes. ``dynamic``: the arrays after the
        first argument, which is the weights, may have any number of rows."""
        jax = jax_package()
        batch = jax.export.symbolic_shape("batch")[0] if dynamic else None
        weights, *rest = arguments
        shapes = [shape_of(weights, None), *(shape_of(each, batch) for each in rest)]
        with jax.default_matmul_precision(self.precision):
            return jax.export.export(jax.jit(function), platforms=self.platforms)(*shapes)


def shape_of(tree: Any, batch: Any) -> Any:
    """Return the shapes and types of arrays; ``batch``: instead of the number of rows, None leaves it."""
    jax = jax_package()

    def one(x: Any) -> Any:
        shape = x.shape if batch is None or not x.ndim else (batch, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype))

    return jax.tree.map(one, tree)


def weights_of(network: nn.Module) -> dict[str, Any]:
    """Return the parameters and buffers as arrays, a tied one once, under its first name. Raises ValueError where one
    has a type that is not computed with here."""
    first, found = first_names(network), {}
    for name, tensor in _tensors(network).items():
        if tensor.dtype in _REFUSED:
            layer, _, own = name.rpartition(".")
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(
                f"{named_layer(network, layer)} holds {own} in {kind}, {_REFUSED[tensor.dtype]}: export model.float(); "
                f"precision='default' lets a TPU multiply in bfloat16"
            )
        if first[name] == name:
            found[name] = array_of(tensor)
    return found


def first_names(network: nn.Module) -> dict[str, str]:
    """Return for each name of a parameter or buffer the first name of the same tensor."""
    seen: dict[int, str] = {}
    return {name: seen.setdefault(id(tensor), name) for name, tensor in _tensors(network).items()}


def trained_names(network: nn.Module) -> set[str]:
    """Return the names of the parameters that the training step changes."""
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


def array_of(tensor: Tensor) -> Any:
    """Return a tensor as an array of numpy, in the type that jax gives it: int64 becomes int32."""
    found = tensor.detach().cpu().numpy()
    return found.astype(jax_package().dtypes.canonicalize_dtype(found.dtype))


def jax_function(traced: TracedProgram) -> JaxFunction:
    """Turn a program into a function of jax. Raises ValueError, with the layer's name and the cure, where that cannot
    be done."""
    torchax = torchax_package()
    program = traced.program.run_decompositions().run_decompositions(torchax.decompositions.DECOMPOSITIONS)
    traced = traced.with_program(program)
    refuse_what_no_program_is(traced)
    _refuse_unknown(traced, torchax.ops.ops_registry.all_aten_ops)
    run = _interpreter(traced, torchax)
    outputs, written = user_outputs(program), buffers_written(program)
    first, constants = first_names(traced.network), _constants(traced)

    def call(weights: Weights, *inputs: Any) -> tuple[list[Any], dict[str, Any]]:
        given, place = [], iter(inputs)
        for spec in program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                given.append(next(place))
            else:
                assert spec.target is not None
                name = first.get(traced.name(spec.target))
                given.append(constants[spec.target] if name is None else weights[name])
        found = run(*given)
        changed = {first[traced.name(name)]: found[at] for at, name in written.items() if traced.name(name) in first}
        return [found[at] for at in outputs], changed

    return JaxFunction(traced, call)


def forward_of(function: JaxFunction) -> Callable[..., Any]:
    """Return the function of (weights, inputs...) to the output, or to all outputs as a tuple."""

    def forward(weights: Weights, *inputs: Any) -> Any:
        outputs, _ = function.call(weights, *inputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return forward


def step_of(loss: JaxFunction, trained: set[str]) -> Callable[..., Any]:
    """Return the function of (weights, learning rate, inputs..., targets...) to (loss, {parameter: gradient}, weights
    after a step of SGD)."""
    jax = jax_package()

    def step(weights: Weights, learning_rate: Any, *batch: Any) -> Any:
        fixed = {name: value for name, value in weights.items() if name not in trained}

        def loss_of(parameters: Weights) -> tuple[Any, dict[str, Any]]:
            (value,), changed = loss.call({**fixed, **parameters}, *batch)
            return value, changed

        parameters = {name: value for name, value in weights.items() if name in trained}
        (value, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        after = {name: weights[name] - learning_rate * each for name, each in gradients.items()}
        return value, gradients, {**fixed, **changed, **after}

    return step


def leaves_of(tree: Any, what: str) -> list[Any]:
    """Return the arrays of inputs or targets, in their order. Raises ValueError where one is not a tensor."""
    leaves = pytree.tree_leaves(tree)
    for each in leaves:
        if not isinstance(each, Tensor):
            raise ValueError(f"the {what} hold {each!r:.40}, and a program takes tensors only: make it one")
    return [array_of(each) for each in leaves]


def run_on_cpu(exported: Any) -> Callable[..., Any]:
    """Return the program as a function of arrays that runs on the CPU and returns arrays of numpy."""
    jax = jax_package()
    compiled = jax.jit(exported.call)
    cpu = jax.devices("cpu")[0]

    def call(*arguments: Any) -> Any:
        with jax.default_device(cpu):
            return jax.tree.map(np.asarray, compiled(*arguments))

    return call


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }


def _constants(traced: TracedProgram) -> dict[str, Any]:
    """The tensors of a program that are no parameters or buffers of the network: they go into the program itself."""
    program, first = traced.program, first_names(traced.network)
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT and spec.target is not None and traced.name(spec.target) not in first:
            known: Sequence[Mapping[str, Any]] = (program.state_dict, program.constants)
            found[spec.target] = array_of(next(each[spec.target] for each in known if spec.target in each))
    return found


def _refuse_unknown(traced: TracedProgram, known: Mapping[Any, Any]) -> None:
    for node in traced.program.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if node.op == "call_function" and packet is not None:
            found = known.get(node.target) or known.get(packet)
            if found is None or not found.is_jax_function:
                raise ValueError(
                    f"{traced.layer(node)} cannot be lowered for TPUs: torchax has nothing for {node.target}; write it "
                    f"in other operations"
                )


def _interpreter(traced: TracedProgram, torchax: Any) -> Callable[..., Sequence[Any]]:
    base: Any = torchax.export.JaxInterpreter

    class Interpreter(base):  # type: ignore[misc]
        """Runs the graph by jax, and says which layer cannot be."""

        def run_node(self, node: torch.fx.Node) -> Any:
            try:
                return super().run_node(node)
            except Exception as error:  # what jax and torchax raise has no base in common
                jax = jax_package()
                if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.NonConcreteBooleanIndexError):
                    why = DECIDES
                else:
                    why = f"{node.target}: {first_line(error)}; write it in other operations"
                raise ValueError(f"{traced.layer(node)} cannot be lowered for TPUs: {why}") from error

    made = Interpreter(traced.program.graph_module)
    made.extra_traceback = False

    def run(*given: Any) -> Sequence[Any]:
        found: Sequence[Any] = made.run(*given, enable_io_processing=False)
        return found

    return run
