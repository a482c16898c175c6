"""Records which parameters an optimizer holds that FullyShardedDataParallel has since made a part of a flat one.

The script's own ``use_orig_params=False`` flattens parameters, and an optimizer that was made before holds tensors that
no longer train. The passes compare by names, which a flat parameter lacks, and therefore wrap with
``use_orig_params=True``: there such an optimizer trains the network all the same, so that only the order shows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.optimizer import Optimizer

from apportion.script_check.recording.recorder import Recorder


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


def install(recorder: Recorder) -> Flattening:
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
        left = {id(each) for each in _ignored(kwargs)} if flat else set[int]()
        begin(self, module, *args, **kwargs)
        if flat:
            flattening.record_flattened(p for p in self.parameters() if id(p) not in left)

    Optimizer.add_param_group = added  # type: ignore[method-assign]
    FullyShardedDataParallel.__init__ = wrapped  # type: ignore[method-assign]
    return flattening


def _ignored(kwargs: dict[str, Any]) -> list[Tensor]:
    """The parameters that a wrap leaves as they are."""
    found = list[Tensor]()
    for name in ("ignored_modules", "ignored_states", "ignored_parameters"):
        if kwargs.get(name) is None:
            continue
        kwargs[name] = list(kwargs[name])  # it may be a generator
        for each in kwargs[name]:
            found += each.parameters() if isinstance(each, nn.Module) else [each]
    return found
