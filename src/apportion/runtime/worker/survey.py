"""A look at a workload before it is proved, in a process of its own, so that nothing of it is left in the run.

It finds out which rows are rare, and whether the loss by itself is the mean over its terms.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Dataset

from apportion.comm.channel import Channel
from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.loss_terms import description_of
from apportion.core.sampling.rng import seeded_rng
from apportion.core.workload import Workload
from apportion.parallel.batch_coupling.loss_probe import ROWS, LossFinding, probe_loss
from apportion.parallel.replica.initial_model import fresh_model
from apportion.parallel.replica.replica import called
from apportion.runtime.proof.proof_workload import chosen_rows, spread_with
from apportion.runtime.proof.rare_rows import RareRows, rare_rows
from apportion.runtime.worker.determinism import silence_recurrent_dropout, without_dropout
from apportion.runtime.worker.job import Job

FORWARD_ROWS = 6
"""The number of rows that the model is called with, to see what its outputs are like."""


def serve_survey(job: Job, world: World, channel: Channel) -> None:
    """Looks at the workload once: ``survey`` (which says how many ``seconds`` the targets may be read, and whether the
    ``loss`` is to be tried); the answer has the rows, how many were read, and what the loss has shown."""
    order = channel.commands.get()
    if order is not None and order["kind"] == "survey":
        workload = job.open()
        with seeded_rng(workload.seed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = _opened(workload)
            found = RareRows((), 0, 0) if data is None else rare_rows(data, order["seconds"])
        finding = _tried(workload, data, found) if order["loss"] else LossFinding()
        rows = {"rare": found.rows, "read": found.read, "of": found.of}
        loss = {"problem": finding.problem, "left": finding.left}
        channel.send({"kind": "surveyed", **rows, **loss, "terms": description_of(workload.count, workload.terms)})
        channel.commands.get()  # until the answer has been taken
    world.close()


def _opened(workload: Workload) -> Dataset[Any] | None:
    """Returns the data set; None where its rows cannot be chosen: it is in parts, or the network makes it."""
    if workload.parts is not None:
        return None
    data = workload.open_data()
    return None if isinstance(data, ActedDataset) else data


def _tried(workload: Workload, data: Dataset[Any] | None, found: RareRows) -> LossFinding:
    if workload.loss is None or workload.terms is None:
        return LossFinding()
    if data is None:
        return LossFinding(left="its data are in parts, or made by the network")
    try:
        with seeded_rng(workload.seed), without_dropout(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs, targets = _outputs_and_targets(workload, data, found)
            return probe_loss(workload.loss, workload.terms, outputs, targets, rows=workload.batch_size)
    except Exception as error:  # the run, or its proof, will tell why
        return LossFinding(left=f"its model or its data could not be called for it ({type(error).__name__})")


def _outputs_and_targets(workload: Workload, data: Dataset[Any], found: RareRows) -> tuple[Any, Any]:
    """Returns the outputs of the model for a few rows, and the targets of many, the rare ones among them."""
    index = spread_with(found.rows[: ROWS // 2], len(data), min(ROWS, len(data)))  # type: ignore[arg-type]
    some = replace(
        workload, data=lambda: chosen_rows(data, index), batch_size=len(index), order="sequential", evaluation=None
    )
    source = BatchSource(some, dtype=torch.float64)
    batch = source.at(0)
    model = fresh_model(some, torch.device("cpu"), torch.float64)
    silence_recurrent_dropout(model)
    few = _first_rows(batch, FORWARD_ROWS)
    with torch.no_grad():
        outputs = called(some, model, few, torch.device("cpu"))
    return tree.map_tensors(torch.Tensor.detach, outputs), batch.targets


def _first_rows(batch: Batch, rows: int) -> Batch:
    parts = batch.parts(max(1, len(batch) // rows))
    return parts[0]
