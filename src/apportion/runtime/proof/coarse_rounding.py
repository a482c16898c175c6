"""Operations that round more coarsely than the precision that a network is trained in, as within an autocast block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from apportion.core import torch_private


def eps_of(precision: str) -> float:
    """Returns the rounding of a type, by its name."""
    return float(torch.finfo(getattr(torch, precision)).eps)


@final
class Coarse(torch_private.DispatchMode):
    """Sees what is computed in a type that is coarser than the precision.

    ``moves``: every number that comes of such an operation, or of one in the precision itself where that is shorter
    than the weights' own, goes to its neighbour, up or down, which is what the rounding of another order of the same
    sum may do.
    """

    def __init__(self, precision: str, *, moves: bool = False) -> None:
        super().__init__()
        self._eps, self._moves = eps_of(precision), moves
        self._least = max(self._eps, 2 * eps_of("float32"))
        """The least rounding of a type whose numbers are moved."""
        self._generator = torch.Generator().manual_seed(0)
        self.types: set[str] = set()
        """The names of the types that are coarser than the precision and were met."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, tuple | list):
            returned = [self._seen(func, at, one) for at, one in enumerate(result)]
            return type(result)(returned) if type(result) in (tuple, list) else result
        return self._seen(func, 0, result)

    def _seen(self, func: Any, at: int, result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        eps = torch.finfo(result.dtype).eps
        if eps > self._eps:
            self.types.add(str(result.dtype).removeprefix("torch."))
        if not self._moves or eps < self._least:
            return result
        returns = func._schema.returns
        # An alias of an argument, or an argument that was written into, must not be replaced by another tensor.
        fresh = at < len(returns) and returns[at].alias_info is None
        return moved(result, eps, self._generator) if fresh else result


@contextmanager
def coarse_types(precision: str, *, moves: bool) -> Iterator[set[str]]:
    """Gives the types that what is computed in this context uses, of those that are coarser than the precision."""
    with Coarse(precision, moves=moves) as mode:
        yield mode.types


def moved(tensor: Tensor, relative: float, generator: torch.Generator) -> Tensor:
    """Returns the tensor with every number multiplied by a little more or less than one, drawn from the generator."""
    if tensor.layout is not torch.strided:
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, torch.float64) * 2 - 1
    return (tensor * (1 + relative * signs)).to(tensor.dtype)
