"""Records each collective and each message between two ranks: where it begins, where it ends, and with which tensors.

A call is recorded once, by the outermost function: ``all_gather_object`` and not the two collectives that it consists
of. The calls that make process groups, which all ranks have to make, count among them. No tensor is read. The events:

``collective``
    A call begins. ``call``: its number on this rank. ``op``: see ``Operation``. ``group``, ``ranks``, ``sequence``:
    label and global ranks of the group, and the number of the call among the collectives of this rank in the group,
    from 0 (None for a message). ``root``: the special rank, the peer of a message. ``inputs`` and ``outputs``: shape
    and type of each tensor. ``names``: for each input (each output of a receive) the parameter that it belongs to, or
    ""; ``gradient``: whether it is its gradient. ``pending``: that it goes on after the function has returned.
    ``gradients``: whether autograd recorded; ``requires_grad``: whether an input requires a gradient;
    ``differentiable``: whether the function has a backward; ``backward``: whether it runs within one. ``site``,
    ``line``: of the script. ``by``: the module that calls.
``collective_end``
    It is complete, or raised ``error``.
``recorder_collective``
    The same as ``collective``, for one that is the recorder's own: it makes a DTensor whole.
``wait``, ``wait_end``
    The rank waits for a call that was pending; ``call`` is None for one that no function here has begun.
``destroy``, ``destroyed``
    The script takes all groups down, before and after.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable_collectives
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from apportion.core import torch_private
from apportion.script_check.recording.groups import Groups
from apportion.script_check.recording.modules import Networks
from apportion.script_check.recording.names import modules_held, plain
from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import gathering, local


@dataclass(frozen=True)
class Operation:
    """``name``: the name under which it is recorded, the same for functions that do the same. ``inputs``,
    ``outputs``: arguments with tensors or lists of them. ``root``: the argument with the rank that is special, as a
    global rank; its counterpart in the group's numbering begins with ``group_``. ``to_one``: between two ranks."""

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    root: str = ""
    to_one: bool = False


PUBLIC: dict[str, Operation] = {
    "all_reduce": Operation("all_reduce", ("tensor",)),
    "all_reduce_coalesced": Operation("all_reduce_coalesced", ("tensors",)),
    "broadcast": Operation("broadcast", ("tensor",), root="src"),
    "reduce": Operation("reduce", ("tensor",), root="dst"),
    "all_gather": Operation("all_gather", ("tensor",), ("tensor_list",)),
    "all_gather_single": Operation("all_gather_into_tensor", ("input_tensor",), ("output_tensor",)),
    "all_gather_into_tensor": Operation("all_gather_into_tensor", ("input_tensor",), ("output_tensor",)),
    "all_gather_coalesced": Operation("all_gather_coalesced", ("input_tensor_list",), ("output_tensor_lists",)),
    "gather": Operation("gather", ("tensor",), ("gather_list",), "dst"),
    "scatter": Operation("scatter", ("scatter_list",), ("tensor",), "src"),
    "reduce_scatter": Operation("reduce_scatter", ("input_list",), ("output",)),
    "reduce_scatter_single": Operation("reduce_scatter_tensor", ("input",), ("output",)),
    "reduce_scatter_tensor": Operation("reduce_scatter_tensor", ("input",), ("output",)),
    "all_to_all_single": Operation("all_to_all_single", ("input",), ("output",)),
    "all_to_all": Operation("all_to_all", ("input_tensor_list",), ("output_tensor_list",)),
    "barrier": Operation("barrier"),
    "monitored_barrier": Operation("monitored_barrier"),
    "all_gather_object": Operation("all_gather_object"),
    "gather_object": Operation("gather_object", root="dst"),
    "broadcast_object_list": Operation("broadcast_object_list", root="src"),
    "scatter_object_list": Operation("scatter_object_list", root="src"),
    "send": Operation("send", ("tensor",), root="dst", to_one=True),
    "isend": Operation("send", ("tensor",), root="dst", to_one=True),
    "recv": Operation("recv", (), ("tensor",), root="src", to_one=True),
    "irecv": Operation("recv", (), ("tensor",), root="src", to_one=True),
    "send_object_list": Operation("send_object_list", root="dst", to_one=True),
    "recv_object_list": Operation("recv_object_list", root="src", to_one=True),
}
"""Functions of ``torch.distributed``. ``batch_isend_irecv`` calls isend and irecv, and is recorded as these."""

FUNCTIONAL: dict[str, Operation] = {
    "broadcast": Operation("broadcast", ("self",), root="src"),
    "all_reduce": Operation("all_reduce", ("self",)),
    "all_gather_single": Operation("all_gather_into_tensor", ("self",)),
    "all_gather_single_autograd": Operation("all_gather_into_tensor", ("self",)),
    "all_gather_tensor": Operation("all_gather_into_tensor", ("self",)),
    "all_gather_tensor_autograd": Operation("all_gather_into_tensor", ("self",)),
    "reduce_scatter_single": Operation("reduce_scatter_tensor", ("self",)),
    "reduce_scatter_single_autograd": Operation("reduce_scatter_tensor", ("self",)),
    "reduce_scatter_tensor": Operation("reduce_scatter_tensor", ("self",)),
    "reduce_scatter_tensor_autograd": Operation("reduce_scatter_tensor", ("self",)),
    "all_reduce_coalesced": Operation("all_reduce_coalesced", ("self",)),
    "all_gather_single_coalesced": Operation("all_gather_coalesced", ("self",)),
    "all_gather_into_tensor_coalesced": Operation("all_gather_coalesced", ("self",)),
    "reduce_scatter_single_coalesced": Operation("reduce_scatter_coalesced", ("inputs",)),
    "reduce_scatter_tensor_coalesced": Operation("reduce_scatter_coalesced", ("inputs",)),
    "all_to_all_single": Operation("all_to_all_single", ("self",)),
    "all_to_all_single_autograd": Operation("all_to_all_single", ("self",)),
    "permute_tensor": Operation("permute_tensor", ("self",)),
}
"""Functions of torch's functional collectives, which DTensor calls."""

DIFFERENTIABLE: dict[str, Operation] = {
    "broadcast": Operation("broadcast", ("tensor",), root="src"),
    "gather": Operation("gather", ("tensor",), root="dst"),
    "scatter": Operation("scatter", ("tensors",), root="src"),
    "reduce": Operation("reduce", ("tensor",), root="dst"),
    "reduce_scatter": Operation("reduce_scatter", ("input_list",), ("output",)),
    "all_gather": Operation("all_gather", ("tensor",)),
    "all_to_all": Operation("all_to_all", ("input_tensor_list",), ("output_tensor_list",)),
    "all_to_all_single": Operation("all_to_all_single", ("input",), ("output",)),
    "all_reduce": Operation("all_reduce", ("tensor",)),
}
"""Functions of ``torch.distributed.nn.functional``, whose results have gradients."""


_LISTED = 512
"""The most tensors of one call that are listed."""


class Collectives:
    """The collectives of this rank."""

    def __init__(self, recorder: Recorder, networks: Networks) -> None:
        self.recorder = recorder
        self.names = TensorNames(recorder, networks)
        self.groups = Groups(int(recorder.plan["ranks"]))
        self._calls = 0
        self._sequences = dict[str, int]()
        # Weak, so that a handle for which the script does not wait keeps no tensor alive, and by identity, as tensors
        # have an equality of their own.
        self._pending = WeakIdKeyDictionary()
        """The calls that go on, by what is waited for: a work handle, or the tensor of a functional collective."""
        # Per thread, as autograd runs backward in threads of its own, of which each may be inside of another call.
        self._thread = threading.local()
        self.in_backward = 0
        """How many backward passes are under way, one within another."""

    @property
    def inside(self) -> bool:
        """Whether this thread is inside of a call that is recorded already, or this is not the rank's process."""
        return getattr(self._thread, "inside", False) or not self.recorder.active

    def record_begin(self, op: str, group: str, ranks: tuple[int, ...], *, numbered: bool = True, **fields: Any) -> int:
        """Record that a call begins; returns its number."""
        call = self._calls
        self._calls += 1
        sequence = None
        if numbered:
            sequence = self._sequences.get(group, 0)
            self._sequences[group] = sequence + 1
        site, line = self._place()
        self.recorder.emit(
            "recorder_collective" if gathering else "collective",
            **{
                "call": call,
                "op": op,
                "group": group,
                "ranks": ranks,
                "sequence": sequence,
                "root": None,
                "inputs": [],
                "outputs": [],
                "names": [],
                "gradient": [],
                "pending": False,
                "gradients": torch.is_grad_enabled(),
                "requires_grad": False,
                "differentiable": False,
                "backward": self.in_backward > 0,
                "site": site,
                "line": line,
                "thread": threading.get_ident(),
                "time": time.monotonic(),
                **fields,
            },
        )
        return call

    def record_end(self, call: int, error: BaseException | None = None) -> None:
        """Record that a call is complete, or has raised."""
        failure = {} if error is None else {"error": f"{type(error).__name__}: {error}"}
        self.recorder.emit("collective_end", call=call, time=time.monotonic(), **failure)

    def run(self, call: int, function: Callable[[], Any], *, pending: bool = False) -> Any:
        """Run the function of a call that has begun, and return its result."""
        self._thread.inside = True
        try:
            result = function()
        except BaseException as error:
            self.record_end(call, error)
            raise
        finally:
            self._thread.inside = False
        handle = result if isinstance(result, dist.Work) else getattr(result, "elem", None)
        if handle is not None and (pending or not isinstance(result, dist.Work)):
            self._pending[handle] = call
        else:
            self.record_end(call)
        return result

    def wait_for(self, handle: Any, wait: Callable[[], Any]) -> Any:
        """Wait for a work handle, or for the tensor of a functional collective, and record that."""
        call = self._pending.pop(handle, None)
        site, line = self._place()
        self.recorder.emit("wait", call=call, site=site, line=line, thread=threading.get_ident(), time=time.monotonic())
        try:
            result = wait()
        except BaseException as error:
            if call is not None:
                self.record_end(call, error)
            raise
        if call is not None:
            self.record_end(call)
        self.recorder.emit("wait_end", call=call)
        return result

    def describe(self, inputs: list[Tensor], outputs: list[Tensor]) -> dict[str, Any]:
        """Returns what is recorded of the tensors of a call."""
        named = [self.names.find(tensor) or ("", False) for tensor in (inputs or outputs)[:_LISTED]]
        return {
            "inputs": [_shape(tensor) for tensor in inputs[:_LISTED]],
            "outputs": [_shape(tensor) for tensor in outputs[:_LISTED]],
            "names": [name for name, _ in named],
            "gradient": [gradient for _, gradient in named],
            "requires_grad": any(tensor.requires_grad for tensor in inputs),
        }

    def _place(self) -> tuple[str, str]:
        frame = self.recorder.frame()
        if frame is None:
            return "", ""
        return self.recorder.site(), linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def _shape(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    held = local(tensor)
    return tuple(held.shape), str(held.dtype).removeprefix("torch.")


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors of an argument: itself, or those of the lists that it consists of."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list | tuple) else []


def _recording_function(
    collectives: Collectives, function: Any, operation: Operation, *, differentiable: bool = False
) -> Any:
    """Returns a function of torch that records its calls."""
    bind = inspect.signature(function).bind

    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        # A call within a call that is recorded belongs to it: all_gather_object consists of two collectives.
        if torch.compiler.is_compiling() or collectives.inside:
            return function(*args, **kwargs)
        try:
            given = bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which says what is wrong with the arguments
        found = collectives.groups.label(given.get("group"))
        # Torch returns at once on a rank that is not a member of the group. To count such calls would shift the numbers
        # by which the calls of different ranks are paired.
        if found is None or collectives.recorder.rank not in found[1]:
            return function(*args, **kwargs)
        label, ranks = found
        inputs = [tensor for name in operation.inputs for tensor in tensors_in(given.get(name))]
        outputs = [tensor for name in operation.outputs for tensor in tensors_in(given.get(name))]
        pending = (operation.to_one and function.__name__ in ("isend", "irecv")) or bool(given.get("async_op"))
        reduces = given.get("op", given.get("reduceOp", "sum" if "reduce" in operation.name else None))
        call = collectives.record_begin(
            operation.name,
            label,
            ranks,
            numbered=not operation.to_one,
            root=_root(operation, given, ranks),
            tag=given.get("tag") or 0,
            reduces=None if reduces is None else str(reduces).rpartition(".")[2].lower(),
            pending=pending,
            differentiable=differentiable,
            by=sys._getframe(1).f_globals.get("__name__", ""),
            **{**collectives.describe(inputs, outputs), **_sharded_names(collectives)},
        )
        return collectives.run(call, lambda: function(*args, **kwargs), pending=pending)

    return recorded


def _root(operation: Operation, given: Mapping[str, Any], ranks: tuple[int, ...]) -> int | None:
    if not operation.root:
        return None
    root = given.get(operation.root)
    if root is not None:
        return int(root)
    position = given.get(f"group_{operation.root}")
    if position is not None:
        return int(ranks[position])
    return None if operation.name == "recv" else ranks[0]


def _sharded_names(collectives: Collectives) -> dict[str, Any]:
    """The parameters whose shards fully_shard sends as one tensor: those that its function was called with."""
    # Past this function and the wrapper; fully_shard calls the collective from a few frames above at most.
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_back is None or not frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp"):
            return {}
        parameters = frame.f_locals.get("fsdp_params")
        if isinstance(parameters, list):
            found = [collectives.names.find(each.sharded_param) for each in parameters]
            reduces = frame.f_code.co_name == "foreach_reduce"
            return {"names": [each[0] if each else "" for each in found], "gradient": [reduces] * len(found)}
        frame = frame.f_back
    return {}


def replace_everywhere(function: Any, wrapper: Any, packages: tuple[str, ...]) -> None:
    """Put a wrapper in the place of a function in all modules of some packages that have it under any name."""
    for name, module in list(sys.modules.items()):
        # Torch imports its collectives by name from one module into another: each of these has to be replaced, or calls
        # that torch makes itself, such as those of DTensor, would not be seen.
        if name.startswith(packages):
            for attribute, value in list(vars(module).items()):
                if value is function:
                    setattr(module, attribute, wrapper)


def install(recorder: Recorder, networks: Networks) -> Collectives:
    """Record the collectives of torch's functions; returns what is known of them."""
    collectives = Collectives(recorder, networks)
    functional = torch_private.functional_collectives()
    for module, operations, differentiable in (
        (dist, PUBLIC, False),
        (functional, FUNCTIONAL, True),
        (differentiable_collectives, DIFFERENTIABLE, True),
    ):
        for name, operation in operations.items():
            function = getattr(module, name, None)
            if function is not None:
                wrapper = _recording_function(collectives, function, operation, differentiable=differentiable)
                replace_everywhere(function, wrapper, ("torch.distributed",))
    # On the class, as handles are made in C++ and have no other place for a wrapper.
    dist.Work.wait = _waiting(collectives, dist.Work.wait)  # type: ignore[method-assign]
    if functional is not None:
        replace_everywhere(
            functional.wait_tensor, _waiting(collectives, functional.wait_tensor), ("torch.distributed",)
        )
    _install_group_makers(collectives)
    return collectives


def _waiting(collectives: Collectives, wait: Any) -> Any:
    @wraps(wait)
    def waited(handle: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or collectives.inside:
            return wait(handle, *args, **kwargs)
        return collectives.wait_for(handle, lambda: wait(handle, *args, **kwargs))

    return waited


_MAKERS = ("init_process_group", "new_group", "split_group")


def _install_group_makers(collectives: Collectives) -> None:
    """Record these calls as collectives of the group of all ranks (``makes``: the ranks of the group that is made), and
    the events ``destroy`` and ``destroyed`` around the end of all groups."""
    for name in _MAKERS:
        function = getattr(dist, name, None)
        if function is not None:
            replace_everywhere(function, _recording_maker(collectives, function), ("torch.distributed",))
    destroy = dist.destroy_process_group
    replace_everywhere(destroy, _recording_end(collectives.recorder, destroy), ("torch.distributed",))


def _recording_maker(collectives: Collectives, function: Any) -> Any:
    """Returns a function that makes groups, and records its calls."""
    bind = inspect.signature(function).bind

    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if collectives.inside:
            return function(*args, **kwargs)
        given = bind(*args, **kwargs).arguments
        world = collectives.groups.label(None)
        assert world is not None
        label, members = world
        wanted = given.get("ranks") or given.get("split_ranks")
        if given.get("use_local_synchronization") and wanted:  # only its members call it, or have to
            members = tuple(sorted(wanted))
            label = f"making of ranks {', '.join(map(str, members))}"
        if function.__name__ == "split_group" and given.get("parent_pg") is not None:
            found = collectives.groups.label(given["parent_pg"])
            label, members = found or (label, members)
        if collectives.recorder.rank not in members:
            return function(*args, **kwargs)
        by = sys._getframe(1).f_globals.get("__name__", "")
        call = collectives.record_begin(function.__name__, label, members, makes=_listed(wanted or members), by=by)
        made = collectives.run(call, lambda: function(*args, **kwargs))
        if isinstance(made, dist.ProcessGroup):
            collectives.groups.label_new(made, tuple(dist.get_process_group_ranks(made)))
        return made

    return recorded


def _listed(ranks: Any) -> Any:
    return [_listed(each) for each in ranks] if isinstance(ranks, list | tuple) else ranks


def _recording_end(recorder: Recorder, destroy: Any) -> Any:
    @wraps(destroy)
    def destroyed(group: Any = None) -> None:
        if group is None:
            recorder.emit("destroy", time=time.monotonic())
        destroy(group)
        if group is None:
            recorder.emit("destroyed")

    return destroyed


# Which parameter's value or gradient a tensor is, also where the tensor is another object with the same memory.


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
