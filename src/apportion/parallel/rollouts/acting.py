"""How the network acts: what it gives for a handful of observations, in the fastest way that gives the same.

A perceptron of 64 units asks of torch 8 us a layer for 16 observations, nearly all of it for the call, and of numpy 2.
Networks that are no plain perceptrons act by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from apportion.core import tree
from apportion.core.torch_private import hooked
from apportion.parallel.ops.factored_linear import computes_as_linear
from apportion.parallel.rollouts.observations import ObservationFormat, as_tensor
from apportion.parallel.rollouts.unrolled import MOST_DEVIATIONS, Unrolled

Array = NDArray[Any]
MOST_WEIGHTS = 1 << 16
"""The most weights of a layer that numpy multiplies by: above, the products take longer than the calls, and torch's are
as fast as numpy's."""


@final
class TorchActing:
    """The policy's numbers by the module itself, without gradients. ``observed``: how observations are tensors; None:
    each is one."""

    def __init__(self, unrolled: Unrolled, observed: ObservationFormat | None = None) -> None:
        self._unrolled, self._observed = unrolled, observed

    def refresh(self) -> None:
        """Nothing is kept of the weights."""

    def __call__(self, observations: Array, state: Any, begins: Array) -> tuple[Array, Any]:
        unrolled = self._unrolled
        parameter = next(unrolled.parameters())
        with torch.no_grad():  # and not inference_mode: the state goes into a backward pass
            if self._observed is None or not self._observed.structured:
                given: Any = as_tensor(observations).to(parameter.device)
            else:
                given = tree.cast(self._observed.tensors(observations), parameter.device, None)
            given = unrolled.normalised(given)
            if unrolled.begin is None:
                numbers: Tensor = unrolled.network(given)[0]
                return numbers.cpu().numpy(), ()
            state = tree.cast(state, parameter.device, parameter.dtype)
            state = unrolled.begun_again(state, torch.from_numpy(begins).to(parameter.device))
            numbers, _, state = unrolled.network(given, state)
            return numbers.cpu().numpy(), state


class _Layers(fx.Tracer):
    """Traces down to single layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, nn.Sequential):
            return False
        return computes_as_linear(m) or super().is_leaf_module(m, module_qualified_name)


def _linear(layer: nn.Linear) -> Callable[[Array], Array]:
    weight, bias = layer.weight.detach().numpy().T, None if layer.bias is None else layer.bias.detach().numpy()

    def call(x: Array) -> Array:
        y: Array = np.dot(x, weight)
        if bias is not None:
            y += bias
        return y

    return call


_ELEMENTWISE: dict[type[nn.Module], Callable[[Array], Array]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0, out=x),
    nn.Identity: lambda x: x,
}
"""What is done to the outcome of another layer, in place."""


@final
class NumpyActing:
    """The policy's numbers of a plain multilayer perceptron by numpy. Raises ValueError for a network that is none."""

    def __init__(self, unrolled: Unrolled) -> None:
        if unrolled.begin is not None:
            raise ValueError("a network with a recurrent state is not a multilayer perceptron")
        self._unrolled, self._network = unrolled, unrolled.network
        graph = _Layers().trace(self._network)
        (output,) = (node for node in graph.nodes if node.op == "output")
        result = output.args[0]
        self._order: list[fx.Node] = []
        self._follow(result[0] if isinstance(result, tuple) else result)
        if not self._order or not isinstance(self._network.get_submodule(str(self._order[0].target)), nn.Linear):
            raise ValueError("a multilayer perceptron begins with a linear layer")
        self._weights: tuple[int, ...] = ()

    def _follow(self, node: Any) -> None:
        if not isinstance(node, fx.Node) or node in self._order:
            return
        if node.op == "placeholder":
            return
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            raise ValueError(f"{node} is not a layer of a multilayer perceptron")
        layer = self._network.get_submodule(str(node.target))
        if not computes_as_linear(layer) and type(layer) not in _ELEMENTWISE:
            raise ValueError(f"{node.target} is a {type(layer).__name__}, and not a layer of a multilayer perceptron")
        if hooked(layer, forward_only=True):
            raise ValueError(f"{node.target} has hooks, which numpy would not call")
        self._follow(node.args[0])
        self._order.append(node)

    def refresh(self) -> None:
        """Look where the weights are, and what is known of the observations; called before each rollout."""
        layers = [self._network.get_submodule(str(node.target)) for node in self._order]
        at = tuple(p.data_ptr() for layer in layers for p in layer.parameters())
        # The calls read the memory of the weights: an update in place needs no new ones, weights that were moved do.
        if at != self._weights:
            self._weights = at
            self._calls = [
                _linear(layer) if isinstance(layer, nn.Linear) else _ELEMENTWISE[type(layer)] for layer in layers
            ]
            self._dtype = next(self._network.parameters()).detach().numpy().dtype
        known = self._unrolled.observation_statistics
        self._known: tuple[Array, Array] | None = None
        if known is not None:
            self._known = known.mean.numpy(), known.deviation.numpy()

    def __call__(self, observations: Array, state: Any, begins: Array) -> tuple[Array, Any]:
        x = observations
        if self._known is not None:
            mean, deviation = self._known
            centred = (x.astype(np.float64) - mean) / deviation
            x = np.clip(centred, -MOST_DEVIATIONS, MOST_DEVIATIONS)
        x = x.astype(self._dtype, copy=False)
        for call in self._calls:
            x = call(x)
        return x, ()


@final
class Acting:
    """The way in which a network acts, found when it first does, and its weights wherever they are now."""

    def __init__(self) -> None:
        self._unrolled: nn.Module | None = None

    def by(
        self, unrolled: nn.Module, observations: Callable[[], tuple[Array, ObservationFormat]]
    ) -> NumpyActing | TorchActing:
        """The way in which it acts, until the weights are moved. ``observations``: makes some, to hold the ways against
        each other, and says how they are tensors."""
        if unrolled is not self._unrolled:
            assert isinstance(unrolled, Unrolled), "the network of an actor-critic is unrolled"
            self._unrolled, self._way = unrolled, fastest(unrolled, *observations())
        self._way.refresh()
        return self._way


def fastest(
    unrolled: Unrolled, observations: Array, observed: ObservationFormat | None = None
) -> NumpyActing | TorchActing:
    """The faster way of those that there are for this network. It is a function of the network and not of a clock:
    a run that is done again takes the same, and has the same bits."""
    by_torch = TorchActing(unrolled, observed)
    if observed is not None and observed.structured:  # a perceptron is given one array
        return by_torch
    if any(p.device.type != "cpu" for p in unrolled.parameters()):
        return by_torch
    if max((p.numel() for p in unrolled.parameters()), default=0) > MOST_WEIGHTS:
        return by_torch
    try:
        by_numpy = NumpyActing(unrolled)
    except Exception:  # it cannot be traced, or is not a multilayer perceptron
        return by_torch
    by_numpy.refresh()
    begins = np.ones(len(observations), dtype=bool)
    found, exact = by_numpy(observations, (), begins)[0], by_torch(observations, (), begins)[0]
    return by_numpy if np.allclose(found, exact, rtol=1e-4, atol=1e-5) else by_torch
