"""Tests of a distributed training step: that it trains, on several ranks, the network that one process trains.

The public names; each is imported when it is first used, as torch is. ``apportion.testing.plugin`` is the plugin that
pytest finds by itself.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.testing.same_network import assert_same_network as assert_same_network
    from apportion.testing.verdict import DifferentNetwork as DifferentNetwork

_HOMES = {"DifferentNetwork": "verdict", "assert_same_network": "same_network"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"apportion.testing has no {name!r}: its public names are {', '.join(__all__)}")
    found = getattr(importlib.import_module(f"apportion.testing.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
