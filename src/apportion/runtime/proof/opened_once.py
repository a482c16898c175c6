"""A data set of a proof, which is opened several times in each of its processes: one of tensors is kept between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import Dataset, TensorDataset

from apportion.core.torch_private import version_of
from apportion.core.workload import Workload


def opened_once(workload: Workload) -> Workload:
    """Returns the workload with a data set of tensors opened once in this process, for as long as nothing writes to
    them. Any other data set may have state, and is opened anew each time; so are parts."""
    return workload if workload.parts is not None else replace(workload, data=_Opened(workload.data))


@dataclass
class _Opened:
    make: Callable[[], Dataset[Any]]
    _kept: TensorDataset | None = None
    _versions: list[int] = field(default_factory=list)

    def __call__(self) -> Dataset[Any]:
        kept = self._kept
        if kept is not None and [version_of(t) for t in kept.tensors] == self._versions:
            return kept
        found = self.make()
        if type(found) is TensorDataset:
            self._kept, self._versions = found, [version_of(t) for t in found.tensors]
        return found
