"""Tensors that a forward makes in a size of those it is given, as nodes of its graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from apportion.core.torch_private import pytree

_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")


@contextmanager
def factories_traced() -> Iterator[None]:
    """Make tensors that are built in a size of the traced ones become nodes of the graph, too."""

    def traced(function: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            proxies = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, fx.Proxy)]
            if not proxies:
                return function(*args, **kwargs)
            return proxies[0].tracer.create_proxy("call_function", function, args, kwargs)

        return make

    originals = {name: getattr(torch, name) for name in _FACTORIES}
    for name, original in originals.items():
        setattr(torch, name, traced(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
