"""The last simulation, remembered by a hash of all that it depends on.

An export simulates what it has compiled and what it has read back from the file. Where both are the same to the last
bit, one simulation says what both compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from apportion.exporting.spiking.graph import SpikingGraph

_LAST: dict[str, Tensor] = {}


def remembered(graph: SpikingGraph, inputs: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """What ``compute`` gives, which must depend on the graph and the inputs alone."""
    key = fingerprint(graph, inputs)
    if key not in _LAST:
        found = compute()
        _LAST.clear()
        _LAST[key] = found
    return _LAST[key]


def fingerprint(graph: SpikingGraph, inputs: Tensor) -> str:
    """A hash of every number and name of a graph and of the inputs."""
    made = hashlib.sha256(repr((graph.edges, graph.timesteps, graph.current, graph.units)).encode())
    for node in graph.nodes:
        for one in fields(node):
            _add(made, one.name, getattr(node, one.name))
    _add(made, "inputs", inputs)
    return made.hexdigest()


def _add(made: hashlib._Hash, name: str, value: object) -> None:
    made.update(name.encode())
    if isinstance(value, Tensor):
        made.update(repr((value.shape, value.dtype)).encode())
        made.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        made.update(repr(value).encode())
