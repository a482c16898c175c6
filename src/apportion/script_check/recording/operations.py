"""The functions of torch.distributed that all ranks of a group, or two of them, have to call: what each is called with.

``Operation`` names the arguments that hold what a rank gives and what it gets, and the rank that gives to, or gets
from, the others.
"""

from __future__ import annotations

from dataclasses import dataclass


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
