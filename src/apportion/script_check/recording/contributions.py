"""Records each rank's own gradients: what every backward adds to a parameter, before any average over the ranks. From
them and from the gradient that the optimizer is given follows how ranks and micro-batches were weighted.

Collectives that cut the gradient are found here, too: their input has a graph, and their outputs have none. In a pass
of one process with ``join_gathers``, the outputs of such collectives get the graph of their input: where that changes a
gradient, the loss depends on them, and the script loses the part of the gradient that runs through them.

A collective inside of ``no_grad()`` cuts the gradient as well, unless it belongs to an ``autograd.Function`` that has a
backward of its own: what follows in the same block has to compute a graph, too, until the block ends.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import Optimizer

from apportion.core.torch_private import parameters_of
from apportion.script_check.recording.modules import Networks
from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import local, values

MOST_IN_WINDOW = 64
"""The contributions to one parameter between two steps that are recorded."""
MOST_ELEMENTS = 1 << 25
"""The elements recorded in all by one rank."""


class Contributions:
    """What backward has added to each parameter since the last step of its optimizer."""

    def __init__(self, recorder: Recorder, networks: Networks) -> None:
        self._recorder, self._networks = recorder, networks
        self._watched = dict[int, weakref.ref[Tensor]]()
        self._found = defaultdict[str | int, list[tuple[str, np.ndarray[Any, Any]]]](list)
        self._elements = 0
        self.stepping = False
        """Whether an optimizer is in its step, where backward belongs to a line search."""

    def watch(self, parameter: Tensor, key: str | int) -> None:
        """Record what is added to a parameter, under a key."""
        known = self._watched.get(id(parameter))
        if not parameter.requires_grad or not parameter.is_leaf or (known is not None and known() is parameter):
            return
        self._watched[id(parameter)] = weakref.ref(parameter)

        def added(gradient: Tensor) -> None:
            self._add(key, gradient)

        # A hook of the tensor gets what one backward adds, before it is accumulated into .grad; DistributedDataParallel
        # averages in a hook that runs after the accumulation.
        parameter.register_hook(added)

    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """After each forward of each module: watches its parameters. Those of FSDP2 are whole, and others, until it
        reshards, which is after the global hooks."""
        for label, parameter in parameters_of(module).items():
            if parameter is None or not parameter.requires_grad:
                continue
            path = self._networks.module_name(module)
            name = self._networks.name(parameter) or (None if path is None else f"{path}.{label}")
            self.watch(parameter, id(parameter) if name is None else name)

    def _add(self, key: str | int, gradient: Tensor) -> None:
        found = self._found[key]
        if self.stepping or not self._recorder.active or len(found) >= MOST_IN_WINDOW:
            return
        if self._elements > MOST_ELEMENTS:
            return
        array = values(local(gradient), self._networks.sampled)
        self._elements += array.size
        found.append((self._recorder.chain(), array))

    def _pop_contributions(self, key: str | int) -> list[tuple[str, np.ndarray[Any, Any]]]:
        return self._found.pop(key) if key in self._found else []

    def before_step(self, optimizer: int, number: int, parameters: dict[str, Tensor]) -> None:
        """Write down what was added to the parameters of an optimizer since its last step."""
        own = {name: self._pop_contributions(id(p)) or self._pop_contributions(name) for name, p in parameters.items()}
        self._recorder.emit(
            "contributions",
            optimizer=optimizer,
            number=number,
            own={name: [array for _, array in found] for name, found in own.items()},
            sites={name: [site for site, _ in found] for name, found in own.items()},
        )


def install(recorder: Recorder, networks: Networks) -> Contributions:
    """Watch the parameters of every module that is called and of every optimizer."""
    contributions = Contributions(recorder, networks)
    register_module_forward_hook(contributions.after_forward)
    add = Optimizer.add_param_group

    @wraps(add)
    def added(self: Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        for parameter in self.param_groups[-1]["params"]:
            contributions.watch(parameter, id(parameter))

    Optimizer.add_param_group = added  # type: ignore[method-assign]
    return contributions


def watch_gathers(recorder: Recorder) -> None:
    """Watch the collectives of torch.distributed that gather."""
    for name in ("all_gather", "all_gather_into_tensor", "_all_gather_base"):
        if hasattr(dist, name):
            setattr(dist, name, _watched_gather(recorder, name, getattr(dist, name)))


def _watched_gather(recorder: Recorder, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        into = args[0] if args else next((kwargs[k] for k in ("tensor_list", "output_tensor") if k in kwargs), None)
        source = (
            args[1] if len(args) > 1 else next((kwargs[k] for k in ("tensor", "input_tensor") if k in kwargs), None)
        )
        enabled = torch.is_grad_enabled()
        if not isinstance(source, Tensor) or not source.requires_grad or (source.is_leaf and not enabled):
            return result
        outputs = [into] if isinstance(into, Tensor) else list(into) if isinstance(into, Sequence) else []
        cut = [out for out in outputs if isinstance(out, Tensor) and not out.requires_grad]
        if cut:
            site = recorder.site()
            recorder.emit("cut", function=name, shape=tuple(source.shape), site=site, gradients=enabled)
            if recorder.plan.get("join_gathers") and len(cut) == 1 and cut[0].shape == source.shape:
                if result is not None:
                    result.wait()
                torch.set_grad_enabled(True)
                cut[0].copy_(source)
        return result

    return gathered
