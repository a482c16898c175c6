"""Which parameter's value or gradient a tensor is, also where the tensor is another object with the same memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from apportion.script_check.recording.modules import Networks
from apportion.script_check.recording.names import modules_held, plain
from apportion.script_check.recording.recorder import Recorder

_Place = tuple[int, int]
"""The address of a tensor's first element, and the number of elements."""


class TensorNames:
    """Names of tensors that belong to parameters of this rank's networks.

    The addresses are read again when a tensor is not among them and the script has gone on since: that is once in a
    forward, a backward or a step at most.
    """

    def __init__(self, recorder: Recorder, networks: Networks) -> None:
        self._recorder, self._networks = recorder, networks
        self._known = dict[_Place, tuple[weakref.ref[Tensor], str, bool]]()
        self._read_at: tuple[int, ...] = ()
        self.backwards = 0
        """The number of backward passes begun or ended so far."""

    def find(self, tensor: Tensor) -> tuple[str, bool] | None:
        """Returns the name of the parameter that a tensor belongs to and whether it is its gradient; None if it belongs
        to no parameter."""
        if isinstance(tensor, nn.Parameter) and (name := self._networks.known_name(tensor)) is not None:
            return name, False
        place = _place(tensor)
        if place is None:
            return None
        found = self._checked(place)
        now = (self._recorder.step, self.backwards, self._networks.forwards)
        if found is None and (now != self._read_at or not self._networks.roots()):
            self._read(now)
            found = self._checked(place)
        return found

    def _checked(self, place: _Place) -> tuple[str, bool] | None:
        """What is known of a place, if the parameter is still there: its memory may have been given to another."""
        if place not in self._known:
            return None
        reference, name, gradient = self._known[place]
        parameter = reference()
        tensor = None if parameter is None else parameter.grad if gradient else parameter
        return (name, gradient) if tensor is not None and _place(tensor) == place else None

    def _read(self, now: tuple[int, ...]) -> None:
        self._read_at = now
        self._known = {}
        for name, parameter in self._parameters():
            for tensor, gradient in ((parameter.grad, True), (parameter, False)):
                place = None if tensor is None else _place(tensor)
                if place is not None:
                    # Of a parameter that two networks share, the name in the first of them stays.
                    self._known.setdefault(place, (weakref.ref(parameter), name, gradient))

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        roots = self._networks.roots()
        for root in roots:
            yield from root.parameters()
        if not roots:  # before the first forward: the modules that the script's variables hold, the largest first
            held = list(modules_held(self._recorder.user_frames()))
            for label, module in sorted(held, key=lambda each: -len(list(each[1].modules()))):
                for name, parameter in module.named_parameters():
                    yield f"{label}.{plain(name)}", parameter


def _place(tensor: Tensor) -> _Place | None:
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    return (tensor.data_ptr(), tensor.numel()) if tensor.numel() else None
