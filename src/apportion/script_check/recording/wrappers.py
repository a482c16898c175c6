"""Records what DistributedDataParallel was given, and whether its forward armed the average that backward makes.

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

from apportion.script_check.recording.collectives import replace_everywhere
from apportion.script_check.recording.modules import Networks
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
