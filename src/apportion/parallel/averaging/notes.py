"""What replicas tell each other of their contributions before these are added up: a few numbers, in one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apportion.comm.group import Group, bytes_of, collective


@dataclass(frozen=True)
class Notes:
    """The notes of all ranks, in rank order."""

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
class Note:
    """What one rank tells of its contribution."""

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

    def moved(self) -> list[float]:
        """Return the flags of the tensors of several whole numbers: 1 where something has moved one."""
        return [float(not torch.equal(t, b)) for t, b in zip(self.whole, self.before, strict=True) if t.numel() != 1]


@collective
def gather_notes(note: Note, group: Group, device: torch.device) -> Notes:
    """Gather the notes of all ranks. Called by all of them."""
    few, moved = [t for t in note.whole if t.numel() == 1], note.moved()
    parts = [
        torch.tensor([note.examples, *moved], dtype=torch.float64),
        note.has.double(),
        *(t.reshape(1).double() for t in note.singles),
        *(t.reshape(1).to(torch.int64).view(torch.float64) for t in few),  # their bits: a double may not hold them
    ]
    rows = group.all_gather(torch.cat([part.cpu() for part in parts]).to(device)).cpu()
    told, flags, has, singles, bits = rows.split([1, len(moved), len(note.has), len(note.singles), len(few)], dim=1)
    found = iter(bits.contiguous().view(torch.int64).amax(0) if few else ())
    changed = iter(flags.any(0).tolist())
    largest = []
    for tensor, before in zip(note.whole, note.before, strict=True):
        if tensor.numel() == 1:
            largest.append(next(found).to(tensor.dtype).view(tensor.shape))
        elif next(changed):
            gathered = group.all_gather(bytes_of(tensor.to(device).contiguous())).cpu().view(tensor.dtype)
            largest.append(gathered.view(group.size, *tensor.shape).amax(0))
        else:
            largest.append(before)
    return Notes(told.flatten().tolist(), has.to(torch.uint8), singles, largest)
