"""A loss with weights of its own, which no optimizer has: centres of classes, margins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from apportion.core.python_state.search import Search


def refuse_trained_loss(loss: Callable[..., Any] | None, model: nn.Module) -> None:
    """Raise ValueError where the loss keeps tensors that ask for a gradient and are not the model's: an optimizer is
    made of the model's parameters, so that they would stay as they are without a word."""
    if loss is None:
        return
    own = {id(p) for p in model.parameters()}
    for name, tensor in _trained(loss):
        if id(tensor) not in own:
            raise ValueError(
                f"loss= keeps {name} of shape {tuple(tensor.shape)}, which asks for a gradient, and the optimizer has "
                "the parameters of the model alone: if it is to be trained, make it a part of the model, whose forward "
                "returns what the loss needs of it; if not, call requires_grad_(False) on it"
            )


def _trained(loss: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a loss can reach and that ask for a gradient, by name."""
    search = Search()
    search.visit("loss", loss)
    for value in list(search.seen.values()):
        if isinstance(value, nn.Module):
            yield from ((f"{type(value).__name__}.{n}", p) for n, p in value.named_parameters() if p.requires_grad)
    for value in list(search.seen.values()):
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            yield "a parameter" if isinstance(value, nn.Parameter) else "a tensor", value
    for scope in search.scopes:
        for key in scope.names():
            value = scope.mapping.get(key)
            if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
                yield scope.name.partition(".")[2] + f".{key}" if "." in scope.name else key, value
