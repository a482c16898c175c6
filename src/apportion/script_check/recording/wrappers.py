"""Records what torch's wrappers were given, and what DistributedDataParallel does on all ranks in code of its own.

The latter are the comparison of the parameters' shapes, the first rank's parameters and buffers, and the reduction of
the gradients in each backward. The events: ``ddp``, as one is made (``number``, ``parameters``: names, shapes and types
of those that it reduces, and ``unused``: whether it looks for parameters that a backward does not reach), and a
``collective`` with the op "ddp_backward" for each backward after a forward that has armed the reduction. The op
"ddp_rebuild" of the first forwards has no number in its group, as only the second one, usually, is a collective.

Of fully_shard the parameters are recorded that it was given to ignore; of ``Join``, that ranks which have no more
batches take part in the collectives of the others; of FullyShardedDataParallel, which parameters an optimizer holds
that it has since made a part of a flat one.

The script's own ``use_orig_params=False`` flattens parameters, and an optimizer that was made before holds tensors that
no longer train. The passes compare by names, which a flat parameter lacks, and therefore wrap with
``use_orig_params=True``: there such an optimizer trains the network all the same, so that only the order shows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from apportion.core import torch_private
from apportion.script_check.recording.collectives import Collectives, replace_everywhere, tensors_in
from apportion.script_check.recording.groups import WORLD
from apportion.script_check.recording.modules import Networks
from apportion.script_check.recording.names import plain
from apportion.script_check.recording.recorder import Recorder


class Wrappers:
    """The modules of this rank that are wrapped by DistributedDataParallel, in the order of the wraps."""

    def __init__(self, recorder: Recorder, networks: Networks) -> None:
        self._recorder, self._networks = recorder, networks
        self._made = list[weakref.ref[DistributedDataParallel]]()
        self._given = list[list[weakref.ref[Tensor]]]()
        self._ignored = list[weakref.ref[Tensor]]()
        self._armed = dict[int, bool]()
        self._reported = set[int]()

    def record_wrap(self, wrapper: DistributedDataParallel) -> None:
        """After a wrap: its process group and the number of its parameters."""
        ignored = set(wrapper.parameters_to_ignore)
        given = [p for name, p in wrapper.module.named_parameters() if p.requires_grad and name not in ignored]
        self._recorder.emit(
            "wrapper",
            index=len(self._made),
            group=dist.get_world_size(wrapper.process_group),
            world=dist.get_world_size(),
            ignored=sorted(ignored),
            site=self._recorder.site(),
        )
        self._made.append(weakref.ref(wrapper))
        self._given.append([weakref.ref(p) for p in given])

    def record_ignored(self, parameters: Iterable[Tensor]) -> None:
        """After a call of fully_shard: the parameters that it was given to ignore."""
        self._ignored += [weakref.ref(parameter) for parameter in parameters]

    def record_forward(self, wrapper: DistributedDataParallel) -> None:
        """Before a forward of a wrapped module: whether backward will average."""
        index = next((i for i, made in enumerate(self._made) if made() is wrapper), None)
        if index is None:
            return
        self._armed[index] = sync = bool(wrapper.require_backward_grad_sync and torch.is_grad_enabled())
        self._recorder.emit(
            "wrapper_forward", index=index, sync=sync, gradients=torch.is_grad_enabled(), site=self._recorder.site()
        )

    def record_late_flags(self) -> None:
        """Before a backward: the wrappers whose flag is set and was not at their forward."""
        late = [
            index
            for index, made in enumerate(self._made)
            if (wrapper := made()) is not None
            and wrapper.require_backward_grad_sync
            and self._armed.get(index) is False
        ]
        if late:
            self._recorder.emit("late_flag", wrappers=late, site=self._recorder.site())

    def before_step(self, optimizer: int) -> None:
        """Before the first step of an optimizer: the names of what each wrapper was given, and of what is ignored."""
        if optimizer in self._reported:
            return
        self._reported.add(optimizer)
        ignored = [self._networks.name(p) for reference in self._ignored if (p := reference()) is not None]
        self._recorder.emit("ignored", names=[name for name in ignored if name])
        for index, given in enumerate(self._given):
            named = [self._networks.name(p) for reference in given if (p := reference()) is not None]
            wrapper = self._made[index]()
            inside = None if wrapper is None else self._networks.module_name(wrapper.module)
            inside = inside or (None if wrapper is None else self._networks.module_name(wrapper))
            self._recorder.emit("wrapped", index=index, path=inside, names=[name for name in named if name])


def install(recorder: Recorder, networks: Networks) -> Wrappers:
    """Watch every wrap by DistributedDataParallel, the forwards and each backward."""
    wrappers = Wrappers(recorder, networks)
    begin, forward, backward = DistributedDataParallel.__init__, DistributedDataParallel.forward, Tensor.backward

    @wraps(begin)
    def made(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        begin(self, module, *args, **kwargs)
        wrappers.record_wrap(self)

    @wraps(forward)
    def called(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        wrappers.record_forward(self)
        return forward(self, *args, **kwargs)

    @wraps(backward)
    def begun(self: Tensor, *args: Any, **kwargs: Any) -> None:
        wrappers.record_late_flags()
        backward(self, *args, **kwargs)

    @wraps(fully_shard)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        result = fully_shard(*args, **kwargs)
        wrappers.record_ignored(kwargs.get("ignored_params") or ())
        return result

    replace_everywhere(fully_shard, sharded, ("torch.distributed",))
    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
    DistributedDataParallel.forward = called  # type: ignore[method-assign]
    Tensor.backward = begun  # type: ignore[method-assign]
    _watch_joins(recorder)
    return wrappers


def _watch_joins(recorder: Recorder) -> None:
    """Record the event ``join`` for each torch ``Join`` that is enabled, which ``join()`` of torch's wrappers makes."""
    begin = Join.__init__

    @wraps(begin)
    def begun(self: Join, joinables: Any, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        begin(self, joinables, enable, *args, **kwargs)
        if enable:
            recorder.emit("join", site=recorder.site())

    Join.__init__ = begun  # type: ignore[method-assign]


class Flattening:
    """The optimizers of this rank, and the parameters of each that were flattened after it was given them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._optimizers = weakref.WeakSet[Optimizer]()
        self._stale = weakref.WeakKeyDictionary[Optimizer, dict[int, list[Any]]]()
        self._sites = weakref.WeakKeyDictionary[Optimizer, str]()

    def record_group(self, optimizer: Optimizer) -> None:
        """After an optimizer was given a group of parameters: it holds those of now."""
        self._optimizers.add(optimizer)
        self._sites.setdefault(optimizer, self._recorder.site())
        held = self._stale.get(optimizer, {})
        for parameter in optimizer.param_groups[-1]["params"]:
            held.pop(id(parameter), None)

    def record_flattened(self, parameters: Iterable[Tensor]) -> None:
        """After parameters were made parts of flat ones."""
        flat = {id(parameter) for parameter in parameters}
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                held = self._stale.setdefault(optimizer, {})
                held.update({id(p): group["params"] for p in group["params"] if id(p) in flat})

    def is_stale(self, optimizer: Any, parameter: Tensor) -> bool:
        """Whether an optimizer holds a parameter since before it was flattened; not where the list of its group has
        been replaced since, as ``param_groups[0]["params"] = list(model.parameters())`` does."""
        if not isinstance(optimizer, Optimizer):
            return False
        at_that_time = self._stale.get(optimizer, {}).get(id(parameter))
        return any(group["params"] is at_that_time for group in optimizer.param_groups)

    def made_at(self, optimizer: Any) -> str:
        """Returns the line that made an optimizer; empty where it is not known."""
        return self._sites.get(optimizer, "") if isinstance(optimizer, Optimizer) else ""


def watch_flattening(recorder: Recorder) -> Flattening:
    """Watch every optimizer's groups and every wrap by FullyShardedDataParallel, as the script makes it."""
    flattening = Flattening(recorder)
    add, begin = Optimizer.add_param_group, FullyShardedDataParallel.__init__

    @wraps(add)
    def added(self: Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        flattening.record_group(self)

    @wraps(begin)
    def wrapped(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        flat = not kwargs.get("use_orig_params", False)
        left = {id(each) for each in _left_out_of_wrap(kwargs)} if flat else set[int]()
        begin(self, module, *args, **kwargs)
        if flat:
            flattening.record_flattened(p for p in self.parameters() if id(p) not in left)

    Optimizer.add_param_group = added  # type: ignore[method-assign]
    FullyShardedDataParallel.__init__ = wrapped  # type: ignore[method-assign]
    return flattening


def _left_out_of_wrap(kwargs: dict[str, Any]) -> list[Tensor]:
    """The parameters that a wrap leaves as they are."""
    found = list[Tensor]()
    for name in ("ignored_modules", "ignored_states", "ignored_parameters"):
        if kwargs.get(name) is None:
            continue
        kwargs[name] = list(kwargs[name])  # it may be a generator
        for each in kwargs[name]:
            found += each.parameters() if isinstance(each, nn.Module) else [each]
    return found


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


def install_reducers(collectives: Collectives) -> None:
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
