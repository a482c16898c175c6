"""Carry a trained net to other hardware."""

from __future__ import annotations

import os
from pathlib import Path

from apportion.core.data.acted import ActedDataset
from apportion.core.value import parse
from apportion.exporting.exporter import PACKAGE, export
from apportion.exporting.target import Exported, Target
from apportion.runtime.checkpoint.load import load, workload_of

__all__ = ["export", "export_run"]

EXAMPLES = 64
"""The number of examples of a run's data that its export is held against."""


def export_run(
    run: str | os.PathLike[str],
    *,
    target: str | Target = "onnx",
    path: str | os.PathLike[str] | None = None,
    trust: bool = False,
) -> Exported:
    """Exports the net of a run, or of one of its checkpoints, and holds it against itself on examples of its own data.
    ``path``: None writes it into the run's folder, as ``model`` with the target's ending. ``trust``: the file that the
    run names may run whosever it is (see ``load``)."""
    chosen: Target = parse(target, PACKAGE) if isinstance(target, str) else target
    workload = workload_of(run, trust=trust)
    data = workload.open_data() if workload.parts is None else workload.open_part(0)
    if isinstance(data, ActedDataset) and workload.evaluation is not None:  # a deployed net is not called on rollouts
        data = workload.evaluation.data()
    inputs, _ = workload.collate([data[n] for n in range(min(EXAMPLES, len(data)))])  # type: ignore[arg-type]
    to = Path(path) if path is not None else Path(run) / f"model{chosen.suffix}"
    return export(load(run, trust=trust), inputs, to, target=chosen)
