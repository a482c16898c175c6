"""Finds the random numbers that a network draws while it computes: dropout is turned off for a proof and named;
anything else is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from apportion.core.sampling.rng import plain_rng_states, strategy_is_drawing
from apportion.core.torch_private import DispatchMode
from apportion.runtime.proof.computed_values import ComputedValues

NARROW = (torch.float32, torch.bfloat16, torch.float16)
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextmanager
def without_dropout() -> Iterator[set[str]]:
    """Makes dropout pass everything on, in this process. Gives the functions that would have dropped something."""
    used: set[str] = set()
    functional: Any = nn.functional
    originals = {name: getattr(functional, name) for name in (*_DROPOUTS, "scaled_dot_product_attention")}

    def passing(name: str) -> Callable[..., Any]:
        def pass_on(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            if training and p > 0:
                used.add(f"{name}(p={p:g})")
            return input

        return pass_on

    def attention(*arguments: Any, **options: Any) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        options = {**dict(zip(names, arguments, strict=False)), **options}
        if options.get("dropout_p", 0.0) > 0:
            used.add(f"attention(dropout_p={options['dropout_p']:g})")
        return originals["scaled_dot_product_attention"](**{**options, "dropout_p": 0.0})

    for name in _DROPOUTS:
        setattr(functional, name, passing(name))
    functional.scaled_dot_product_attention = attention
    try:
        yield used
    finally:
        for name, original in originals.items():
            setattr(functional, name, original)


def silence_recurrent_dropout(model: nn.Module) -> set[str]:
    """Sets dropout between the layers of nn.LSTM, GRU and RNN, which is inside their kernels, to 0; returns where it
    was."""
    found = set()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.RNNBase) and layer.dropout > 0:
            found.add(f"{name or type(layer).__name__}(dropout={layer.dropout:g})")
            layer.dropout = 0.0
    return found


class Observed(DispatchMode):
    """Sees every operation of a model's forward passes: which ones draw random numbers, and (in float64) which ones
    give less than float64 of what depends on parameters and inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: set[str] = set()
        self.narrow: set[str] = set()
        self.plain_draws: set[str] = set()
        """The names of Python's and numpy's generators that the model draws from."""
        self._before: tuple[object, ...] = ()
        self._depth = 0
        self._values = ComputedValues()

    def watch(self, model: nn.Module) -> None:
        """Watches the model from here on, whichever of its layers is called first."""
        for layer in model.modules():
            layer.register_forward_pre_hook(self._begin, with_kwargs=True)
            layer.register_forward_hook(self._end, always_call=True)

    def _begin(self, layer: nn.Module, *inputs: Any) -> None:
        self._values.begin(layer, () if self._depth else inputs)
        self._depth += 1
        if self._depth == 1:
            self._before = plain_rng_states()
            self.__enter__()

    def _end(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.__exit__(None, None, None)
            both = zip(("random", "numpy.random"), self._before, plain_rng_states(), strict=True)
            self.plain_draws.update(name for name, before, after in both if before != after)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        drawing = torch.Tag.nondeterministic_seeded in func.tags
        if drawing and not strategy_is_drawing() and _draws(func, args, kwargs or {}):
            self.draws.add(name)
        computed = self._values.take(func, args, kwargs or {}, result)
        first = result[0] if isinstance(result, tuple | list) and result else result
        if computed and isinstance(first, torch.Tensor) and first.dtype in NARROW:
            self.narrow.add(name)
        return result


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tells whether an operation draws: one that may (a dropout inside an attention) does so only with a probability
    above 0."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True
