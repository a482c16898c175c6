"""Records, and replays, what a script without a loader brings into its computation.

Such a script chooses its rows by itself: as one process it reads others, or draws others, than each of N ranks. Its
*constants* are the tensors without gradients that a function of torch receives beside tensors with gradients: inputs
next to weights, targets next to predictions, masks. In a pass that is fed with them, the constants of a step of one
process are replaced by those of a step of a rank, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from apportion.core.torch_private import in_backward
from apportion.script_check.recording.batches import recorded, restored, size
from apportion.script_check.recording.modules import Networks
from apportion.script_check.recording.recorder import Finished, Recorder

LARGEST = 1 << 28
"""The bytes of constants up to which they are recorded."""


class Constants:
    """The constants of this rank: recorded, or taken from the feed."""

    def __init__(self, recorder: Recorder, networks: Networks) -> None:
        self._recorder, self._networks = recorder, networks
        self._room = LARGEST
        self._windows: Sequence[Sequence[Any]] = recorder.feed.constants if recorder.feed is not None else []
        self.windows = 0
        """The number of steps that the script has asked for."""
        self._position = 0
        self.has_loader = False
        """Whether the script reads batches from a loader, whose rows are recorded as such."""

    @property
    def replaying(self) -> bool:
        """Whether constants are replaced."""
        return bool(self._windows)

    def exchange(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a function of torch: records the constants among its arguments, or, in a pass that is fed with them,
        puts those of a rank in their place. Returns the arguments to call it with."""
        if name in (
            "__set__",
            "__deepcopy__",
        ):  # a gradient that the script sets is a result, and a copy no computation
            return args, kwargs
        if self.has_loader or not torch.is_grad_enabled() or not self._recorder.active or in_backward():
            return args, kwargs
        flat = list(_tensors((args, kwargs)))
        constants = [each for each in flat if not each.requires_grad]
        if not constants or len(constants) == len(flat):
            return args, kwargs
        constants = [each for each in constants if not self._networks.is_buffer(each)]
        # Of a subclass such as DTensor a rank holds a part, for which the values of another rank are no substitute.
        if not constants or any(type(each) not in (Tensor, nn.Parameter) for each in constants):
            return args, kwargs
        if self.replaying:
            replaced = {id(a): b for a, b in zip(constants, self._next(name, len(constants)), strict=True)}
            return _replaced(args, replaced), _replaced(kwargs, replaced)
        self._record(name, constants)
        return args, kwargs

    def begin_window(self) -> None:
        """The script has asked for a step."""
        self.windows += 1
        self._position = 0

    def _record(self, name: str, constants: list[Tensor]) -> None:
        self._room -= sum(map(size, constants))
        held = [recorded(each) for each in constants] if self._room > 0 else None
        self._recorder.emit("constant", function=name, count=len(constants), values=held)

    def _next(self, name: str, count: int) -> list[Tensor]:
        window = self._windows[self.windows] if self.windows < len(self._windows) else ()
        if self._position >= len(window):
            raise Finished
        function, values = window[self._position]
        self._position += 1
        if function != name or len(values) != count:
            self._recorder.emit("unlike", function=name, recorded=function)
            raise Finished
        return [restored(each) for each in values]


class Replay:
    """Has one process make one step of the windows of N ranks: the mean of their gradients.

    ``ranks``: N, or 1 where the script itself accumulates over N times as many batches.
    """

    def __init__(self, constants: Constants, ranks: int) -> None:
        self._constants, self._ranks = constants, ranks
        self._sums = dict[int, tuple[Tensor, Tensor]]()
        self._averaged = set[int]()

    @property
    def last(self) -> bool:
        """Whether this window is that of the last rank, after which the step is made."""
        return self._constants.windows % self._ranks == self._ranks - 1

    @torch.no_grad()
    def step(self, optimizer: Any) -> bool:
        """Before a step: returns whether it is made. One that is not made finds no gradients, and changes nothing."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        made = self.last
        if made:
            self.average(parameters)
            self._sums, self._averaged = {}, set()
        else:
            for parameter in parameters:
                if parameter.grad is not None:
                    known = self._sums.get(id(parameter))
                    gradient = parameter.grad.detach().clone()
                    self._sums[id(parameter)] = (parameter, gradient if known is None else known[1] + gradient)
                    # Without gradients an optimizer of torch's changes neither weights nor state.
                    parameter.grad = None
        self._constants.begin_window()
        return made

    @torch.no_grad()
    def average(self, parameters: Sequence[Tensor]) -> None:
        """Set the gradients of the last window to the means over the ranks."""
        for parameter in parameters:
            if id(parameter) in self._averaged or parameter.grad is None:
                continue
            known = self._sums.get(id(parameter))
            total = parameter.grad.detach() if known is None else known[1] + parameter.grad.detach()
            parameter.grad = total / self._ranks
            self._averaged.add(id(parameter))


def install(recorder: Recorder, networks: Networks) -> tuple[Constants, Replay | None]:
    """Record constants; in a pass that is fed with them, or that makes one step of the batches of each rank, replay
    them, and clip only what is averaged."""
    constants = Constants(recorder, networks)
    if recorder.feed is None or not (constants.replaying or recorder.feed.windows > 1):
        return constants, None
    replay = Replay(constants, recorder.feed.windows)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(nn.utils, name, _averaged_first(replay, getattr(nn.utils, name)))
    return constants, replay


def _averaged_first(replay: Replay, clip: Any) -> Any:
    @wraps(clip)
    def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not replay.last:
            return torch.zeros(())
        replay.average(held)
        return clip(held, *args, **kwargs)

    return clipped


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif type(tree) in (list, tuple, dict):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(value)


def _replaced(tree: Any, replaced: dict[int, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return replaced.get(id(tree), tree)
    if type(tree) is dict:
        return {key: _replaced(value, replaced) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_replaced(value, replaced) for value in tree)
    return tree
