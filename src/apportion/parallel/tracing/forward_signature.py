"""The way in which a forward is called that is decorated, or that takes any number of arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from apportion.core import tree


class Given(NamedTuple):
    """The way in which a forward is called."""

    names: tuple[str, ...]
    """The names of the values that the forward is given, in order."""
    keywords: tuple[str, ...]
    """The names, the last ones, of the values that are given by name."""


def opened(model: nn.Module, inputs: Any) -> Given | None:
    """How a forward is called that is decorated or takes any number of arguments; None for any other forward, whose
    signature shows it."""
    forward: Any = model.forward
    kinds = {p.kind for p in inspect.signature(forward).parameters.values()}
    usual = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}
    if inputs is None or (kinds <= usual and not hasattr(forward, "__wrapped__")):
        return None
    given, named = tree.arguments(inputs)
    if named:
        return Given(tuple(named), tuple(named))
    count = len(given)
    own = [n for n, p in inspect.signature(forward).parameters.items() if p.kind in usual]
    return Given(tuple(own[i] if i < len(own) else f"argument_{i}" for i in range(count)), ())


def with_names(run: Callable[..., Any], given: Given, root: nn.Module, *values: Any) -> Any:
    """Call a forward with the values of what it is given, in order."""
    count = len(given.names) - len(given.keywords)
    return run(root, *values[:count], **dict(zip(given.keywords, values[count:], strict=True)))
