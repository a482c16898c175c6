"""Names of parameters and buffers: those of the module that a variable of the script holds, without what wrappers add
to them, so that they are the same on every rank and in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn

from apportion.core.torch_private import modules_of

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_DEEPEST = 64
_LONGEST = 64
"""The longest list of a script in which networks are looked for."""


class Root:
    """The module of one variable of the script, and the names of what it holds. ``label``: the variable."""

    def __init__(self, label: str, module: nn.Module) -> None:
        self.label, self.module = label, module

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The names and parameters, each parameter once."""
        for name, parameter in self.module.named_parameters():
            yield f"{self.label}.{plain(name)}", parameter

    def tied(self) -> dict[str, str]:
        """The further names of parameters that have several, with the name under which each is recorded."""
        first = {id(parameter): name for name, parameter in self.parameters()}
        every = ((f"{self.label}.{plain(n)}", p) for n, p in self.module.named_parameters(remove_duplicate=False))
        return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The names and buffers."""
        for name, buffer in self.module.named_buffers():
            yield f"{self.label}.{plain(name)}", buffer

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The names and modules, wrappers left out."""
        for name, module in self.module.named_modules():
            if name.rpartition(".")[2] not in _WRAPPERS:
                yield f"{self.label}.{plain(name)}".rstrip("."), module


def plain(name: str) -> str:
    """Returns a dotted name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside of wrappers such as DistributedDataParallel and a compiled module."""
    for _ in range(_DEEPEST):
        for attribute in _WRAPPERS[:2]:
            inner = modules_of(module).get(attribute)
            if inner is not None and len(modules_of(module)) == 1:
                module = inner
                break
        else:
            return module
    return module


def root_of(module: nn.Module, frames: Iterable[FrameType]) -> Root:
    """Returns the largest module that a variable of the script's frames holds and that contains ``module``; where no
    variable does, ``module`` itself, named after its class."""
    inner = unwrapped(module)
    best: Root | None = None
    size = 0
    seen = set[int]()
    for label, value in (variable for frame in frames for variable in _variables(frame)):
        if id(value) in seen:
            continue
        seen.add(id(value))
        contained = list(value.modules())
        if len(contained) > size and any(each is inner for each in contained):
            best, size = Root(label, value), len(contained)
    return best or Root(type(inner).__name__, inner)


def modules_held(frames: Iterable[FrameType]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that variables of the script's frames hold, wrappers taken off."""
    return ((label, unwrapped(module)) for frame in frames for label, module in _variables(frame))


def variable_of(tensor: Tensor, frames: Iterable[FrameType]) -> str | None:
    """Returns the variable of the script's frames that holds a tensor: as an entry of a list or dict, such as
    ``weights[0]``, rather than by itself, as a loop's variable holds another one in each turn; None where there is
    none."""
    alone: str | None = None
    for variables in (each for frame in frames for each in (frame.f_locals, frame.f_globals)):
        for label, value in list(variables.items()):
            if value is tensor:
                alone = alone or label
            elif type(value) in (list, tuple, dict) and len(value) <= _LONGEST:
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, held in list(items):
                    if held is tensor:
                        return f"{label}[{key}]"
    return alone


def _variables(frame: FrameType) -> Iterator[tuple[str, nn.Module]]:
    """The modules that variables of a frame hold, alone or in a list, and attributes of the objects that they hold."""
    for variables in (frame.f_locals, frame.f_globals):
        for label, value in list(variables.items()):
            if isinstance(getattr(value, "__dict__", None), Mapping) and not isinstance(value, nn.Module | type):
                for name, held in list(vars(value).items()):
                    yield from _modules(name, held)
            yield from _modules(label, value)


def _modules(label: str, value: Any) -> Iterator[tuple[str, nn.Module]]:
    if issubclass(type(value), nn.Module):  # isinstance asks objects for their class, and some warn
        yield label, value
    elif type(value) in (list, tuple, dict) and len(value) <= _LONGEST:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, held in list(items):
            if issubclass(type(held), nn.Module):
                yield f"{label}[{key}]", held
