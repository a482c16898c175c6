"""Which tensors of a forward pass depend on its parameters and inputs, and which are constants that it makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apportion.core import tree

WIDE = (torch.float64, torch.complex128)


class ComputedValues:
    """Follows the operations of a forward pass in float64, by the memory that tensors lie in.

    Computed is what comes of parameters, of buffers and of floating inputs. What comes of numbers that the forward
    makes by itself (a causal mask, an index, a random number) is a constant: the same on every rank, however coarsely
    it is rounded. Whole numbers and truth values are exact, and nothing that they are made into is computed.
    """

    def __init__(self) -> None:
        self._computed: set[int] = set()
        self._constant: set[int] = set()

    def begin(self, layer: nn.Module, inputs: Any = ()) -> None:
        """Takes note of a layer that is about to be called: its own parameters and buffers are computed. ``inputs``:
        those of the network, which are computed too."""
        own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        found = {place for t in (*own, *tree.tensors(inputs)) if (place := _place(t))}
        self._computed |= found
        self._constant -= found

    def is_computed(self, tensor: Tensor) -> bool:
        """Tells whether a tensor depends on parameters or inputs. One of unknown origin does where it has float64,
        which is what they have."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return False
        place = _place(tensor)
        return place in self._computed or (tensor.dtype in WIDE and (not place or place not in self._constant))

    def take(self, func: Any, args: Iterable[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Takes in an operation with what it has given; tells whether that is computed."""
        computed = any(self.is_computed(t) for t in _tensors((args, kwargs)))
        returns = func._schema.returns
        for at, one in enumerate(result if isinstance(result, tuple | list) else (result,)):
            if not isinstance(one, Tensor) or not (place := _place(one)):
                continue
            fresh = at < len(returns) and returns[at].alias_info is None
            if computed:
                self._computed.add(place)
                self._constant.discard(place)
            elif fresh:  # memory that held something else before
                self._computed.discard(place)
                self._constant.add(place)
        return computed


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _place(tensor: Tensor) -> int:
    """Returns the address of the memory that a tensor lies in; 0 where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or one of another class
        return 0
