"""One look at a network: the results of a few rows, each time from the same state and the same draws, on a copy.

Nothing that is looked at here is kept: the network is copied, in float64 where it is small, its dropout drops nothing,
and what it normalises by the batch it normalises by numbers that no row changes. What still ties rows together then is
what no strategy that divides a batch would compute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from apportion.core import tree
from apportion.core.rng import seed_everything
from apportion.core.torch_private import DropoutBase
from apportion.core.workload import Workload
from apportion.parallel.batch_coupling.sync_batch_functions import normalisation
from apportion.parallel.ops.sync_batch_norm import RunningStatistics
from apportion.parallel.tracing.side_effects import Before, draws

SMALL = 20_000_000
"""The most parameters of a network that is copied in float64; the weights of a larger one are looked at as they are."""
_DROPOUTS = {
    getattr(functional, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}
_LOW = (torch.bfloat16, torch.float16)


@dataclass
class Called:
    """A call of a module: the module's name, the tensors it was given, and those it gave."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass
class Ran:
    """The results of a run of some rows."""

    loss: Tensor | None
    """The loss of all these rows, as the workload says; None without a loss."""
    outputs: Any
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    drew: bool
    """True if the forward or the loss drew numbers of its own."""
    calls: list[Called] = field(default_factory=list)


Part = tuple[Any, Any]
"""The inputs and targets of some rows."""


class Copied:
    """A copy of a network that rows are given to."""

    def __init__(self, model: nn.Module, workload: Workload, *, double: bool) -> None:
        small = sum(p.numel() for p in model.parameters()) <= SMALL
        self.double = double and small
        # Of a large one the weights are the same memory, as other parameters: without hooks, and with other gradients.
        shared = {} if small else {id(p): nn.Parameter(p.detach()) for p in model.parameters() if p.requires_grad}
        self.model = _copied(model, shared, workload)
        if self.double:
            self.model.double()
        self._combined = tuple(_taken_apart(model, self.model))
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0
            elif isinstance(module, DropoutBase):
                module.training = False
        loss = workload.loss
        self._loss = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
        self._workload = workload
        self._mode = Steady()
        self._calls: list[Called] | None = None
        self._opened: list[tuple[str, list[Tensor]]] = []
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(self._opens(name), with_kwargs=True)
            module.register_forward_hook(self._ends())
        self.buffers = self._buffers_now()
        """The buffers as every run finds them."""
        self._before = Before(self.model)
        self._committed = [(b, b.detach().clone()) for b in self.model.buffers()]

    @property
    def normalised(self) -> dict[str, str]:
        """The modules that have taken statistics from the batch in their forward, and how."""
        return self._mode.normalised

    @property
    def single(self) -> bool:
        """True if a part of the network is computed in float32."""
        return self._mode.single or not self.double

    @property
    def low(self) -> bool:
        """True if a part of the network is computed in less than float32."""
        return self._mode.low

    def run(
        self, parts: Sequence[Part], weights: Sequence[float], *, together: bool = False, tape: bool = False
    ) -> Ran:
        """Run the forward and backward pass of one part after the other, each loss with its weight (0: it has no
        terms). ``together``: one loss is taken of the outputs of all parts."""
        self._start(tape)
        found: list[Any] = []
        drawn, drew = draws(), False
        losses: list[Tensor] = []
        with self._mode:
            for number, ((inputs, targets), weight) in enumerate(zip(parts, weights, strict=True)):
                if number:
                    self._restore()
                seed_everything(self._workload.seed)
                drawn = draws()
                found.append(self._outputs(inputs))
                if self._loss is not None and weight and not together:
                    losses.append(self._loss(found[-1], targets).reshape(()) * 1.0)
                    (losses[-1] * weight).backward()  # given a gradient, backward imports a good deal first
                    self._take_gradients()
                drew = drew or draws() != drawn
            outputs = found[0] if len(found) == 1 else None
            if together and self._loss is not None:
                outputs, targets = join_outputs(found), join_outputs([targets for _, targets in parts])
                losses, weights = [self._loss(outputs, targets).reshape(()) * 1.0], [1.0]
                losses[0].backward()
                self._take_gradients()
        weighted = [loss.detach() * w for loss, w in zip(losses, [w for w in weights if w], strict=True)]
        return self._ended(Ran(torch.stack(weighted).sum() if weighted else None, outputs, {}, {}, drew))

    def _buffers_now(self) -> dict[str, Tensor]:
        """The buffers now, but for the counters of normalisations, which count a batch once, whatever the rows, and for
        statistics that the ranks combine."""
        names = dict(self.model.named_buffers())
        return {
            name: b.detach().clone()
            for name, b in names.items()
            if not name.endswith("num_batches_tracked") and not name.startswith(self._combined)
        }

    def forward(self, inputs: Any) -> dict[str, Tensor]:
        """Run the forward alone, to see what it calls, and what it makes of the buffers."""
        self._start(tape=False)
        with self._mode, torch.no_grad():
            seed_everything(self._workload.seed)
            self._outputs(inputs)
        return self._ended(Ran(None, None, {}, {}, False)).buffers

    def loss_of(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of outputs that have been computed."""
        assert self._loss is not None
        return self._loss(outputs, targets).reshape(())

    def _outputs(self, inputs: Any) -> Any:
        inputs = tree.map_tensors(Tensor.clone, inputs)  # what a forward does in place, it does to these
        if self._workload.carry is None:
            return tree.call(self.model, inputs)
        given = tree.cast(self._workload.carry(tree.length(inputs)), *self._place())
        return tree.call(self.model, inputs, given)[0]

    def _place(self) -> tuple[torch.device, torch.dtype | None]:
        first = next(self.model.parameters(), None)
        return first.device if first is not None else torch.device("cpu"), torch.float64 if self.double else None

    def cast(self, rows: Any) -> Any:
        """Cast rows to the device and the dtype in which this network computes."""
        return tree.cast(rows, *self._place())

    def _start(self, tape: bool) -> None:
        self._gradients: dict[str, Tensor] = {}
        self._calls = [] if tape else None
        self._opened.clear()
        self._mode.inside = self._opened
        for p in self.model.parameters():
            p.grad = None

    def _ended(self, ran: Ran) -> Ran:
        ran.gradients = self._gradients
        ran.buffers = self._buffers_now()
        ran.calls = self._calls or []
        self._restore()
        return ran

    def _take_gradients(self) -> None:
        """Add up the gradients that a pass gave. Autograd may put the gradients of two parameters into one memory, so
        that a second pass cannot add to them where they are."""
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                gradient = (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach()
                before = self._gradients.get(name)
                self._gradients[name] = gradient if before is None else before + gradient
                p.grad = None

    def _restore(self) -> None:
        """Restore what a forward has changed to what it was."""
        self._before.put_back()
        with torch.no_grad():
            for buffer, value in self._committed:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)

    def _opens(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._opened.append((name, [] if self._calls is None else _copies([args, kwargs])))

        return hook

    def _ends(self) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, outputs: Any) -> None:
            name, inputs = self._opened.pop()
            if self._calls is not None:
                self._calls.append(Called(name, inputs, _copies(outputs)))

        return hook


class Steady(TorchFunctionMode):
    """A mode in which dropout drops nothing, and statistics of the batch are those that were first seen there, whatever
    the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[tuple[str, list[Tensor]]] = []
        self.normalised: dict[str, str] = {}
        self.low = self.single = False
        self._cached: dict[Any, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *((0.0, *args[5:]) if len(args) > 4 else ())), {
                **kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {}),
            }  # fmt: skip
        elif func is functional.multi_head_attention_forward and "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        asked = normalisation(func, args, kwargs)
        if asked is not None:
            name = self.inside[-1][0] if self.inside else ""
            self.normalised.setdefault(name, getattr(func, "__name__", asked.kind))
            x, parameters = asked.x, (asked.weight, asked.bias)
            if asked.kind == "instance":
                return functional.instance_norm(x, None, None, *parameters, True, asked.momentum, asked.eps)
            with torch.no_grad():
                columns = x.transpose(0, 1).reshape(x.shape[1], -1)
                mean, variance = self._cached.setdefault(
                    (name, len(columns)), (columns.mean(1), columns.var(1, correction=0))
                )
            return functional.batch_norm(x, mean, variance, *parameters, False, asked.momentum, asked.eps)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            self.low = self.low or result.dtype in _LOW
            self.single = self.single or result.dtype is torch.float32
        return result


def _copied(model: nn.Module, shared: dict[int, Any], workload: Workload) -> nn.Module:
    try:
        return copy.deepcopy(model, dict(shared))
    except Exception:  # it keeps what was computed: another one is made, where that costs little
        if shared:
            raise
        seed_everything(workload.seed)
        first = next(model.parameters(), torch.empty(0))
        return workload.make_model().to(first.device, first.dtype)


def _taken_apart(model: nn.Module, copied: nn.Module) -> Iterator[str]:
    """Yield how the buffers of the running statistics are called that the ranks combine; in the copy they do not."""
    for name, module in model.named_modules():
        if isinstance(module, RunningStatistics) and module.whole is not None:
            copied.get_submodule(name).whole = None  # type: ignore[assignment]
            yield f"{name}."


def join_outputs(parts: Sequence[Any]) -> Any:
    """The rows of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    leaves = [tree.tensors(part) for part in parts]
    whole = iter([torch.cat(each) for each in zip(*leaves, strict=True)])
    return tree.map_tensors(lambda _: next(whole), parts[0])


def _copies(values: Any) -> list[Tensor]:
    return [t.detach().clone() for t in tree.tensors(values)]
