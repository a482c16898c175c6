"""Records by hooks what every submodule of a network computes in a step, its outputs and the gradients of them, and
finds where a step of several ranks first computes something else than the step of one device."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

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


Kind = Literal["equal on each rank", "concatenated", "sum over ranks", "differs"]
TOLERANCE = 1e-9
"""The share of the largest value that rounding may move in float64."""


@dataclass(frozen=True)
class Relation:
    """The way in which the ranks' tensors make the one device's."""

    kind: Kind
    dim: int | None = None
    """The dimension along which they are concatenated, in rank order."""
    factor: float = 1.0
    """The factor that the ranks' tensor has to be multiplied by."""

    @property
    def same(self) -> bool:
        return self.kind != "differs" and self.factor == 1.0

    def __str__(self) -> str:
        along = f" along dimension {self.dim}" if self.dim is not None else ""
        scaled = f", but {1 / self.factor:.6g} times as large" if self.factor != 1.0 else ""
        return f"{self.kind}{along}{scaled}"


@dataclass(frozen=True)
class TapDifference:
    """The first submodule that computes something else."""

    module: str
    """The name of the submodule, "" for the network itself; for a parameter's gradient, the name of the parameter."""
    call: int
    what: Literal["output", "gradient of the output", "gradient of the parameter"]
    relation: Relation

    def __str__(self) -> str:
        name = self.module or "the network"
        again = f" (call {self.call + 1})" if self.call else ""
        return f"the {self.what} of {name}{again} is the first that is not one device's: {self.relation}"


def first_difference(
    whole: Taps, parts: Sequence[Taps], *, rows: Sequence[int] | None = None, tolerance: float = TOLERANCE
) -> TapDifference | None:
    """Returns what the ranks (``parts``, in rank order) compute otherwise than one device (``whole``): the first output
    in the order of the forward pass; where all are the same, the first gradient in the order of the backward pass,
    which is the reverse; then the first gradient of a parameter. None where everything is the same.

    ``rows``: how many rows of the batch each rank had, where the batch is divided; a rank without any may have computed
    with rows that do not count. A submodule that no rank has called is passed over, and one that only some have called
    is compared for those.
    """
    order = [(tap, [_calls(part, whole, tap) for part in parts]) for tap in whole.calls]
    for tap, called in order:
        found = _first(tap.outputs, [[t.outputs for t in taps] for taps in called], rows, tolerance)
        if found is not None:
            return TapDifference(tap.module, tap.call, "output", found)
    for tap, called in reversed(order):
        found = _first(tap.gradients, [[t.gradients for t in taps] for taps in called], rows, tolerance)
        if found is not None:
            return TapDifference(tap.module, tap.call, "gradient of the output", found)
    for name, gradient in whole.parameters.items():
        held = [part.parameters[name] for part in parts if name in part.parameters]
        relation = related(gradient, held, tolerance=tolerance) if held else None
        if relation is not None and not relation.same:
            return TapDifference(name, 0, "gradient of the parameter", relation)
    return None


def related(whole: Tensor, parts: Sequence[Tensor], *, tolerance: float = TOLERANCE) -> Relation:
    """Returns how these tensors of the ranks make the whole one: the first way that holds; else the first that holds
    but for one factor; else they differ."""
    ways = list(_ways(whole, parts))
    for kind, dim, make in ways:
        if all(_close(whole, made, tolerance) for made in make()):
            return Relation(kind, dim)
    for kind, dim, make in ways:
        factors = [_factor(whole, made) for made in make()]
        if all((f is not None and f == factors[0]) or _near(f, factors[0], tolerance) for f in factors):
            factor = factors[0]
            if factor is not None and all(_close(whole, made * factor, tolerance) for made in make()):
                return Relation(kind, dim, factor)
    return Relation("differs")


def _ways(whole: Tensor, parts: Sequence[Tensor]) -> Iterator[tuple[Kind, int | None, Callable[[], list[Tensor]]]]:
    shapes = [tuple(part.shape) for part in parts]
    if all(shape == tuple(whole.shape) for shape in shapes):
        yield "equal on each rank", None, lambda: [part.to(_wide(part)) for part in parts]
        if len(parts) > 1:
            yield "sum over ranks", None, lambda: [torch.stack([p.to(_wide(p)) for p in parts]).sum(0)]
    for dim in range(whole.ndim):
        if all(part.ndim == whole.ndim for part in parts) and _fits(tuple(whole.shape), shapes, dim):
            yield "concatenated", dim, lambda dim=dim: [torch.cat([p.to(_wide(p)) for p in parts], dim)]  # type: ignore[misc]


def _fits(whole: tuple[int, ...], shapes: Sequence[tuple[int, ...]], dim: int) -> bool:
    others = all(shape[:dim] + shape[dim + 1 :] == whole[:dim] + whole[dim + 1 :] for shape in shapes)
    return others and sum(shape[dim] for shape in shapes) == whole[dim]


def _calls(part: Taps, whole: Taps, tap: Tap) -> list[Tap]:
    """Returns a rank's calls that stand for this one; several where it computed its rows in micro-batches."""
    mine, calls = part.calls_of(tap.module), len(whole.calls_of(tap.module))
    return mine[tap.call :: calls] if len(mine) % calls == 0 else mine[tap.call : tap.call + 1]


def _first(
    whole: Sequence[Tensor | None],
    parts: Sequence[Sequence[Sequence[Tensor | None]]],
    rows: Sequence[int] | None,
    tolerance: float,
) -> Relation | None:
    """Returns how the first of a call's tensors that differs does; ``parts``: the tensors of each rank, of each of its
    calls."""
    for number, tensor in enumerate(whole):
        held = []
        for rank, calls in enumerate(parts):
            own = [found for call in calls if len(call) > number and (found := call[number]) is not None]
            if own:
                joined = own[0] if len(own) == 1 else torch.cat(own) if own[0].ndim else torch.stack(own).mean()
                held.append((rank, joined))
        if tensor is None or not held:  # a gradient that nothing asked for; a submodule that no rank has called
            continue
        given = [t for _, t in held]
        cut = [t[: rows[rank]] if t.ndim else t for rank, t in held] if rows is not None else given
        relation = related(tensor, cut, tolerance=tolerance)
        if not relation.same and rows is not None:  # of a submodule whose dimension 0 is not the batch
            again = related(tensor, given, tolerance=tolerance)
            relation = again if again.same else relation
        if not relation.same:
            return relation
    return None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _close(whole: Tensor, made: Tensor, tolerance: float) -> bool:
    if not whole.numel():
        return True
    a, b = whole.to(_wide(whole)), made.to(_wide(whole))
    same = (a == b) | (a.isnan() & b.isnan())
    largest = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return bool((same | ((a - b).abs() <= tolerance * largest)).all())


def _factor(whole: Tensor, made: Tensor) -> float | None:
    """Returns the factor that ``made`` has to be multiplied by to be nearest to ``whole``; None where there is none."""
    a, b = whole.to(_wide(whole)), made.to(_wide(whole))
    square = float((b * b.conj()).sum().real)
    return float((a * b.conj()).sum().real) / square if square and square < float("inf") else None


def _near(a: float | None, b: float | None, tolerance: float) -> bool:
    return a is not None and b is not None and abs(a - b) <= tolerance * max(abs(a), abs(b))
