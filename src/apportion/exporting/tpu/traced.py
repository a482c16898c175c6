"""A network and its loss as programs of torch.export, and the layer to blame where one cannot be had.

::

    net ------------ torch.export, in evaluation mode --> outputs of inputs
    loss(net, y) --- torch.export, in training mode ----> loss of inputs and targets, and buffers that change
"""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from apportion.core.torch_private import pytree
from apportion.exporting.blamed_layer import CHOOSE, ONE_WAY, blamed_layer, decides, first_line, layer_of
from apportion.exporting.target import Inputs, called

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
