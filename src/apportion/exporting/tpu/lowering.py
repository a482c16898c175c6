"""A program of torch.export becomes StableHLO for several platforms at once, as jax.export keeps it.

::

    aten graph -- torchax, an operator a function of jax --> function of (weights, inputs) -- jax.export --> StableHLO
                                                             jax.value_and_grad, SGD: the training step

A program is lowered for the CPU too, in the same module: what is run here is what is lowered for the TPU.

A network and its loss as programs of torch.export, and the layer to blame where one cannot be had.

::

    net ------------ torch.export, in evaluation mode --> outputs of inputs
    loss(net, y) --- torch.export, in training mode ----> loss of inputs and targets, and buffers that change
"""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from apportion.core.torch_private import pytree
from apportion.exporting.blamed_layer import CHOOSE, ONE_WAY, blamed_layer, decides, first_line, layer_of
from apportion.exporting.target import Inputs, called
from apportion.exporting.tpu.jax_packages import jax_package, torchax_package

DECIDES = f"{ONE_WAY}, and a program for a TPU has one way and one set of shapes: {CHOOSE}"
_NETWORK = "network."
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True, eq=False)
class TracedProgram:
    """A program of torch.export, whose tensors go by the names that they have in the network."""

    program: torch.export.ExportedProgram
    network: nn.Module
    """The network that was traced, in the mode in which it was."""
    dynamic: bool
    """True: it takes any number of examples; False: as many as the sample."""
    prefix: str = ""
    """What stands before the names of the network's tensors in the program."""

    def name(self, target: str) -> str:
        """Return the network's name of a tensor of the program; empty where it is none of the network's."""
        return target.removeprefix(self.prefix) if target.startswith(self.prefix) else ""

    def with_program(self, program: torch.export.ExportedProgram) -> TracedProgram:
        """Return the same with the program in other operators."""
        return TracedProgram(program, self.network, self.dynamic, self.prefix)

    def layer(self, node: torch.fx.Node) -> str:
        """Name the layer that an operation comes from, and its type."""
        found = layer_of(node, {name for name, _ in self.network.named_modules()}, self.prefix)
        return "the loss" if self.prefix and found is None else named_layer(self.network, found or "")


class _Loss(nn.Module):
    """The loss of a network as a module of inputs and targets."""

    def __init__(self, network: nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.network = network
        self.loss = loss

    def forward(self, inputs: Inputs, targets: Any) -> Tensor:
        found: Tensor = self.loss(called(self.network, inputs), targets)
        return found


def traced_network(network: nn.Module, sample: Inputs, *, dynamic: bool) -> TracedProgram:
    """Trace the network as it is. Raises ValueError with the layer's name and the cure where it cannot be."""
    args: tuple[Any, ...] = () if isinstance(sample, dict) else sample if isinstance(sample, tuple) else (sample,)
    kwargs = dict(sample) if isinstance(sample, dict) else {}
    shapes = _any_number(sample) if isinstance(sample, dict) else _any_number(args)
    with _refusing(network):
        program = torch.export.export(network, args, kwargs, dynamic_shapes=shapes if dynamic else None)
    return TracedProgram(program, network, dynamic)


def traced_loss(
    network: nn.Module, loss: Callable[[Any, Any], Any], inputs: Inputs, targets: Any, *, dynamic: bool
) -> TracedProgram:
    """Trace the loss of a network that is in training mode. Raises ValueError as ``traced_network`` does, and where
    the loss is more than one number."""
    shapes = (_any_number(inputs), _any_number(targets))
    with _refusing(network, "the loss"):
        program = torch.export.export(
            _Loss(network, loss), (inputs, targets), dynamic_shapes=shapes if dynamic else None
        )
    (place,) = user_outputs(program)
    value = program.graph.output_node().args[0][place].meta["val"]
    if value.ndim:
        raise ValueError(f"the loss has the shape {tuple(value.shape)} and must be one number: give its mean")
    return TracedProgram(program, network, dynamic, _NETWORK)


def for_training(network: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return a copy of the network in training mode, without its dropout, and the layers whose dropout that was."""
    made = copy.deepcopy(network).train()
    dropped = []
    for name, layer in made.named_modules():
        p = 0.0
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            p, layer.dropout = layer.dropout, 0.0
        elif isinstance(layer, _DROPOUTS):
            p = layer.p
            layer.eval()
        if p:
            dropped.append(f"{name} (p={p:g})")
    return made, dropped


def named_layer(network: nn.Module, name: str) -> str:
    """Name a layer and its type."""
    kind = type(network.get_submodule(name)).__name__
    return f"layer {name} ({kind})" if name else f"the net ({kind})"


def refused(network: nn.Module, error: BaseException, otherwise: str = "") -> ValueError:
    """Return the error that says which layer is to blame, by the frames in which it was raised, and the cure.
    ``otherwise``: who is to blame where it was no layer; empty stands for the network."""
    found = blamed_layer(network, error)
    who = otherwise if found is None and otherwise else named_layer(network, found or "")
    if decides(error):
        return ValueError(f"{who} cannot be lowered for TPUs: {DECIDES}")
    return ValueError(
        f"{who} cannot be lowered for TPUs: {first_line(error)}; write it in operations that torch.export takes"
    )


@contextmanager
def _refusing(network: nn.Module, otherwise: str = "") -> Iterator[None]:
    """Turn whatever torch.export raises into a ValueError with a layer's name: its errors have no base in common. What
    it prints of its own internals is dropped."""
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise refused(network, error, otherwise) from error
    finally:
        log.setLevel(level)


def _any_number(tree: Any) -> Any:
    """Return the shapes with any number in dimension 0, the same one in all."""
    batch = torch.export.Dim("batch")
    return pytree.tree_map(lambda x: {0: batch} if isinstance(x, Tensor) and x.ndim else None, tree)


def refuse_what_no_program_is(traced: TracedProgram) -> None:
    """Raise ValueError, with the layer's name and the cure, where a program in functional operators is not a
    function of its inputs alone."""
    signature, whole = traced.program.graph_signature, named_layer(traced.network, "")
    for given in signature.input_specs:
        if given.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            raise ValueError(f"{whole} holds {given.target}, which is not a tensor: make it one")
    if any(made.kind is OutputKind.USER_INPUT_MUTATION for made in signature.output_specs):
        raise ValueError(f"{whole} writes into its inputs: let it work on a copy, x.clone()")
    for node in traced.program.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ValueError(
                f"{traced.layer(node)} draws random numbers ({node.target}), and jax draws others than torch: use "
                f"nn.Dropout, which is left out, or stablehlo(training=False) where only the training step draws"
            )


def user_outputs(program: torch.export.ExportedProgram) -> list[int]:
    """Return the places of the outputs that are tensors and the user's."""
    return [
        at
        for at, made in enumerate(program.graph_signature.output_specs)
        if made.kind is OutputKind.USER_OUTPUT and isinstance(made.arg, TensorArgument)
    ]


def buffers_written(program: torch.export.ExportedProgram) -> Mapping[int, str]:
    """Return the buffers that the program changes, by the places of their new values in its outputs."""
    return {
        at: made.target
        for at, made in enumerate(program.graph_signature.output_specs)
        if made.kind is OutputKind.BUFFER_MUTATION and made.target is not None
    }


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
    """Return the shapes and types of arrays. ``batch``: replaces the number of rows; None: that stays."""
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
