"""Watches the script's networks: their weights before the first step, their training flags, and what they compute
first.

A network is the outermost module whose forward is called. It is recorded before its first forward; in a pass that is
fed, its weights are first set to those that rank 0 of the other pass began with.

Of the first steps, digests of what all modules compute are recorded. Ranks of a tensor- or sequence-parallel group read
the same rows, and their modules compute different parts of what follows from them. Replicas that read the same rows
compute the same everywhere.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from apportion.core.torch_private import in_backward
from apportion.script_check.recording.names import Root, root_of, unwrapped
from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import (
    LARGEST_WHOLE,
    digest,
    gathering,
    local,
    local_bytes,
    placements,
    row_digests,
    set_values,
    tensors_of,
    values,
)

DIGESTED_STEPS = 3
"""The optimizer steps for whose forwards digests are recorded."""


class ForwardDigests:
    """The digest of one forward of an outermost module: of its inputs, and of the outputs of all modules."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recording = False

    def begin_forward(self, module: Any, inputs: Any) -> None:
        """Before the forward of an outermost module."""
        self._recording = self._recorder.step < DIGESTED_STEPS and torch.is_grad_enabled()
        if not self._recording:
            return
        self._hash = hashlib.blake2b(digest_size=8)
        found = list(tensors_of(inputs))
        self._inputs = hashlib.blake2b(digest_size=8)
        for tensor in found:
            self._inputs.update(local_bytes(tensor))
        self._rows = len(found[0]) if found and found[0].dim() else None

    def add_output(self, output: Any, outermost: bool) -> None:
        """After the forward of a module."""
        if not self._recording or torch.compiler.is_compiling():
            return
        for tensor in tensors_of(output):
            self._hash.update(local_bytes(tensor))
        if outermost:
            self._recording = False
            self._recorder.emit(
                "computed", inputs=self._inputs.hexdigest(), outputs=self._hash.hexdigest(), rows=self._rows
            )


_COPIES = 5
"""How often the elements of a network are held while it trains: weights, gradients, state, and what is recorded."""


class TooLargeForFloat64(Exception):
    """The networks do not fit into memory in float64."""


def gathered(roots: Sequence[Root], *, gradients: bool = False) -> AbstractContextManager[Any]:
    """Within it the parameters that FullyShardedDataParallel has sharded are whole, and may be written; or, with
    ``gradients``, they and their gradients may be read."""
    stack = ExitStack()
    for root in roots:
        for module in root.module.modules():
            if isinstance(module, FullyShardedDataParallel) and module.check_is_root():
                gathering.append(True)
                stack.callback(gathering.pop)
                whole = FullyShardedDataParallel.summon_full_params(
                    module, writeback=not gradients, with_grads=gradients
                )
                stack.enter_context(whole)
    return stack


class Networks:
    """The networks of this rank, and the names of their parameters."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._computed = ForwardDigests(recorder)
        self._depth = 0
        self._roots = list[tuple[weakref.ref[nn.Module], Root]]()
        self._labels = dict[str, int]()
        self._outermost = dict[int, weakref.ref[nn.Module]]()
        self._names = dict[int, tuple[weakref.ref[Tensor], str]]()
        self._modules = dict[int, tuple[weakref.ref[nn.Module], str]]()
        self._sites = weakref.WeakKeyDictionary[nn.Module, str]()
        self.sampled = False
        """Whether the networks are so large that samples of their tensors are recorded."""
        self.evaluating = dict[str, tuple[str, ...]]()
        """The modules of each network that were in evaluation mode at its last forward with gradients."""
        self.trained = set[str]()
        """The labels of the networks that were called with gradients."""
        self.forwards = 0
        """The number of forwards with gradients of outermost modules."""

    def before(self, module: nn.Module, inputs: Any) -> None:
        """Before each forward of each module."""
        # Counted for every forward, also where nothing is recorded: ``after`` is always called and counts down.
        self._depth += 1
        if self._depth > 1 or not self._recorder.active or in_backward():  # a checkpoint computes a part again
            return
        known = self._outermost.get(id(module))
        if any(map(is_lazy, module.parameters())):
            return  # it has no weights before its first forward
        if known is None or known() is not module:
            self._add_network(module)
            self._outermost[id(module)] = weakref.ref(module)
        if torch.is_grad_enabled():
            self.forwards += 1
            self._record_flags(module)
        self._recorder.emit(
            "forward",
            gradients=torch.is_grad_enabled(),
            rows=row_digests(inputs) if torch.is_grad_enabled() else None,
            site=self._recorder.site(),
            caller=self._caller(module),
            inputs=[digest(each) for each in inputs if _comparable(each)],
        )
        self._computed.begin_forward(module, inputs)

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """After each forward of each module, also one that raised."""
        self._depth -= 1
        if self._recorder.active:
            self._computed.add_output(output, self._depth == 0)

    def name(self, parameter: Tensor) -> str | None:
        """Returns the name of a parameter; None for one of no network met so far."""
        if (known := self.known_name(parameter)) is None:
            self._refresh()
            known = self.known_name(parameter)
        return known

    def known_name(self, parameter: Tensor) -> str | None:
        """Returns the name of a parameter if it is known already, without another look at the networks."""
        found = self._names.get(id(parameter))
        return found[1] if found is not None and found[0]() is parameter else None

    def module_name(self, module: nn.Module) -> str | None:
        """Returns the name of a module; None for one of no network met so far."""
        found = self._modules.get(id(module))
        if found is None or found[0]() is not module:
            self._refresh()
            found = self._modules.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def record_site(self, module: nn.Module, name: str, value: Any) -> None:
        """Where something is registered in a module: the line that makes the module, and those of what it holds."""
        for each in (module, value) if isinstance(value, nn.Module) else (module,):
            if each not in self._sites:
                self._sites[each] = self._recorder.site()

    def is_buffer(self, tensor: Tensor) -> bool:
        """Whether a tensor is a buffer of a network."""
        return any(tensor is buffer for root in self.roots() for buffer in root.module.buffers())

    def roots(self) -> list[Root]:
        """Returns the networks that still exist."""
        return [root for reference, root in self._roots if reference() is not None]

    def _add_network(self, module: nn.Module) -> None:
        root = root_of(module, self._recorder.user_frames())
        if self._is_known(root):
            return
        labels = {label for label, step in self._labels.items() if step == self._recorder.step}
        if root.label in labels:  # such as that of a function called twice; after a step it is one made again
            root.label = next(f"{root.label}#{n}" for n in range(2, 1 << 16) if f"{root.label}#{n}" not in labels)
        self._labels[root.label] = self._recorder.step
        self._roots.append((weakref.ref(root.module), root))
        # Before the parameters are made whole, which takes the memory.
        self._refuse_too_large()
        self.sampled = sum(p.numel() for r in self.roots() for _, p in r.parameters()) > LARGEST_WHOLE
        # Within one gathering, as each is a collective of all ranks: the record has the weights that were fed.
        with gathered([root]):
            self._feed(root)
            self._record(root, module)
        self._refresh()

    def _record(self, root: Root, module: nn.Module) -> None:
        tensors = [*root.parameters(), *root.buffers()]
        self._recorder.emit(
            "network",
            label=root.label,
            wrapper=type(module).__name__,
            averaged=isinstance(module, DistributedDataParallel),
            sharded=[name for name, each in root.modules() if isinstance(each, FSDPModule)],
            type=type(root.module).__name__,
            weights={name: values(tensor) for name, tensor in tensors},
            trainable=[name for name, parameter in root.parameters() if parameter.requires_grad],
            placements={name: placements(tensor) for name, tensor in tensors if isinstance(tensor, DTensor)},
            groups={name: t.device_mesh.mesh.flatten().tolist() for name, t in tensors if isinstance(t, DTensor)},
            modules={name: type(each).__name__ for name, each in root.modules()},
            sites={name: self._sites.get(each, "") for name, each in root.modules()},
            tied={**root.tied(), **self._shared(root)},
            site=self._recorder.site(),
        )

    def _shared(self, root: Root) -> dict[str, str]:
        """The names in other networks of parameters that this one has, too, with the names under which steps record
        them from now on."""
        own = {id(parameter): name for name, parameter in root.parameters()}
        others = [other for other in self.roots() if other.module is not root.module]
        every = [(name, id(parameter)) for other in others for name, parameter in other.parameters()]
        return {name: own[key] for name, key in every if key in own and own[key] != name}

    def _refuse_too_large(self) -> None:
        """Raises TooLargeForFloat64 where weights, gradients and the state of an optimizer, in float64 on all ranks, do
        not fit into the memory that the plan allows."""
        elements = sum(local(p).numel() for root in self.roots() for _, p in root.parameters())
        needed = elements * 8 * _COPIES * int(self._recorder.plan["ranks"])
        memory = int(self._recorder.plan["memory"])
        if self._recorder.plan["float64"] and memory and needed > memory:
            raise TooLargeForFloat64(
                f"{elements} parameters need about {needed / 2**30:.1f} GiB, of {memory / 2**30:.1f} GiB"
            )

    def _is_known(self, root: Root) -> bool:
        """Whether a network is one met before, or all of it is part of one, as an unwrapped module is."""
        if any(reference() is root.module for reference, _ in self._roots):
            return True
        held = [*root.parameters(), *root.buffers()]
        known = {id(tensor) for each in self.roots() for _, tensor in (*each.parameters(), *each.buffers())}
        return bool(held) and all(id(tensor) in known for _, tensor in held)

    def _feed(self, root: Root) -> None:
        """Sets the weights to those of the pass that this one is fed from, until the first step."""
        feed = self._recorder.feed
        if feed is None or self._recorder.step:
            return
        for name, tensor in [*root.parameters(), *root.buffers()]:
            set_values(tensor, feed.weights.get(name))

    def _caller(self, module: nn.Module) -> str:
        """The line that calls a module, or the method of the wrapped module around it that does, past the forward of
        DistributedDataParallel; empty where the module is the wrapper or in none."""
        if isinstance(module, DistributedDataParallel):
            return ""
        wrappers = (each for root in self.roots() for each in root.module.modules())
        for wrapper in wrappers:
            if isinstance(wrapper, DistributedDataParallel):
                inside = set(map(id, wrapper.module.modules()))
                if id(module) in inside:
                    return self._recorder.site_outside(inside)
        return ""

    def _refresh(self) -> None:
        self._names = {
            id(parameter): (weakref.ref(parameter), name)
            for root in self.roots()
            for name, parameter in root.parameters()
        }
        self._modules = {id(each): (weakref.ref(each), name) for root in self.roots() for name, each in root.modules()}

    def _record_flags(self, module: nn.Module) -> None:
        inner = unwrapped(module)
        for root in self.roots():
            self.evaluating[root.label] = tuple(name for name, each in root.modules() if not each.training)
            if root.label not in self.trained and any(each is inner for each in root.module.modules()):
                self.trained.add(root.label)


def _comparable(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() <= LARGEST_WHOLE


def install(recorder: Recorder) -> Networks:
    """Watch every module's forward; returns what is known of the networks."""
    networks = Networks(recorder)
    register_module_parameter_registration_hook(networks.record_site)
    register_module_buffer_registration_hook(networks.record_site)
    register_module_module_registration_hook(networks.record_site)
    register_module_forward_pre_hook(networks.before)
    register_module_forward_hook(networks.after, always_call=True)
    return networks
