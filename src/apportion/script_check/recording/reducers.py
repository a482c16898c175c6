"""Records what DistributedDataParallel does on all ranks in code of its own: the comparison of the parameters' shapes,
the first rank's parameters and buffers, and the reduction of the gradients in each backward.

The events: ``ddp``, as one is made (``number``, ``parameters``: names, shapes and types of those that it reduces, and
``unused``: whether it looks for parameters that a backward does not reach), and a ``collective`` with the op
"ddp_backward" for each backward after a forward that has armed the reduction. The op "ddp_rebuild" of the first
forwards has no number in its group, as only the second one, usually, is a collective.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from apportion.core import torch_private
from apportion.script_check.recording.collectives import Collectives, tensors_in
from apportion.script_check.recording.groups import WORLD
from apportion.script_check.recording.names import plain


class _Reducers:
    """The instances of DistributedDataParallel, and those whose next backward reduces."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._numbers = dict[int, int]()
        self._armed = dict[int, DistributedDataParallel]()

    def record_ddp(self, ddp: DistributedDataParallel) -> None:
        """Record one that has been made."""
        self._numbers[id(ddp)] = number = len(self._numbers)
        found = self._collectives.groups.label(ddp.process_group)
        self._collectives.recorder.emit(
            "ddp",
            number=number,
            group=found[0] if found else "",
            parameters=[
                (plain(name), tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
                for name, parameter in ddp.module.named_parameters()
                if parameter.requires_grad
            ],
            unused=bool(getattr(ddp, "find_unused_parameters", False)),
            site=self._collectives.recorder.site(),
        )

    def arm(self, ddp: DistributedDataParallel) -> None:
        """Note that the next backward reduces."""
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync and not self._collectives.inside:
            self._armed[id(ddp)] = ddp

    def begin_reductions(self) -> list[int]:
        """Record that a backward begins; returns the numbers of its calls."""
        # A forward arms one backward: where the script calls two after it, DistributedDataParallel reduces in the first
        # alone.
        armed, self._armed = self._armed, {}
        calls = list[int]()
        for key, ddp in armed.items():
            found = self._collectives.groups.label(ddp.process_group)
            if found is not None:
                label, ranks = found
                number = self._numbers.get(key)
                calls.append(
                    self._collectives.record_begin("ddp_backward", label, ranks, module=number, by="torch.nn.parallel")
                )
        return calls


def install(collectives: Collectives) -> None:
    """Record what each DistributedDataParallel does, and count the backward passes."""
    for name in torch_private.DDP_COLLECTIVES:
        function = getattr(dist, name, None)
        if function is not None:
            setattr(dist, name, _recording_function(collectives, function, name.strip("_")))
    reducer: Any = getattr(dist, "Reducer", None)
    rebuild = getattr(reducer, torch_private.DDP_REBUILD, None)
    if rebuild is not None:
        setattr(reducer, torch_private.DDP_REBUILD, _rebuilding(collectives, rebuild))
    reducers = _Reducers(collectives)
    begin, forward = DistributedDataParallel.__init__, DistributedDataParallel.forward

    @wraps(begin)
    def made(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        reducers.record_ddp(self)

    @wraps(forward)
    def armed(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            reducers.arm(self)
        return result

    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
    DistributedDataParallel.forward = armed  # type: ignore[method-assign]
    torch.autograd.backward = _backward(collectives, reducers, torch.autograd.backward)


def _backward(collectives: Collectives, reducers: _Reducers, backward: Any) -> Any:
    @wraps(backward)
    def reduced(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not collectives.recorder.active:
            return backward(*args, **kwargs)  # type: ignore[no-any-return]
        calls = reducers.begin_reductions()
        error: BaseException | None = None
        # Counted before and after, as a backward may give gradients other memory, by which tensors are found.
        collectives.names.backwards += 1
        collectives.in_backward += 1
        try:
            backward(*args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            collectives.in_backward -= 1
            collectives.names.backwards += 1
            for call in calls:
                collectives.record_end(call, error)
        return None

    return reduced


def _rebuilding(collectives: Collectives, rebuild: Any) -> Any:
    """Returns the function by which a forward agrees with the other ranks on another order of the gradients, once."""
    done = WeakIdKeyDictionary()

    @wraps(rebuild)
    def rebuilt(reducer: Any) -> Any:
        if torch.compiler.is_compiling() or collectives.inside or reducer in done:
            return rebuild(reducer)
        call = collectives.record_begin("ddp_rebuild", WORLD, (), numbered=False, by="torch.nn.parallel")
        result = collectives.run(call, lambda: rebuild(reducer))
        if result:
            done[reducer] = True
        return result

    return rebuilt


def _recording_function(collectives: Collectives, function: Any, op: str) -> Any:
    def recorded(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        found = collectives.groups.label(group)
        if found is None or collectives.inside:
            return function(group, tensors, *args, **kwargs)
        label, ranks = found
        given = tensors_in(list(tensors))
        described = collectives.describe(given, [])
        call = collectives.record_begin(op, label, ranks, by="torch.nn.parallel", **described)
        return collectives.run(call, lambda: function(group, tensors, *args, **kwargs))

    return recorded
