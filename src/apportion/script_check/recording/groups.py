"""The process groups of this rank, under names that are the same on all ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from apportion.core import torch_private

WORLD = "world"


class Groups:
    """Labels of process groups: "world", or the ranks of a group and, of several with the same ranks, its number in the
    order in which they were made."""

    def __init__(self, ranks: int) -> None:
        self._world = tuple(range(ranks))
        self._labels = dict[int, tuple[Any, str]]()
        self._made = dict[tuple[int, ...], int]()

    def label(self, group: Any) -> tuple[str, tuple[int, ...]] | None:
        """Returns a group's label and its global ranks; None for one that this rank does not belong to.

        ``group``: what torch's functions accept: None, a ProcessGroup, and for functional collectives also a device
        mesh, a mesh with one of its dimensions, a list of ranks, or the name of a group.
        """
        if group is None:
            return WORLD, self._world
        if isinstance(group, list):
            ranks = tuple(group) if all(isinstance(each, int) for each in group) else ()
            return (_written(ranks), ranks) if ranks else None
        group = self._process_group(group)
        if not isinstance(group, dist.ProcessGroup):
            return None
        if dist.is_initialized() and group is dist.group.WORLD:
            return WORLD, self._world
        try:
            ranks = tuple(dist.get_process_group_ranks(group))
        except (KeyError, RuntimeError, ValueError):  # a group that has been taken down, or is not torch's own
            return None
        return self.label_new(group, ranks), ranks

    def label_new(self, group: Any, ranks: tuple[int, ...]) -> str:
        """Returns the label of a group, which it gets when it is met first."""
        known = self._labels.get(id(group))
        if known is None or known[0] is not group:
            number = self._made[ranks] = self._made.get(ranks, 0) + 1
            label = _written(ranks) if number == 1 else f"{_written(ranks)} (number {number})"
            known = self._labels[id(group)] = group, label
        return known[1]

    def _process_group(self, group: Any) -> Any:
        if isinstance(group, DeviceMesh):
            return group.get_group() if group.ndim == 1 else None
        if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
            return group[0].get_group(group[1])
        if isinstance(group, str):
            return torch_private.process_group_named(group)
        return group


def _written(ranks: tuple[int, ...]) -> str:
    return "ranks " + ", ".join(map(str, ranks))
