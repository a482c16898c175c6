"""One layer of nn.LSTM, nn.GRU or nn.RNN, run in pieces of time: forward chunk by chunk, backward in the reverse order.

The state that a chunk ends in is what the next one begins with, and so is its gradient on the way back: the pieces
compute what the whole does. T is the time, B the row; everything is time-major.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class LSTMWorkspace:
    """The memory of a pass over ``time`` moments and ``rows`` rows. Fresh pages at every step would cost as much as the
    arithmetic on them."""

    def __init__(self, w_hh: Tensor, time: int, rows: int) -> None:
        H = w_hh.shape[1]
        self.shape = (time, rows)
        sizes = [*(time * rows * n for n in (4 * H, 4 * H, H)), (time + 1) * rows * H, H * 4 * H]
        gates, dgates, tanh_c, c, whh_t = w_hh.new_empty(sum(sizes)).split(sizes)
        self.gates, self.dgates = gates.view(time, rows, 4 * H), dgates.view(time, rows, 4 * H)
        self.tanh_c, self.c, self.whh_t = tanh_c.view(time, rows, H), c.view(time + 1, rows, H), whh_t.view(H, 4 * H)
        self.dh, self.dc = (w_hh.new_empty(rows, H) for _ in range(2))
        # Views by moment, made once: slicing costs about as much as the arithmetic on small layers.
        self.moments = [
            (g, g[:, : 2 * H], g[:, 2 * H : 3 * H], g[:, 3 * H :], g[:, :H], g[:, H : 2 * H], *cs, tc)
            for g, *cs, tc in zip(self.gates, self.c, self.c[1:], self.tanh_c, strict=False)
        ]
        self.factors = [
            (d, d.view(rows, 4, H)[:, :3], d[:, 3 * H :], tc, g[:, H : 2 * H])
            for d, tc, g in zip(self.dgates, self.tanh_c, self.gates, strict=True)
        ]


@final
class GradientMemory:
    """The memory that the gradients of a layer's weights are computed into, the same at every step."""

    def __init__(self) -> None:
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._more: list[tuple[nn.Parameter, Tensor]] = []
        """The parameters that have a gradient already, with what is to be added to it."""

    def memory_for(self, p: nn.Parameter) -> Tensor:
        """Return the memory that is ``p.grad`` from now on; where there is a gradient already, memory for what ``add``
        will add to it."""
        if p.grad is not None:
            self._more.append((p, torch.empty_like(p, memory_format=torch.contiguous_format)))
            return self._more[-1][1]
        if p not in self._kept:
            self._kept[p] = torch.empty_like(p, memory_format=torch.contiguous_format)
        p.grad = self._kept[p]
        return p.grad

    def add(self) -> None:
        """Add to the gradients that were there before what has been computed for them."""
        for p, gradient in self._more:
            assert p.grad is not None
            p.grad.add_(gradient)
        self._more = []


_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
State = tuple[Tensor, ...]
"""The state of one layer, (B, width) each: (h, c) of an LSTM, (h,) of the others."""


class RecurrentLayer(ABC):
    """A layer that is run in pieces of time: ``begin_pass``, ``forward`` for every chunk in order; then
    ``begin_backward``, ``backward`` for every chunk in the reverse order, ``finish``. One pass at a time."""

    def __init__(self, net: nn.RNNBase, number: int) -> None:
        names = [f"weight_ih_l{number}", f"weight_hh_l{number}"]
        names += [f"bias_ih_l{number}", f"bias_hh_l{number}"] if net.bias else []
        names += [f"weight_hr_l{number}"] if net.proj_size else []
        self.names = names
        self.weights: list[nn.Parameter] = [getattr(net, name) for name in names]
        self.inputs = net.input_size if number == 0 else net.proj_size or net.hidden_size
        self.outputs = net.proj_size or net.hidden_size
        self.state: State = ()
        """The state that the chunks so far end in."""

    @abstractmethod
    def begin_pass(self, x_TBI: Tensor, y_TBO: Tensor, state: State, *, training: bool) -> None:
        """Begin a pass with the memory of the inputs, of which each chunk is there when it is run, and of the outputs,
        both contiguous; and with the state that the first chunk begins with, to which no gradient flows."""

    @abstractmethod
    def forward(self, chunk: slice) -> None:
        """Compute the outputs and the state of a chunk."""

    def ahead(self, chunk: slice) -> None:  # noqa: B027 (nothing is the common case)
        """Compute what of a chunk's backward pass needs no gradient yet, while the rank waits anyway."""

    @abstractmethod
    def begin_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Begin the backward pass with the gradients of the state that the last chunk ended in."""

    @abstractmethod
    def backward(self, chunk: slice, dy_TBO: Tensor, dx_TBI: Tensor | None) -> None:
        """Compute a chunk's backward pass: the gradients of its outputs are given, those of its inputs are written into
        ``dx_TBI`` where asked for."""

    def finish(self) -> None:  # noqa: B027 (a layer whose chunks have done it has nothing left)
        """Leave the gradients of the weights in ``p.grad``."""


@final
class TorchLayer(RecurrentLayer):
    """A layer that runs torch's own kernel on each chunk, and autograd through it: for every kind of layer. Each call
    of oneDNN's LSTM puts all weights into an order of its own and makes a gradient of all of them, so chunks should be
    long."""

    def __init__(self, net: nn.RNNBase, number: int) -> None:
        super().__init__(net, number)
        self._call = getattr(torch, net.mode.lower())
        self._is_lstm, self._bias = isinstance(net, nn.LSTM), net.bias
        self._passed: list[tuple[Tensor, State, list[Tensor]]] = []
        self._gradients: list[Tensor | None] = []

    def begin_pass(self, x_TBI: Tensor, y_TBO: Tensor, state: State, *, training: bool) -> None:
        self._x, self._y, self.state, self._training = x_TBI, y_TBO, state, training
        self._passed = []

    def forward(self, chunk: slice) -> None:
        # Not detach(): autograd would take what is later written of the other chunks for a change of this one.
        x = self._x[chunk].data.requires_grad_(self._training)
        state = tuple(t.detach().requires_grad_(self._training and bool(self._passed)) for t in self.state)
        with torch.set_grad_enabled(self._training):
            begun = [t.unsqueeze(0) for t in state]
            y, *ended = self._call(
                x, begun if self._is_lstm else begun[0], self.weights, self._bias, 1, 0.0, self._training, False, False
            )
        self._y[chunk].copy_(y.detach())
        self.state = tuple(t.detach().squeeze(0) for t in ended)
        if self._training:
            self._passed.append((x, state, [y, *ended]))

    def begin_backward(self, gradients: Sequence[Tensor | None]) -> None:
        self._gradients = [None if g is None else g.unsqueeze(0) for g in gradients]

    def backward(self, chunk: slice, dy_TBO: Tensor, dx_TBI: Tensor | None) -> None:
        x, state, ended = self._passed.pop()
        wanted = [t for t in (*([] if dx_TBI is None else [x]), *state, *self.weights) if t.requires_grad]
        if wanted:
            given = [(t, g) for t, g in zip(ended, [dy_TBO, *self._gradients], strict=True) if g is not None]
            torch.autograd.backward([t for t, _ in given], [g for _, g in given], inputs=wanted)
        if dx_TBI is not None:
            dx_TBI.copy_(x.grad)  # type: ignore[arg-type]
        self._gradients = [None if t.grad is None else t.grad.unsqueeze(0) for t in state]


@final
class LSTMLayer(RecurrentLayer):
    """An LSTM layer out of matrix products, all of them into memory that is kept.

    Two of the six products of a step are on the way of the state from one moment to the next; one each way hands the
    inputs and their gradient to the other layers, a chunk at a time; the gradients of the weights, a third of the work,
    delay no other rank and are two products over the whole time at the end.
    """

    def __init__(self, net: nn.RNNBase, number: int) -> None:
        super().__init__(net, number)
        self._w_ih, self._w_hh = self.weights[:2]
        self._biases = self.weights[2:]
        self._space = LSTMWorkspace(self._w_hh, 0, 0)
        self._gradients = GradientMemory()

    def begin_pass(self, x_TBI: Tensor, y_TBO: Tensor, state: State, *, training: bool) -> None:
        self._x, self._y, self._first = x_TBI, y_TBO, state[0]
        time, rows = y_TBO.shape[:2]
        if self._space.shape != (time, rows):
            self._space = LSTMWorkspace(self._w_hh, time, rows)
        self._space.c[0].copy_(state[1])
        self.state = (state[0], self._space.c[0])
        self._space.whh_t.copy_(self._w_hh.detach().t())
        self._bias = (self._biases[0] + self._biases[1]).detach() if self._biases else None
        self._readied = time
        """The moment from which on ``ahead`` has been done."""

    @torch.no_grad()
    def forward(self, chunk: slice) -> None:
        space = self._space
        x, gates = self._x[chunk].flatten(0, 1), space.gates[chunk].flatten(0, 1)
        if self._bias is None:
            torch.mm(x, self._w_ih.t(), out=gates)
        else:
            torch.addmm(self._bias, x, self._w_ih.t(), out=gates)
        h = self.state[0]
        for moment, y in zip(space.moments[chunk], self._y[chunk].unbind(0), strict=True):
            gate, input_forget, cell, output, i, f, c, c_next, tanh_c = moment
            gate.addmm_(h, space.whh_t)
            input_forget.sigmoid_()
            cell.tanh_()
            output.sigmoid_()
            torch.mul(f, c, out=c_next)
            c_next.addcmul_(i, cell)
            torch.tanh(c_next, out=tanh_c)
            h = torch.mul(output, tanh_c, out=y)
        self.state = (h, space.c[chunk.stop])

    @torch.no_grad()
    def ahead(self, chunk: slice) -> None:
        """Write the factors of dc (of the output gate: of dh) in the gradients of the gates into the memory of these,
        and the factor of dh in dc into that of tanh(c)."""
        start, stop = chunk.start, min(chunk.stop, self._readied)
        if start >= stop:
            return
        self._readied = start
        space = self._space
        c, tanh_c = space.c[start:stop], space.tanh_c[start:stop]
        i, f, cell, output = space.gates[start:stop].chunk(4, 2)
        di, df, dcell, doutput = space.dgates[start:stop].chunk(4, 2)
        _sigmoid_backward(cell, i, grad_input=di)
        _sigmoid_backward(c, f, grad_input=df)
        _tanh_backward(i, cell, grad_input=dcell)
        _sigmoid_backward(tanh_c, output, grad_input=doutput)
        _tanh_backward(output, tanh_c, grad_input=tanh_c)

    @torch.no_grad()
    def begin_backward(self, gradients: Sequence[Tensor | None]) -> None:
        self._dstate = gradients[0]
        if gradients[1] is None:
            self._space.dc.zero_()
        else:
            self._space.dc.copy_(gradients[1])

    @torch.no_grad()
    def backward(self, chunk: slice, dy_TBO: Tensor, dx_TBI: Tensor | None) -> None:
        self.ahead(chunk)
        space, dh, dc = self._space, self._space.dh, self._space.dc
        later = space.dgates[chunk.stop] if chunk.stop < len(space.dgates) else None
        for moment, dy in zip(reversed(space.factors[chunk]), reversed(dy_TBO.unbind(0)), strict=True):
            gate, with_dc, with_dh, into_dc, forget = moment
            if later is not None:
                torch.addmm(dy, later, self._w_hh, out=dh)
            elif self._dstate is not None:
                torch.add(dy, self._dstate, out=dh)
            else:
                dh.copy_(dy)
            dc.addcmul_(dh, into_dc)
            with_dc.mul_(dc.unsqueeze(1))
            with_dh.mul_(dh)
            dc.mul_(forget)
            later = gate
        if dx_TBI is not None:
            torch.mm(space.dgates[chunk].flatten(0, 1), self._w_ih, out=dx_TBI.flatten(0, 1))

    @torch.no_grad()
    def finish(self) -> None:
        dgates, gradients = self._space.dgates, self._gradients
        dgates_t = dgates.flatten(0, 1).t()
        if self._w_ih.requires_grad:
            torch.mm(dgates_t, self._x.flatten(0, 1), out=gradients.memory_for(self._w_ih))
        if self._w_hh.requires_grad:
            gradient = torch.mm(dgates[0].t(), self._first, out=gradients.memory_for(self._w_hh))
            if len(dgates) > 1:
                gradient.addmm_(dgates[1:].flatten(0, 1).t(), self._y[:-1].flatten(0, 1))
        trained = [bias for bias in self._biases if bias.requires_grad]
        if trained:
            sums = torch.mv(dgates_t, dgates_t.new_ones(dgates_t.shape[1]))  # twice as fast as sum()
            for bias in trained:
                gradients.memory_for(bias).copy_(sums)
        gradients.add()


def layer(net: nn.RNNBase, number: int) -> RecurrentLayer:
    """The layer of this number, of the class that is fastest with the kernels of this machine."""
    weight: Any = getattr(net, f"weight_hh_l{number}")
    if isinstance(net, nn.LSTM) and not net.proj_size and weight.device.type == "cpu" and products_are_fast():
        return LSTMLayer(net, number)
    return TorchLayer(net, number)


def products_are_fast() -> bool:
    """Return whether matrix products are as fast as oneDNN's LSTM. MKL's are on Intel's processors; on AMD's they reach
    two thirds of what oneDNN does."""
    try:
        with open("/proc/cpuinfo") as file:
            return "AuthenticAMD" not in file.read(4096)
    except OSError:
        return True


def chunk_length(time: int, rows: int, ranks: int, layers: int, *, short: bool) -> int:
    """The number of moments of a chunk. The ranks wait for each other for as long as a chunk takes at either end, out
    of ``layers`` (of each rank) times the whole time: an eighth of a rank's part of that is enough, and at least 128
    rows in a product keep it fast. A kernel that is slow to begin (not ``short``) gets a quarter."""
    part = min(layers, 4) if short else 2 * min(layers, 2)
    return min(time, max(math.ceil(time * part / (8 * ranks)), math.ceil(128 / rows)))


def chunks(time: int, length: int) -> list[slice]:
    """The time in pieces of this length; the last may be shorter."""
    return [slice(start, min(start + length, time)) for start in range(0, time, length)]
