"""Every rank's tensors, one rank's after the other's, on all of them.

Scheme (b) of Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: while the ranks work
on one share, the next one is under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from apportion.comm.group import Group, Work


def rotation(own: Sequence[Tensor], sizes: Sequence[int], group: Group) -> Iterator[tuple[int, list[Tensor]]]:
    """(rank, its tensors), for every rank that has rows. ``own``: this rank's, contiguous and left alone until the end;
    ``sizes``: every rank's rows, dimension 0; the other dimensions and the types are alike."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    sent = [group.send(t, to) for to in others for t in own if sizes[group.rank]]
    turns = [rank for rank in range(group.size) if sizes[rank]]
    arriving = _receive(own, sizes, group, turns[0])
    for rank, after in zip(turns, [*turns[1:], None], strict=True):
        tensors, works = arriving
        if after is not None:
            arriving = _receive(own, sizes, group, after)
        for work in works:
            work.wait()
        yield rank, tensors
    for work in sent:
        work.wait()


def _receive(own: Sequence[Tensor], sizes: Sequence[int], group: Group, rank: int) -> tuple[list[Tensor], list[Work]]:
    if rank == group.rank:
        return [t.detach() for t in own], []
    into = [t.new_empty((sizes[rank], *t.shape[1:])) for t in own]
    return into, [group.receive(t, rank) for t in into]
