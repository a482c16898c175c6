"""Collectives and messages that gradients flow through, each with its adjoint.

Shoeybi et al., "Megatron-LM", 2019, section 3 (``copy_to`` and ``reduce_from`` are its f and g); the adjoints of the
others as Hewett and Grady, "A Linear Algebraic Approach to Model Parallelism in Deep Learning", 2020, derive them.

::

                      forward                          backward
    copy_to           x                                sum over the ranks
    reduce_from       sum over the ranks               gradient
    scatter_to        this rank's part                 all parts
    gather_from       all parts                        this rank's part of a gradient that is alike on all ranks
    all_gather        all parts                        this rank's part of the sum over the ranks
    reduce_scatter    this rank's part of the sum      all parts
    halo              neighbours' rows around x        the rows' gradients, added where they came from
    sent, received    a message                        its gradient, the other way

The rule that all of them need: every rank of the group calls the same functions in the same order, and whatever they
return takes part in what ``backward`` is called on, on every rank or on none. Autograd runs the functions of a graph
in the reverse of the order in which they were called, so the backward passes meet each other in one order too; two
ranks could take no other. A rank whose part is empty calls them like the others.

``dim`` is the dimension that is divided, ``sizes`` the length of every rank's part of it; 0 is a length.

The halo of a rank is the rows around its own, fetched from whichever ranks hold them::

    rank 0    | 0 1 2 3 |
    rank 1            | 4 5 |            before 3, after 1: wants 1 2 3 of rank 0 and 6 of rank 2
    rank 2                | 6 7 8 |

Only neighbours that hold what another wants talk to each other; a halo may reach over several ranks, and a rank may
hold no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, Variable
from torch.autograd.function import once_differentiable

from apportion.comm.group import DONE, Group, Work

Map = Callable[[Tensor], Tensor]


class _LinearMap(Function):
    """A linear map over the ranks, and its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _linear(x: Tensor, there: Map, back: Map) -> Tensor:
    mapped: Tensor = _LinearMap.apply(x, there, back)
    return mapped


def gather_rows(rows: Tensor, group: Group) -> Tensor:
    """Gather dimension 0 as ``gather_from`` does, where the ranks do not know each other's number of rows. ValueError,
    which states the shapes, where the ranks' rows differ in another dimension."""
    return gather_from(rows, group, 0, group.row_counts(rows))


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Pass on x, which is the same on every rank and goes into something else on each: its gradient is the sum of
    theirs."""
    return x if group.size == 1 else _linear(x, lambda x: x.view_as(x), group.total)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's x, on all of them, for a computation that is the same on each."""
    return x if group.size == 1 else _linear(x, group.total, lambda gradient: gradient)


def scatter_to(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """Take this rank's part of x, which is the same on every rank."""
    parts = _Parts("scatter_to", x, group, dim, sizes, length=sum(sizes))
    return _linear(x, parts.own, parts.gathered)


def gather_from(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """Gather all parts, for a computation that is the same on every rank: their gradient is whole on each rank, and
    this one takes its part of it."""
    parts = _Parts("gather_from", x, group, dim, sizes, length=sizes[group.rank])
    return _linear(x, parts.gathered, parts.own)


def all_gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """Gather all parts, for a computation that differs from rank to rank: the gradient of this rank's part is the sum
    of what all ranks have for it."""
    parts = _Parts("all_gather", x, group, dim, sizes, length=sizes[group.rank])
    return _linear(x, parts.gathered, parts.own_sum)


def reduce_scatter(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part of the sum of every rank's x."""
    parts = _Parts("reduce_scatter", x, group, dim, sizes, length=sum(sizes))
    return _linear(x, parts.own_sum, parts.gathered)


def halo(
    x: Tensor,
    group: Group,
    dim: int,
    before: Sequence[int],
    after: Sequence[int],
    *,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """This rank's rows of dimension ``dim`` with those around them: the ``before[rank]`` rows that lie before them and
    the ``after[rank]`` behind, of however many ranks these are. The rows of all ranks lie one behind the other, in rank
    order; none may be wanted before the first or behind the last of all.

    Only ranks that hold what another wants send anything. ``sizes``: every rank's rows; None: they tell each other.
    """
    reach = _reach(x, group, dim, before, after, sizes)
    return _linear(x, lambda x: with_halo(x, group, reach), lambda gradient: without_halo(gradient, group, reach))


def sent(x: Tensor, group: Group, to: int) -> Tensor:
    """Send x to a rank that calls ``received``. What this returns is a zero whose ``backward`` waits for x's gradient
    from there: add it to what backward is called on, or call it on this. x stays as it is until then. Without gradients
    this returns when x is on its way and no longer needed."""
    with_gradient = torch.is_grad_enabled() and x.is_floating_point()
    if with_gradient and not x.requires_grad:  # the other side cannot know: it sends a gradient, and here it ends
        x = x.detach().requires_grad_()
    shape, kept = x.shape, []

    def there(x: Tensor) -> Tensor:
        work = group.send(x.contiguous(), to)
        if with_gradient:
            kept.append(work)
        else:
            work.wait()
        return x.new_zeros(())

    def back(zero: Tensor) -> Tensor:
        kept.pop().wait()
        gradient = zero.new_empty(shape)
        group.receive(gradient, to).wait()
        return gradient

    return _linear(x, there, back)


def received(like: Tensor, group: Group, source: int) -> Tensor:
    """Receive what a rank has ``sent``, of the shape and type of ``like`` (which may be a meta tensor's ``empty_like``,
    and is not read).

    Its gradient goes back there, also where nothing there needs it: it has to take part in what backward is called on.
    The ``backward`` that sends it ends when it is on its way, however large it is.
    """

    def there(start: Tensor) -> Tensor:
        x = torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)
        group.receive(x, source).wait()
        return x

    def back(gradient: Tensor) -> Tensor:
        work = group.send(gradient.contiguous(), source)
        if work is not DONE:  # the rank that takes it may first wait for something that this backward has yet to send
            Variable._execution_engine.queue_callback(work.wait)
        return gradient.new_empty(0)

    start = torch.empty(0, dtype=like.dtype, device=like.device, requires_grad=like.is_floating_point())
    return _linear(start, there, back)


class _Parts:
    """A dimension divided among the ranks."""

    def __init__(self, name: str, x: Tensor, group: Group, dim: int, sizes: Sequence[int], *, length: int) -> None:
        if len(sizes) != group.size:
            raise ValueError(f"{name}: sizes={list(sizes)} must have one length for each of {group.size} ranks")
        if x.shape[dim] != length:
            raise ValueError(
                f"{name}: x has length {x.shape[dim]} in dimension {dim} on rank {group.rank}, "
                f"and sizes={list(sizes)} say {length}"
            )
        self._group, self._dim, self._sizes = group, dim % x.dim(), list(sizes)

    def own(self, whole: Tensor) -> Tensor:
        """A copy of this rank's part."""
        rank = self._group.rank
        part = whole.narrow(self._dim, sum(self._sizes[:rank]), self._sizes[rank])
        return part.clone(memory_format=torch.contiguous_format)

    def gathered(self, own: Tensor) -> Tensor:
        """All ranks' parts of the dimension as one tensor."""
        shape = list(own.shape)
        shape[self._dim] = sum(self._sizes)
        whole = own.new_empty(shape)
        parts = whole.split_with_sizes(self._sizes, self._dim)
        if all(part.is_contiguous() for part in parts):
            self._group.gather_parts(own.contiguous(), parts)
            return whole
        received = [part.new_empty(part.shape) for part in parts]
        self._group.gather_parts(own.contiguous(), received)
        return torch.cat(received, self._dim)

    def own_sum(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum over the ranks."""
        group = self._group
        parts = whole.split_with_sizes(self._sizes, self._dim)
        most = max(part.numel() for part in parts)
        own = whole.new_empty(parts[group.rank].shape)
        if not most:
            return own
        if len(set(self._sizes)) == 1 and whole.is_contiguous() and parts[0].is_contiguous():
            group.reduce_scatter(whole.view(group.size, most), own.view(-1))
            return own
        rows, sums = whole.new_zeros((group.size, most)), whole.new_empty(most)
        for row, part in zip(rows, parts, strict=True):
            row[: part.numel()].view(part.shape).copy_(part)
        group.reduce_scatter(rows, sums)
        return own.copy_(sums[: own.numel()].view(own.shape))


def _reach(
    x: Tensor, group: Group, dim: int, before: Sequence[int], after: Sequence[int], sizes: Sequence[int] | None
) -> Reach:
    rows = x.shape[dim]
    if sizes is None:
        sizes = group.all_gather(torch.tensor([rows], device=x.device)).flatten().tolist()
    if sizes[group.rank] != rows:
        raise ValueError(f"halo: x has {rows} rows on rank {group.rank}, and sizes={list(sizes)} say otherwise")
    return Reach.of(tuple(sizes), tuple(before), tuple(after), group.rank, dim % x.dim())


# Halos


Span = tuple[int, int, int]
"""A stretch of rows as (rank, start, rows)."""


@dataclass(frozen=True)
class Reach:
    """The rows that this rank gets from others and gives to them."""

    dim: int
    rows: int
    """The number of this rank's own rows."""
    before: int
    after: int
    wanted: tuple[Span, ...]
    """The stretches that this rank gets: the rank that has them, where they begin in the own rows with their halo, and
    how many rows they are."""
    given: tuple[Span, ...]
    """The stretches that this rank gives: the rank that gets them, where they begin in the own rows, and how many rows
    they are."""

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(sizes: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...], rank: int, dim: int) -> Reach:
        ends = list(accumulate(sizes))
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        _check(sizes, before, after)
        wanted, given = [], []
        for other in range(len(sizes)):
            if other == rank:
                continue
            first, rows = _overlap(starts, ends, before, after, rank, other)
            if rows:
                wanted.append((other, first - (starts[rank] - before[rank]), rows))
            first, rows = _overlap(starts, ends, before, after, other, rank)
            if rows:
                given.append((other, first - starts[rank], rows))
        return Reach(dim, sizes[rank], before[rank], after[rank], tuple(wanted), tuple(given))


def _check(sizes: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...]) -> None:
    if not len(before) == len(after) == len(sizes):
        raise ValueError(f"halo: before={before} and after={after} must have one number for each of {len(sizes)} ranks")
    start, whole = 0, sum(sizes)
    for rank, size in enumerate(sizes):
        end = start + size
        if not (0 <= before[rank] <= start and 0 <= after[rank] <= whole - end):
            raise ValueError(
                f"halo: rank {rank} has rows {start}..{end - 1} of {whole} and wants before={before[rank]}, "
                f"after={after[rank]}: at most {start} lie before and {whole - end} after; pad at the border instead"
            )
        start = end


def _overlap(
    starts: list[int], ends: list[int], before: tuple[int, ...], after: tuple[int, ...], wants: int, holds: int
) -> tuple[int, int]:
    """The first of the rows that one rank wants of another, and how many."""
    low = starts[wants] - before[wants] if holds < wants else ends[wants]
    high = starts[wants] if holds < wants else ends[wants] + after[wants]
    first = max(low, starts[holds])
    return first, max(0, min(high, ends[holds]) - first)


def _send(x: Tensor, group: Group, dim: int, spans: tuple[Span, ...]) -> list[Work]:
    return [group.send(x.narrow(dim, start, rows).contiguous(), rank) for rank, start, rows in spans]


def _receive(like: Tensor, group: Group, dim: int, spans: tuple[Span, ...]) -> list[tuple[Tensor, Work]]:
    received = []
    for rank, _, rows in spans:
        shape = list(like.shape)
        shape[dim] = rows
        strip = like.new_empty(shape)
        received.append((strip, group.receive(strip, rank)))
    return received


def with_halo(x: Tensor, group: Group, reach: Reach) -> Tensor:
    """The tensor of the rows before, x, and the rows after."""
    dim = reach.dim
    # Sends first, on every rank: they do not wait, and a rank that received first would wait for one that does too.
    works = _send(x, group, dim, reach.given)
    strips = _receive(x, group, dim, reach.wanted)
    shape = list(x.shape)
    shape[dim] = reach.before + reach.rows + reach.after
    whole = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_format(x))
    whole.narrow(dim, reach.before, reach.rows).copy_(x)  # while they are on their way
    for (_, start, rows), (strip, work) in zip(reach.wanted, strips, strict=True):
        work.wait()
        whole.narrow(dim, start, rows).copy_(strip)
    for sending in works:
        sending.wait()
    return whole


def without_halo(gradient: Tensor, group: Group, reach: Reach) -> Tensor:
    """The adjoint of ``with_halo``: the own rows, each with the gradients that came back from the ranks that it had
    been sent to."""
    works = _send(gradient, group, reach.dim, reach.wanted)
    strips = _receive(gradient, group, reach.dim, reach.given)
    own = gradient.narrow(reach.dim, reach.before, reach.rows).clone(memory_format=_format(gradient))
    _add(own, strips, reach)
    for sending in works:
        sending.wait()
    return own


def _add(own: Tensor, strips: list[tuple[Tensor, Work]], reach: Reach) -> None:
    for (_, start, rows), (strip, work) in zip(reach.given, strips, strict=True):
        work.wait()
        # In the order of the spans, which is rank order, and not in the order of arrival: the sum has the same bits in
        # every run.
        own.narrow(reach.dim, start, rows).add_(strip)


def _format(x: Tensor) -> torch.memory_format:
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if is_last else torch.contiguous_format
