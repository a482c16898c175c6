"""Records by hooks what every submodule of a network computes in a step: its outputs, and the gradients of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from apportion.core import tree


@dataclass
class Tap:
    """One call of a submodule."""

    module: str
    """The submodule's first name in the network; "" for the network itself."""
    call: int
    """The number of this call among the submodule's calls; the first is 0."""
    outputs: list[Tensor]
    """Copies of the tensors in the output of the call, in the order of the pytree."""
    gradients: list[Tensor | None]
    """The gradient of each output, summed over all backward passes; None where none arrived."""


@dataclass
class Taps:
    """The record of a step, which can be sent to another process: tensors on the CPU, names and numbers."""

    calls: list[Tap] = field(default_factory=list)
    """The calls in the order in which they ended: a layer stands before those that it is a part of."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """The gradients that the backward passes have given, by parameter name; of a rank of several this is its own
    term."""

    def calls_of(self, module: str) -> list[Tap]:
        """Returns the calls of one submodule, in their order."""
        return [tap for tap in self.calls if tap.module == module]

    def save(self, path: str | Path) -> None:
        """Writes the record into a file of tensors, which runs no code where it is read."""
        tensors = {f"parameter/{name}": tensor for name, tensor in self.parameters.items()}
        for number, tap in enumerate(self.calls):
            tensors |= {f"output/{number}/{at}": tensor for at, tensor in enumerate(tap.outputs)}
            tensors |= {f"gradient/{number}/{at}": t for at, t in enumerate(tap.gradients) if t is not None}
        pairs = [name for name, tensor in tensors.items() if tensor.is_complex()]  # the file has no complex numbers
        layout = {"calls": [[tap.module, tap.call, len(tap.outputs)] for tap in self.calls], "pairs": pairs}
        plain = {n: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for n, t in tensors.items()}
        save_file({n: t.contiguous() for n, t in plain.items()}, path, {"taps": json.dumps(layout)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads the record of a file that ``save`` has written."""
        with safe_open(path, "pt") as file:
            layout = json.loads(file.metadata()["taps"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a mapping)
        tensors |= {name: torch.view_as_complex(tensors[name]) for name in layout["pairs"]}
        calls = [
            Tap(
                module,
                call,
                [tensors[f"output/{number}/{at}"] for at in range(outputs)],
                [tensors.get(f"gradient/{number}/{at}") for at in range(outputs)],
            )
            for number, (module, call, outputs) in enumerate(layout["calls"])
        ]
        own = {n.removeprefix("parameter/"): t for n, t in tensors.items() if n.startswith("parameter/")}
        return cls(calls, own)


@contextmanager
def taps(module: nn.Module) -> Iterator[Taps]:
    """Record what the submodules compute until the context is left. What is computed stays the same to the bit.

    Submodules that are compiled or scripted, and what is within them, are left out: a hook would change how they run.
    """
    found, handles = Taps(), []
    counted: dict[str, int] = defaultdict(int)
    for name, layer in _tapped(module):
        handles.append(layer.register_forward_hook(_recorder(found, name, counted)))
    named = list(module.named_parameters())
    for name, parameter in named:
        if parameter.requires_grad:
            # A hook on the tensor sees the gradient before it is accumulated or reduced over the ranks.
            handles.append(parameter.register_hook(_adder(found.parameters, name)))
    try:
        yield found
        for name, parameter in named:
            if parameter.grad is not None and name not in found.parameters:  # computed outside autograd's own way
                found.parameters[name] = _copied(parameter.grad)
    finally:
        for handle in handles:
            handle.remove()


def _tapped(module: nn.Module, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen or _compiled(module):
        return
    seen.add(id(module))
    yield name, module
    for inner, layer in module.named_children():
        yield from _tapped(layer, f"{name}.{inner}".lstrip("."), seen)


def _compiled(module: nn.Module) -> bool:
    compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    return compiled or isinstance(module, torch.jit.ScriptModule)


def _recorder(found: Taps, name: str, counted: dict[str, int]) -> Callable[..., None]:
    def record(module: nn.Module, inputs: Any, outputs: Any) -> None:
        tensors = tree.tensors(outputs)
        tap = Tap(name, counted[name], [_copied(t) for t in tensors], [None] * len(tensors))
        counted[name] += 1
        found.calls.append(tap)
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(_keeper(tap, number))

    return record


def _keeper(tap: Tap, number: int) -> Callable[[Tensor], None]:
    def add(gradient: Tensor) -> None:
        before = tap.gradients[number]
        tap.gradients[number] = _copied(gradient) if before is None else before + _copied(gradient)

    return add


def _adder(found: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def add(gradient: Tensor) -> None:
        found[name] = found[name] + _copied(gradient) if name in found else _copied(gradient)

    return add


def _copied(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return (plain.to_dense() if plain.layout != torch.strided else plain).to("cpu", copy=True)
