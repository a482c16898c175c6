"""The average of replicas by collectives, where no memory holds all of them: on several hosts, and under torchrun.

::

    rank 0   header \\         own change x its share of the examples \\
                    everyone's                                        one sum -> average
    rank 1   header /         own change x its share of the examples /

A rank sends in a round what it sends for the gradient of one step of data_parallel: each weighs its change before the
sum, so that the sum is the mean. What the weights follow from goes round first, in a few bytes: the
examples of each rank, and numbers that are not to be summed, such as counters.

The slots of the optimizers are in the sum where replicas go on with their mean. Where each keeps its own, they are
averaged when somebody asks for the state, and no round sends them.

Late (``late=True``): the sum of a round goes on beside the steps of the next one, and is taken at the end of that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from apportion.comm.group import Group, Work, bytes_of, collective
from apportion.comm.world import World
from apportion.parallel.averaging.contribution import Contribution, ReplicaTensors, copy_parts, step_outer
from apportion.parallel.averaging.rounds import AveragingRound, Exchange, Write, assigned_round


@final
class SumBuffers:
    """Buffers in which tensors of floating or complex numbers lie one after the other, one buffer for each type: what a
    collective costs, a sum of all of them costs once.

    ``like``: tensors of their shapes and types.
    """

    def __init__(self, like: Iterable[Tensor], device: torch.device) -> None:
        ends: Counter[torch.dtype] = Counter()
        places = []
        for tensor in like:
            places.append((tensor.dtype, ends[tensor.dtype], tensor.shape))
            ends[tensor.dtype] += tensor.numel()
        self._flat = {dtype: torch.zeros(end, dtype=dtype, device=device) for dtype, end in ends.items()}
        self.views = [self._flat[dtype][at : at + math.prod(shape)].view(shape) for dtype, at, shape in places]
        """The tensors, in the order in which they were given."""

    @collective
    def all_reduce(self, group: Group) -> list[Work]:
        """Begin to sum in place over the ranks; the tensors are the group's until every one of these has ended. Called
        by all ranks."""
        flat = [t for t in self._flat.values() if t.numel()]
        return [group.all_reduce(torch.view_as_real(t).view(-1) if t.is_complex() else t) for t in flat]


@dataclass(frozen=True)
class ContributionHeaders:
    """The headers of the contributions of all ranks, in rank order."""

    examples: list[float]
    """The number of examples that each contribution is from."""
    has: Tensor
    """The flags of the slots, (ranks, slots): 1 where a rank has one."""
    singles: Tensor
    """The slots of one number, (ranks, such slots), in float64."""
    largest: list[Tensor]
    """The element-wise maxima of the tensors of whole numbers."""

    @property
    def total(self) -> float:
        """The number of examples of all contributions."""
        return sum(self.examples)

    def weights(self, slot: int | None = None) -> list[float]:
        """Return the weights of the ranks in the mean of what has changed, or in the mean of a slot: 0 where a rank has
        none, and equal ones where those that have one have no examples."""
        if slot is None:
            return self.examples
        has = self.has[:, slot].tolist()
        seen = [n if there else 0.0 for n, there in zip(self.examples, has, strict=True)]
        return seen if any(seen) else [float(there) for there in has]

    def share(self, rank: int, slot: int | None = None) -> float:
        """Return the part of a rank in such a mean."""
        weights = self.weights(slot)
        return weights[rank] / sum(weights) if weights[rank] else 0.0

    def mean_single(self, number: int, slot: int) -> float:
        """Return the mean of a slot of one number; the mean of equal whole numbers is that number."""
        weights = torch.tensor(self.weights(slot), dtype=torch.float64)
        return float((self.singles[:, number] * weights).sum() / weights.sum())


@dataclass(frozen=True)
class ContributionHeader:
    """What the other ranks must know of a contribution before the sum: its weight, and what is not summed."""

    examples: float
    has: Tensor
    """The flags of its slots."""
    singles: Sequence[Tensor]
    """The slots of one number."""
    whole: Sequence[Tensor]
    """The tensors of whole numbers."""
    before: Sequence[Tensor]
    """What those of several numbers are on every rank if nothing has moved them: what is equal to it everywhere is not
    sent."""

    def changed_flags(self) -> list[float]:
        """Return the flags of the tensors of several whole numbers: 1 where something has moved one."""
        return [float(not torch.equal(t, b)) for t, b in zip(self.whole, self.before, strict=True) if t.numel() != 1]


@collective
def gather_headers(header: ContributionHeader, group: Group, device: torch.device) -> ContributionHeaders:
    """Gather the headers of all ranks. Called by all of them."""
    few, moved = [t for t in header.whole if t.numel() == 1], header.changed_flags()
    parts = [
        torch.tensor([header.examples, *moved], dtype=torch.float64),
        header.has.double(),
        *(t.reshape(1).double() for t in header.singles),
        *(t.reshape(1).to(torch.int64).view(torch.float64) for t in few),  # their bits: a double may not hold them
    ]
    rows = group.all_gather(torch.cat([part.cpu() for part in parts]).to(device)).cpu()
    digests, flags, has, singles, bits = rows.split(
        [1, len(moved), len(header.has), len(header.singles), len(few)], dim=1
    )
    found = iter(bits.contiguous().view(torch.int64).amax(0) if few else ())
    changed = iter(flags.any(0).tolist())
    largest = []
    for tensor, before in zip(header.whole, header.before, strict=True):
        if tensor.numel() == 1:
            largest.append(next(found).to(tensor.dtype).view(tensor.shape))
        elif next(changed):
            gathered = group.all_gather(bytes_of(tensor.to(device).contiguous())).cpu().view(tensor.dtype)
            largest.append(gathered.view(group.size, *tensor.shape).amax(0))
        else:
            largest.append(before)
    return ContributionHeaders(digests.flatten().tolist(), has.to(torch.uint8), singles, largest)


@dataclass(frozen=True)
class _SumUnderWay:
    """A round whose contributions are being added up."""

    headers: ContributionHeaders
    works: list[Work]
    handed_out: int
    """The number of batches handed out up to its end."""


@final
class CollectiveAverage(Exchange):
    """An exchange by collectives, which waits for every rank. ``averages_slots``: replicas go on with the mean of their
    slots. ``late``: an average is taken a round later than its contributions were made."""

    def __init__(
        self,
        frame: ReplicaTensors,
        world: World,
        *,
        every: int,
        total: int,
        averages_slots: bool = False,
        late: bool = False,
    ) -> None:
        self._frame, self._group, self._device = frame, world.group(), world.device
        self._every, self._total = every, total
        self._averages_slots, self._late = averages_slots, late
        self._lane: Group | None = None
        if late and self._group.size > 1 and self._group.beside:
            self._lane = self._group.lane()
        slots, (weights, counts) = list(frame.slots.values()), frame.weights_and_counts()
        self._kinds = _SlotKinds.from_slots(slots)
        in_sum = self._kinds.summed if averages_slots else []
        self._buffers = SumBuffers([*weights, *(slots[i] for i in in_sum)], self._device)
        views, own = self._buffers.views, [torch.zeros(t.shape, dtype=t.dtype) for t in slots]
        for i, view in zip(in_sum, views[len(weights) :], strict=True):
            own[i] = view
        self._latest = frame.new()
        self._own = Contribution(
            weights=views[: len(weights)],
            counts=[torch.zeros(t.shape, dtype=t.dtype) for t in counts],
            slots=own,
            has=torch.zeros_like(self._latest.has),
            momentum=[],
        )
        self._done = self._handed_out = 0
        self._examples = [1.0] * self._group.size
        """The examples that each rank's part of the last average is from."""
        self._under_way: _SumUnderWay | None = None

    def start(self, first: Contribution, done: int, unpushed: Sequence[int] = ()) -> None:
        self._finish_sum()
        copy_parts(first, self._latest)
        self._done = self._handed_out = done
        self._examples = [1.0] * self._group.size

    def next_round(self, into: Contribution) -> AveragingRound:
        copy_parts(self._latest, into)
        found = assigned_round(self._handed_out, self._group.rank, self._group.size, self._every, self._total)
        return replace(found, done=self._done, ahead=self._handed_out - self._done)

    def contribute(self, write: Write) -> None:
        self._finish_sum()
        self._handed_out = min(self._total, self._handed_out + self._every * self._group.size)
        self._under_way = self._begin_sum(write(self._own))
        if not self._late or self._handed_out == self._total:
            self._finish_sum()

    def _begin_sum(self, examples: float) -> _SumUnderWay:
        kinds, own, rank, parameters = self._kinds, self._own, self._group.rank, len(self._frame.parameters)
        if self._late:  # a replica has its own buffers all along: their change counts from what all ranks know
            for value, average in zip(own.weights[parameters:], self._latest.weights[parameters:], strict=True):
                value.sub_(average.to(value.device))
        in_header = self._averages_slots
        header = ContributionHeader(
            examples,
            has=own.has,
            singles=[own.slots[i] for i in kinds.singles] if in_header else [],
            whole=[*own.counts, *(own.slots[i] for i in kinds.whole if in_header)],
            before=[*self._latest.counts, *(self._latest.slots[i] for i in kinds.whole if in_header)],
        )
        headers = gather_headers(header, self._group, self._device)
        if not headers.total:
            return _SumUnderWay(headers, [], self._handed_out)
        for change in own.weights:
            _weigh(change, headers.share(rank))
        for i in kinds.summed if in_header else ():
            _weigh(own.slots[i], headers.share(rank, i))
        # A late sum is under way during the next round, whose collectives go through the group itself.
        group = self._group if self._lane is None else self._lane
        return _SumUnderWay(headers, self._buffers.all_reduce(group), self._handed_out)

    def _finish_sum(self) -> None:
        """Wait for the sum that is under way, if there is one, and make the average of it."""
        if self._under_way is None:
            return
        made, self._under_way = self._under_way, None
        for work in made.works:
            work.wait()
        self._done = made.handed_out
        if not made.headers.total:
            return
        latest, own = self._latest, self._own
        changes = [change.cpu() for change in own.weights]
        step_outer(self._frame, changes, latest.momentum, latest.momentum)
        for average, change in zip(latest.weights, changes, strict=True):
            average.add_(change)
        for most, largest in zip(latest.counts, made.headers.largest, strict=False):  # the slots' come last
            torch.maximum(most, largest, out=most)
        self._examples = made.headers.examples
        if self._averages_slots:
            self._kinds.put_means(made.headers, own.slots, latest, made.headers.largest[len(latest.counts) :])
        else:
            for mine, kept in zip((latest.has, *latest.slots), (own.has, *own.slots), strict=True):
                mine.copy_(kept)

    def mean_slots(self, average: Contribution) -> dict[str, Tensor]:
        if self._averages_slots or self._group.size == 1:
            return self._frame.named_slots(average)
        kinds, rank = self._kinds, self._group.rank
        whole = [average.slots[i] for i in kinds.whole]
        header = ContributionHeader(
            self._examples[rank],
            has=average.has,
            singles=[average.slots[i] for i in kinds.singles],
            whole=whole,
            before=[torch.empty(0) for _ in whole],  # no rank knows what the others have
        )
        headers = gather_headers(header, self._group, self._device)
        buffers = SumBuffers([average.slots[i] for i in kinds.summed], self._device)
        sums = dict(zip(kinds.summed, buffers.views, strict=True))
        for i, view in sums.items():
            _weigh(view.copy_(average.slots[i]), headers.share(rank, i))
        for work in buffers.all_reduce(self._group):
            work.wait()
        mean = replace(average, slots=[torch.zeros_like(t) for t in average.slots], has=average.has.clone())
        kinds.put_means(headers, sums, mean, headers.largest)
        return self._frame.named_slots(mean)

    @property
    def waited(self) -> float:
        return self._group.waited

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()
            self._lane = None


@dataclass(frozen=True)
class _SlotKinds:
    """The numbers of the slots by the way in which they are averaged."""

    summed: list[int]
    singles: list[int]
    """Those of one number, as Adam's count of steps: their mean is made where it is not rounded."""
    whole: list[int]
    """Those of whole numbers, of which the largest is taken."""

    @classmethod
    def from_slots(cls, slots: Sequence[Tensor]) -> _SlotKinds:
        kinds = cls([], [], [])
        for i, slot in enumerate(slots):
            summed = slot.is_complex() or (slot.is_floating_point() and slot.numel() != 1)
            (kinds.summed if summed else kinds.singles if slot.is_floating_point() else kinds.whole).append(i)
        return kinds

    def put_means(
        self,
        headers: ContributionHeaders,
        sums: Mapping[int, Tensor] | Sequence[Tensor],
        into: Contribution,
        whole: Sequence[Tensor],
    ) -> None:
        """Write the means into the slots that some rank has; the others stay as they are. ``sums``: the weighed sums,
        by the slots' numbers; ``whole``: the largest of the whole numbers."""
        for i in range(len(into.slots)):
            if not headers.has[:, i].any():
                continue
            into.has[i] = 1
            if i in self.singles:
                into.slots[i].fill_(headers.mean_single(self.singles.index(i), i))
            else:
                into.slots[i].copy_(whole[self.whole.index(i)] if i in self.whole else sums[i])


def _weigh(tensor: Tensor, share: float) -> None:
    """Multiply in place. What does not count may hold anything, as NaN."""
    tensor.mul_(share) if share else tensor.zero_()
