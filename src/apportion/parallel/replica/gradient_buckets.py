"""The sum of every rank's gradients, in few messages; where messages take long, while the backward pass still computes.

Small gradients are packed into flat buffers, large ones are summed where they lie. Which parameters were used, and the
loss, ride in the tail of the last buffer: a parameter that no rank used keeps ``grad=None``, so that the optimizer
skips it as it would on one device.

``early``: a buffer leaves as soon as the backward pass has filled it, the last layers' first (Li et al., "PyTorch
Distributed", VLDB 2020, section 3.2.3), and a large gradient as soon as it is there. All ranks send in one order: a
buffer whose parameters a rank has not used goes when its pass has ended, and holds up those after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer
from torch.utils.hooks import RemovableHandle

from apportion.comm.group import Group, Work
from apportion.comm.network.host_exchange import HostsGroup, HostSum
from apportion.core import fast_paths, torch_private
from apportion.core.torch_private import gradient_hooks_of
from apportion.errors import ApportionError
from apportion.parallel.compression.compression import COMPRESSED, Compression

LARGE_BYTES = 1 << 20
"""The bytes of a gradient from which on copying it costs more than a message of its own."""
MOST_BYTES = 25 << 20
"""The most bytes of gradients that leave early together: PyTorch DDP's default."""


def early_bytes(ranks: int) -> int:
    """The bytes of gradients that leave together before the backward pass has ended: enough that each message of a
    ring of these ranks has half a MiB, beside which its latency is small."""
    return min(MOST_BYTES, max(LARGE_BYTES, ranks * LARGE_BYTES // 2))


@dataclass
class _Packed:
    """Parameters whose gradients travel together, of one dtype and device, and ``tail_numbers`` numbers behind them. A
    large gradient travels by itself, from where it lies if it may."""

    parameters: list[nn.Parameter]
    tail_numbers: int = 0
    between: HostSum | None = None
    """The sum between hosts, where it is compressed."""
    missing: set[nn.Parameter] = field(default_factory=set)
    """The parameters for which the backward pass under way has no gradient yet."""
    early: bool = False
    """May it leave before the backward pass has ended? Then it has a connection for such sums."""
    in_place: Tensor | None = None
    """The gradient that is summed where it lies in this step; None: in the buffer."""

    @property
    def numbers(self) -> int:
        """The numbers of all gradients together."""
        return sum(p.numel() for p in self.parameters)

    @cached_property
    def flat(self) -> Tensor:
        """The buffer, which is made when it is needed."""
        return self.parameters[0].new_zeros(self.numbers + self.tail_numbers)

    @cached_property
    def views(self) -> list[Tensor]:
        """The place of each gradient in the buffer."""
        sizes = [p.numel() for p in self.parameters]
        parts = self.flat.split([*sizes, self.tail_numbers])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=False)]

    @property
    def tail(self) -> Tensor:
        """The numbers behind the gradients."""
        return self.flat[self.flat.numel() - self.tail_numbers :]

    def lies_alone(self) -> Tensor | None:
        """Return the gradient if it may be summed where it lies: one by itself, and alone in its memory. Autograd may
        give two parameters the same memory (``p.view(-1) + q.view(-1)``), which would be summed twice. A user's hook,
        which is called after the sum has begun, may write to it."""
        p, grad = self.parameters[0], self.parameters[0].grad
        if len(self.parameters) > 1 or self.tail_numbers or grad is None or grad.device.type != "cpu":
            return None
        lies = grad.layout is torch.strided and grad.is_contiguous() and not grad.is_conj()
        hooked = len(torch_private.gradient_hooks_of(p)[1]) > 1  # one is that of the sum
        return grad if lies and not hooked and torch_private.is_alone_in_memory(grad) else None


class GradientSum:
    """Sums ``p.grad`` of these parameters over a group, in a fixed order.

    ``early``: where the group can sum while its ranks compute, it does from ``begin_backward`` on, with a connection of
    its own: the ranks may call other collectives of the group in their backward passes. ``compress``: what travels
    between hosts is compressed, except sparse gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        *,
        sparse: Sequence[nn.Parameter] = (),
        early: bool = False,
        optimizers: Sequence[Optimizer] = (),
        compress: Compression | None = None,
    ) -> None:
        self._optimizers, self._compress = optimizers, compress
        self._sparse = [p for p in parameters if any(p is s for s in sparse)]
        self._dense = [p for p in parameters if not any(p is s for s in sparse)]
        self._may_leave_early = early and not fast_paths.is_plain("early")
        self._hooks: list[RemovableHandle] = []
        self._sent: list[Work] = []
        self._lane: Group | None = None
        self._sends = self._observes = False
        self._observed = False
        """True once a backward pass has been seen from its beginning to its end."""
        self._lay_out(group)

    def _lay_out(self, group: Group) -> None:
        """Divide the gradients into buffers, as every rank of this group does."""
        self._group, dense = group, self._dense
        early = self._may_leave_early and group.beside
        self._large = [] if early else [p for p in dense if _nbytes(p) >= LARGE_BYTES]
        large = set(self._large)
        full, rest = _gathered(
            [p for p in reversed(dense) if p not in large], early_bytes(group.size) if early else None
        )
        of_all = [*dense, *self._sparse]
        device = of_all[0].device if of_all else torch.device("cpu")
        # One slot a parameter says whether it was used, the last one carries the loss.
        self._tail = torch.zeros(len(dense) + 1, device=device)
        self._packed = [_Packed(each) for each in [*full, *rest]]
        if rest and rest[-1][0].dtype.is_floating_point and self._compress is None:  # what it says is exact
            self._packed[-1].tail_numbers = len(dense) + 1
            self._tail = self._packed[-1].tail
        self._large_between: list[HostSum | None] = []
        self._forget()
        self._early = self._packed[: len(full)]
        """The buffers that can leave before the backward pass has ended."""
        if self._early and self._lane is None:
            self._lane = group.lane()
        for packed in self._early:
            packed.early = True
            self._hooks += [p.register_post_accumulate_grad_hook(self._whole(packed)) for p in packed.parameters]

    def _forget(self) -> None:
        """Make the sums between hosts anew: nothing is left over of what they have sent."""
        for packed in self._packed:
            packed.between = self._between(packed.parameters)
        self._large_between = [self._between([p]) for p in self._large]

    def _between(self, parameters: Sequence[nn.Parameter]) -> HostSum | None:
        if self._compress is None or parameters[0].dtype not in COMPRESSED:
            return None
        return self._compress.between([p.shape for p in parameters], parameters[0].dtype)

    @property
    def between(self) -> list[tuple[HostSum, int]]:
        """The compressed sums between hosts, and of how many numbers each of them is."""
        each = [(packed.between, packed.numbers) for packed in self._packed]
        each += [(between, p.numel()) for between, p in zip(self._large_between, self._large, strict=True)]
        return [(between, numbers) for between, numbers in each if between is not None]

    def rejoin(self, group: Group) -> None:
        """Sum the gradients of the same parameters over the ranks of this group from now on."""
        # Who was just built for this group rejoins it as the others do, and has the lane that these open now.
        if group is not self._group:
            self.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._sent = [], []
        self._sends = self._observes = False
        self._lay_out(group)

    def begin_backward(self) -> None:
        """Begin the backward pass that makes the gradients whole: the buffers that it has filled may leave."""
        self._sent = []
        for packed in self._early:
            packed.missing = set(packed.parameters)
        # Who gets its gradient in two parts (checkpoint(use_reentrant=True)) does so in the first pass too.
        self._sends, self._observes = self._observed, not self._observed

    def _whole(self, packed: _Packed) -> Callable[[Tensor], None]:
        def arrived(p: Tensor) -> None:
            if not self._sends and not self._observes:
                return
            if p not in packed.missing:
                self._arrived_again(p, packed)
            packed.missing.discard(p)
            if self._sends:
                # In the order of the buffers, whichever is full first: every rank has to begin the same sums in the
                # same order.
                while len(self._sent) < len(self._early) and not self._early[len(self._sent)].missing:
                    self._sent.append(self._start_packed(self._early[len(self._sent)]))

        return arrived

    def _arrived_again(self, p: Tensor, packed: _Packed) -> None:
        if any(packed is sent for sent in self._early[: len(self._sent)]):
            raise ApportionError(
                f"the gradient of a parameter of shape {tuple(p.shape)} went on growing after it was there, as in no "
                "step before: compute it in one backward pass, as torch.utils.checkpoint does with use_reentrant=False"
            )
        self._early = []  # from now on nothing leaves before the end, in the same order
        self._sends = self._observes = False

    def __call__(self, loss: Tensor | None, weight: float) -> Tensor:
        """Replace every ``p.grad`` by its sum over the ranks; returns the sum of weight times loss (None: this rank has
        no rows)."""
        self._observed |= self._observes
        self._sends = self._observes = False
        used = [p.grad is not None for p in self._dense]
        self._fill_tail(used, loss, weight)
        pending = [*self._sent, *(self._start_packed(packed) for packed in self._packed[len(self._sent) :])]
        self._sent = []
        if not self._packed or not self._packed[-1].tail_numbers:
            pending.append(self._start(self._tail))
        pending += self._start_large()
        for work in pending:
            work.wait()
        for packed in self._packed:
            sums = packed.views if packed.in_place is None else [packed.in_place]
            for p, total in zip(packed.parameters, sums, strict=True):
                p.grad = total
            packed.in_place = None
        total = self._tail[-1].clone()
        if not all(used):
            self._drop_unused()
        for p in self._sparse:
            self._sum_sparse(p)
        return total

    def close(self) -> None:
        """Close the connection that is this sum's own."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def _start(self, tensor: Tensor, between: HostSum | None = None, *, early: bool = False) -> Work:
        """Begin a sum. What comes after the backward pass is small, and does not wait behind what has left early."""
        group = self._lane if early and self._lane is not None else self._group
        if between is not None and isinstance(group, HostsGroup):
            return group.all_reduce_between(tensor, between)
        return group.all_reduce(torch.view_as_real(tensor) if tensor.is_complex() else tensor)

    def _fill_tail(self, used: list[bool], loss: Tensor | None, weight: float) -> None:
        tail = self._tail
        if all(used):
            tail.fill_(1.0)
        else:
            tail[:-1] = torch.tensor(used, dtype=tail.dtype)
        if loss is None:
            tail[-1] = 0.0
        else:
            torch.mul(loss, weight, out=tail[-1])

    def _start_packed(self, packed: _Packed) -> Work:
        packed.in_place = packed.lies_alone()
        if packed.in_place is not None:
            return self._start(packed.in_place.view(-1), packed.between, early=packed.early)
        present = [(v, p.grad) for v, p in zip(packed.views, packed.parameters, strict=True) if p.grad is not None]
        if len(present) < len(packed.views):
            packed.flat[: packed.flat.numel() - packed.tail_numbers].zero_()
        if present:
            try:
                torch_private.foreach_copy([v for v, _ in present], [g for _, g in present])
            except (RuntimeError, NotImplementedError):
                if not self._make_dense(packed.parameters):
                    raise
                return self._start_packed(packed)
        return self._start(packed.flat, packed.between, early=packed.early)

    def _make_dense(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Make sparse gradients dense, of parameters that are not known to have them; returns whether any were
        found."""
        found = [p for p in parameters if p.grad is not None and p.grad.layout is not torch.strided]
        for p in found:
            p.grad = dense(p, self._optimizers)
        return bool(found)

    def _start_large(self) -> list[Work]:
        storages = set()
        self._make_dense(self._large)
        for p in self._large:
            if p.grad is None:
                p.grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
            # Autograd may give two parameters the same memory (p.view(-1) + q.view(-1)), which would be summed twice.
            elif not p.grad.is_contiguous() or p.grad.untyped_storage().data_ptr() in storages:
                p.grad = p.grad.clone(memory_format=torch.contiguous_format)
            p.grad = p.grad.resolve_conj()
            storages.add(p.grad.untyped_storage().data_ptr())
        each = zip(self._large, self._large_between, strict=True)
        return [self._start(p.grad, between) for p, between in each if p.grad is not None]

    def _drop_unused(self) -> None:
        """Set ``p.grad`` to None where no rank used a parameter. A rank that used every parameter need not look: each
        of them was used."""
        for p, ranks in zip(self._dense, self._tail[:-1].tolist(), strict=True):
            if ranks == 0.0:
                p.grad = None

    def _sum_sparse(self, p: nn.Parameter) -> None:
        gradient = p.grad.coalesce() if p.grad is not None else None
        indices = (
            gradient.indices().t().contiguous() if gradient is not None else p.new_zeros((0, 1), dtype=torch.int64)
        )
        values = gradient.values() if gradient is not None else p.new_zeros((0, *p.shape[1:]))
        rows = torch.cat(self._group.all_gather_rows(indices))
        summed = torch.cat(self._group.all_gather_rows(values))
        p.grad = (
            torch.sparse_coo_tensor(rows.t(), summed, p.shape, check_invariants=False).coalesce() if len(rows) else None
        )


def dense(p: nn.Parameter, optimizers: Optimizer | Sequence[Optimizer], name: str = "") -> Tensor:
    """A parameter's sparse gradient as a dense tensor. Raises ValueError where its optimizer would make another update
    from that. Such a gradient comes from ``F.embedding(..., sparse=True)``, which no layer shows beforehand."""
    given = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    kinds = [type(o) for o in given for group in o.param_groups if any(p is q for q in group["params"])]
    assert p.grad is not None
    if all(kind in (SGD, Adagrad) for kind in kinds):
        return p.grad.to_dense()
    raise ValueError(
        f"the gradient of {name or 'a parameter'} of shape {tuple(p.shape)} is sparse, though no layer says so, and "
        f"{kinds[0].__name__} is not known to make the same update of a dense one: look it up by "
        "nn.Embedding(sparse=True), whose gradients travel as rows, or with sparse=False"
    )


def _nbytes(p: nn.Parameter) -> int:
    return p.numel() * p.element_size()


def _gathered(
    parameters: Sequence[nn.Parameter], most: int | None
) -> tuple[list[list[nn.Parameter]], list[list[nn.Parameter]]]:
    """The parameters in this order: each large one by itself, others of one dtype and device together until they have
    ``most`` bytes; and what is left of each kind."""
    full: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for p in parameters:
        if most is not None and _nbytes(p) >= LARGE_BYTES:
            full.append([p])
            continue
        kind = (p.dtype, p.device)
        filling.setdefault(kind, []).append(p)
        if most is not None and sum(map(_nbytes, filling[kind])) >= most:
            full.append(filling.pop(kind))
    return full, list(filling.values())


# Hooks on the gradients of parameters, run on the gradient of the whole batch.
#
# Autograd would call them with the gradient of the rows that this rank has, or of one micro-batch: the clamp of a sum
# is not the sum of the clamps. So their places are taken, and they are called once the gradients have been added up,
# in the order in which a backward pass comes to the parameters: from the last to the first.

Hooks = tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]], nn.Parameter]
"""The hooks of a parameter that are given the gradient, those that are given the parameter once it has one, and the
parameter itself."""


class GradientHooks:
    """The hooks that some parameters have now."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._hooks = {name: _taken(p) for name, p in named if any(gradient_hooks_of(p))}

    @property
    def names(self) -> list[str]:
        """The names of the parameters that have hooks."""
        return list(self._hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    @torch.no_grad()
    def __call__(self, parameters: Mapping[nn.Parameter, str], *, of_parameters: bool = True) -> None:
        """Call the hooks of these parameters, by their names: their gradients are whole. ``of_parameters``: call those
        hooks, too, that are given the parameter, which ``torch.autograd.grad`` does not call."""
        for p, name in reversed(list(parameters.items())):
            if name in self._hooks and p.grad is not None:
                given, after, owner = self._hooks[name]
                self._call(p, given, after if of_parameters else {}, owner)

    def _call(self, p: nn.Parameter, given: Any, after: Any, owner: nn.Parameter) -> None:
        now, then = gradient_hooks_of(owner)
        for key, hook in given.items():
            if key in now:  # it has not been removed
                changed = hook(p.grad)
                p.grad = p.grad if changed is None else changed
        for key, hook in after.items():
            if key in then and p.grad is not None:
                hook(p)


def _taken(p: nn.Parameter) -> Hooks:
    given, after = gradient_hooks_of(p)
    found = dict(given), dict(after)
    for hooks in (given, after):
        for key in hooks:
            hooks[key] = _nothing
    return *found, p


def _nothing(_: Tensor) -> None:
    pass
