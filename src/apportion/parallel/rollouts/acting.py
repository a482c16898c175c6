"""How the network acts: what it gives for a handful of observations, in the fastest way that gives the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

Array = NDArray[Any]


@final
class TorchActing:
    """The policy's numbers by the module itself, without gradients."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def __call__(self, observations: Array) -> Array:
        parameter = next(self._network.parameters())
        with torch.inference_mode():
            given = torch.from_numpy(observations)
            given = given.to(parameter.dtype) if given.is_floating_point() else given
            numbers: Tensor = self._network(given)[0]
            return numbers.numpy()


class _Layers(fx.Tracer):
    """Traces down to single layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential) and super().is_leaf_module(m, module_qualified_name)


def _linear(layer: nn.Linear) -> Callable[[Array], Array]:
    weight, bias = layer.weight.detach().numpy().T, None if layer.bias is None else layer.bias.detach().numpy()
    return (lambda x: x @ weight) if bias is None else (lambda x: x @ weight + bias)


_ELEMENTWISE: dict[type[nn.Module], Callable[[Array], Array]] = {
    nn.Tanh: np.tanh,
    nn.ReLU: lambda x: np.maximum(x, 0),
    nn.Identity: lambda x: x,
}


@final
class NumpyActing:
    """The policy's numbers of a plain multilayer perceptron by numpy, whose calls cost a tenth of torch's. Raises
    ValueError for a network that is none."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        graph = _Layers().trace(network)
        (output,) = (node for node in graph.nodes if node.op == "output")
        result = output.args[0]
        self._order: list[fx.Node] = []
        self._root = result[0] if isinstance(result, tuple) else result
        self._follow(self._root)
        self._weights: tuple[int, ...] = ()

    def _follow(self, node: Any) -> None:
        if not isinstance(node, fx.Node) or node in self._order:
            return
        if node.op == "placeholder":
            return
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            raise ValueError(f"{node} is no layer of a multilayer perceptron")
        layer = self._network.get_submodule(str(node.target))
        if type(layer) is not nn.Linear and type(layer) not in _ELEMENTWISE:
            raise ValueError(f"{node.target} is a {type(layer).__name__}, which is no layer of a multilayer perceptron")
        self._follow(node.args[0])
        self._order.append(node)

    def refresh(self) -> None:
        """Look where the weights are; called before each rollout."""
        layers = [self._network.get_submodule(str(node.target)) for node in self._order]
        at = tuple(p.data_ptr() for layer in layers for p in layer.parameters())
        if at != self._weights:
            self._weights = at
            self._calls = [
                _linear(layer) if isinstance(layer, nn.Linear) else _ELEMENTWISE[type(layer)] for layer in layers
            ]
            self._dtype = next(self._network.parameters()).detach().numpy().dtype

    def __call__(self, observations: Array) -> Array:
        x = observations.astype(self._dtype, copy=False)
        for call in self._calls:
            x = call(x)
        return x


@final
class Acting:
    """The way in which a network acts, found when it first does, and its weights wherever they are now."""

    def __init__(self) -> None:
        self._network: nn.Module | None = None

    def by(self, network: nn.Module) -> Callable[[Array], Array]:
        """The function from observations to the policy's numbers, until the weights are moved."""
        if network is not self._network:
            self._network, self._way = network, _way(network)
        if isinstance(self._way, NumpyActing):
            self._way.refresh()
        return self._way


def _way(network: nn.Module) -> TorchActing | NumpyActing:
    try:
        return NumpyActing(network)
    except Exception:  # it cannot be traced, or is no multilayer perceptron
        return TorchActing(network)
