"""The ways in which a layer can be cut, and the parts that strategies make of it, by their own code. A rank's inputs
are those that it would have: all rows of the batch, and a part of the units or of the image."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from apportion.comm.group import DONE, Group, WaitClock, Work
from apportion.core import tree
from apportion.parallel.recurrent.layer import LSTMLayer, chunk_length, chunks, layer
from apportion.parallel.tensor import attention, embedding, recurrent
from apportion.parallel.tensor.linear import slice_columns, slice_dropout, slice_rows
from apportion.parallel.tensor.patterns import is_elementwise
from apportion.parallel.tensor.slicing import Slicer
from apportion.profiler.profiled_step import backward, clock, fresh

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
NORMS = (nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm, nn.LocalResponseNorm)
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
METHODS = frozenset((
    "abs", "add", "add_", "clamp", "div", "exp", "mul", "mul_", "neg", "pow", "relu", "relu_", "sigmoid", "sqrt", "sub",
    "tanh",
))  # fmt: skip
"""The methods of tensors that are timed in parts: each treats each number by itself."""
DROPOUTS = (nn.Dropout, nn.Dropout2d)
OTHER_FUNCTIONS = (operator.abs, torch.dropout, nn.functional.dropout, nn.functional.dropout2d)
"""The functions that are timed in parts and that no sharding plan looks through."""


def ways(call: Callable[..., Any], node: fx.Node, args: Any) -> tuple[str, ...]:
    """Return the ways in which a call can be cut, on images by ``height`` as well: see ``profile.Timing.way``."""
    kind = type(call)
    if not args or not isinstance(args[0], Tensor):
        return ()
    is_image = args[0].dim() >= 4
    if kind is nn.Linear:
        return ("units", "inputs")
    if isinstance(call, nn.Module) and kind in RECURRENT:
        stacked: Any = call
        slices = ("units",) if recurrent.can_be_sliced(call) else ()
        plain = args[0].dim() == 3 and args[0].device.type == "cpu" and not stacked.bidirectional
        return ("layer", "chunk", *slices) if plain else slices  # slices take longest: every moment by itself
    if kind in CONVOLUTIONS:
        return ("units", "inputs", "height")
    if kind in TRANSPOSED or kind in POOLS or (kind in NORMS and is_image):
        return ("height",)
    if kind in BLOCKS or (isinstance(call, nn.Module) and _slices_whole(call)):
        return ("units",)
    is_method = node.op == "call_method" and node.target in METHODS
    if is_method or is_elementwise(call) or kind in DROPOUTS or call in OTHER_FUNCTIONS:
        return ("units", "height") if is_image else ("units",)
    return ()


def _slices_whole(call: nn.Module) -> bool:
    return attention.can_be_sliced(call) or (isinstance(call, nn.Embedding) and embedding.can_be_sliced(call))


def window(call: Callable[..., Any], axis: int = 0) -> tuple[int, int] | None:
    """Return the height of the window that a layer moves over an image, and its stride; ``axis=1``: the width and its
    stride. None for a layer that moves none."""
    if type(call) not in (*CONVOLUTIONS, *TRANSPOSED, *POOLS):
        return None
    module: Any = call
    size, stride = _at(module.kernel_size, axis), _at(module.stride or module.kernel_size, axis)
    return (size - 1) * _at(getattr(module, "dilation", 1), axis) + 1, stride


def _at(value: Any, axis: int = 0) -> int:
    return int(value[axis] if isinstance(value, tuple | list) else value)


def part_of(
    call: Callable[..., Any], given: tuple[Any, Any], way: str, ranks: int, *, copies: bool
) -> tuple[float, TimedPart] | None:
    """Return (share, part) of a call that is cut in this way for ``ranks`` ranks; None where the call is too small for
    that."""
    args, kwargs = given
    if way in ("layer", "chunk"):
        return _of_stack(call, args[0], way, ranks)
    made = _sliced(call, args, way, ranks) if isinstance(call, nn.Module) and way != "height" else None
    if made is None:
        made = _strip(call, args, ranks) if way == "height" else _narrow(call, args, ranks)
    return None if made is None else (1 / ranks, PartCalls(made[0], made[1], kwargs, args[0].device, copies=copies))


def _of_stack(net: Any, x: Tensor, way: str, ranks: int) -> tuple[float, TimedPart] | None:
    if ranks > net.num_layers:
        return None
    moments = x.transpose(0, 1) if net.batch_first else x
    time, rows = moments.shape[:2]
    short = isinstance(layer(net, 0), LSTMLayer)
    length = chunk_length(time, rows, ranks, net.num_layers // ranks, short=short)
    part = OneOfStack(net, moments, length, only_one=way == "chunk")
    return (1 if way == "layer" else length / time) / net.num_layers, part


def _sliced(call: nn.Module, args: Any, way: str, ranks: int) -> tuple[Any, Any] | None:
    """Cut a module by the strategies' own slices, with its arguments; None where the layer has none."""
    kind = type(call)
    own: Any = copy.deepcopy(call)
    slicer = Slicer(own, Silent(ranks))
    if kind is nn.Linear and way == "units":
        slice_columns(own, slicer, gathers=False)
    elif kind is nn.Linear:
        slice_rows(own, slicer)
        args = (_cut(args[0], -1, own.width), *args[1:])
    elif kind in CONVOLUTIONS:
        return _channels(own, args, way, ranks)
    elif kind in RECURRENT:
        recurrent.slice_units(own, slicer)
    elif isinstance(own, nn.Embedding):
        embedding.slice_vocabulary(own, slicer)
    elif kind is nn.MultiheadAttention:
        attention.slice_heads(own, slicer, 0)
    elif kind in BLOCKS:
        attention.slice_heads(own.self_attn, slicer, -1)
        slice_columns(own.linear1, slicer, gathers=False)
        slice_rows(own.linear2, slicer)
        slice_dropout(own.dropout, slicer, 0)
    else:
        return None
    return own, args


def _channels(conv: Any, args: Any, way: str, ranks: int) -> tuple[Any, Any] | None:
    """Cut a convolution to a part of its filters, of the channels that they look at, or of its groups; None where these
    do not divide."""
    groups, into, out = conv.groups, conv.in_channels, conv.out_channels
    if groups >= ranks and groups > 1:
        groups, into, out = groups // ranks, into // ranks, out // ranks
    elif way == "units":
        out //= ranks
    else:
        into //= ranks
    if not out or not into or into % groups or out % groups:
        return None
    own = type(conv)(
        into, out, conv.kernel_size, conv.stride, conv.padding, conv.dilation, groups, conv.bias is not None,
        conv.padding_mode, dtype=conv.weight.dtype, device=conv.weight.device,
    )  # fmt: skip
    return own, (_cut(args[0], 1, into), *args[1:])


def _narrow(call: Callable[..., Any], args: Any, ranks: int) -> tuple[Any, Any]:
    """Cut an element-wise call to a part of the units (on an image: of its channels) of everything that has as many."""
    dim = 1 if args[0].dim() >= 4 else -1
    return call, _all_cut(args, dim, ranks)


def _strip(call: Callable[..., Any], args: Any, ranks: int) -> tuple[Any, Any] | None:
    moved = window(call)
    if moved is None:
        return call, _all_cut(args, 2, ranks)
    size, stride = moved
    height, own = args[0].shape[2], copy.deepcopy(call)
    module: Any = own
    if type(call) in TRANSPOSED:
        rows = -(-height // ranks) + -(-(size - 1) // stride)
        padded = module.padding
    else:
        before = (
            (size - 1) // 2 if module.padding == "same" else _at(0 if module.padding == "valid" else module.padding)
        )
        outputs = (height + 2 * before - size) // stride + 1
        rows = (-(-outputs // ranks) - 1) * stride + size
        padded = module.padding if not isinstance(module.padding, str) else before
        module._reversed_padding_repeated_twice = [0] * 2 * (args[0].dim() - 2)
    if rows < size or rows > height:
        return None
    dims = args[0].dim() - 2
    each = tuple(padded) if isinstance(padded, tuple | list) else (padded,) * dims
    module.padding = (0, *each[1:]) if dims > 1 else (0,)
    return own, (_cut(args[0], 2, rows), *args[1:])


def _all_cut(args: Any, dim: int, ranks: int) -> Any:
    """Cut the same part from everything that is as long in this dimension as the first argument; at least one
    element."""
    length = args[0].shape[dim]
    own, from_the_end = -(-length // ranks), dim % args[0].dim() - args[0].dim()  # as shapes are broadcast

    def cut(t: Tensor) -> Tensor:
        same = t.dim() >= -from_the_end and t.shape[from_the_end] == length
        return _cut(t, from_the_end, own) if same else t

    return tree.map_tensors(cut, args)


def _cut(t: Tensor, dim: int, length: int) -> Tensor:
    return t.detach().narrow(dim, 0, length).contiguous().requires_grad_(t.requires_grad)


# Layers, and parts of them, that are run by themselves to be timed: forward and back, on messages that take no time.


@final
class Silent(Group):
    """A group as its first rank sees it, in which messages take no time: the time that is left is that of computing.
    What other ranks would give are copies of this rank's own tensors."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.waits, self.all_waits = 0, size, deque(), WaitClock()

    def all_reduce(self, tensor: Tensor) -> Work:
        return DONE

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).expand(self.size, *tensor.shape)  # without memory of its own

    def gather_into(self, rows: Tensor, own: Tensor) -> None:
        rows.copy_(own.expand_as(rows))

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        pass

    def reduce_scatter(self, rows: Tensor, into: Tensor) -> None:
        into.copy_(rows[0])

    def gather_parts(self, own: Tensor, parts: Sequence[Tensor]) -> None:
        for part in parts:
            n = min(part.numel(), own.numel())
            part.view(-1)[:n].copy_(own.detach().view(-1)[:n])

    def send(self, tensor: Tensor, to: int) -> Work:
        return DONE

    def receive(self, into: Tensor, source: int) -> Work:
        return DONE

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class TimedPart(ABC):
    """A layer, or a part of one, to time."""

    @abstractmethod
    def run(self) -> tuple[float, float]:
        """Run it once, and return its (forward, backward) seconds."""


@final
class PartCalls(TimedPart):
    """A module or a function that is called on these arguments, and autograd through it."""

    def __init__(
        self, call: Callable[..., Any], args: Any, kwargs: Any, device: torch.device, *, copies: bool = False
    ) -> None:
        self._call, self._given, self._device, self._copies = call, (args, kwargs), device, copies
        self._parameters = list(call.parameters()) if isinstance(call, nn.Module) else []
        self._ones: list[Tensor] | None = None

    def run(self) -> tuple[float, float]:
        for p in self._parameters:
            p.grad = None
        args, kwargs = fresh(self._given, [], copies=self._copies)
        began = clock(self._device)
        result = self._call(*args, **kwargs)
        forward = clock(self._device) - began
        made = [t for t in tree.tensors(result) if t.requires_grad]
        if self._ones is None:
            self._ones = [torch.ones_like(t) for t in made]
        began = clock(self._device)
        backward(made, list(self._ones))
        return forward, clock(self._device) - began


@final
class OneOfStack(TimedPart):
    """One layer of a recurrent stack as ``wavefront_parallel`` runs it, chunk by chunk. ``only_one``: only the first of
    its chunks, without what is done once for all of them (the gradients of its weights, where they are made so)."""

    def __init__(self, net: nn.RNNBase, x_TBI: Tensor, length: int, *, only_one: bool) -> None:
        number = min(1, net.num_layers - 1)  # most layers look at hidden units
        self._layer = layer(net, number)
        self._parameters = list(net.parameters())
        time, rows = x_TBI.shape[:2]
        self._pieces, self._only_one, self._ran = chunks(time, length), only_one, False
        self._x = torch.randn(time, rows, self._layer.inputs, dtype=x_TBI.dtype)
        self._y = torch.empty(time, rows, self._layer.outputs, dtype=x_TBI.dtype)
        self._dy, self._dx = torch.ones_like(self._y), torch.empty_like(self._x)
        widths = [self._layer.outputs] + [net.hidden_size] * isinstance(net, nn.LSTM)
        self._state = tuple(torch.zeros(rows, width, dtype=x_TBI.dtype) for width in widths)

    def run(self) -> tuple[float, float]:
        cpu, own = torch.device("cpu"), self._layer
        for p in self._parameters:
            p.grad = None
        pieces = self._pieces[:1] if self._only_one and self._ran else self._pieces  # memory holds numbers by then
        self._ran = True
        began = clock(cpu)
        own.begin_pass(self._x, self._y, self._state, training=True)
        begun = clock(cpu)
        for piece in pieces:
            own.forward(piece)
        forward = clock(cpu) - (begun if self._only_one else began)
        began = clock(cpu)
        own.begin_backward((None,) * len(own.state))
        for piece in reversed(pieces):
            own.backward(piece, self._dy[piece], self._dx[piece])
        if not self._only_one:
            own.finish()
        return forward, clock(cpu) - began
