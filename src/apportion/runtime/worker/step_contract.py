"""What a proof asks of a step besides its states: to go on from a state that is loaded, and to predict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors.torch import save_file

from apportion.comm.group import collective
from apportion.core import tree
from apportion.core.data.batch import Batch, rows_of
from apportion.core.rng import seeded_rng
from apportion.core.sampler import DataShard
from apportion.core.strategy import State, Step
from apportion.core.workload import Workload
from apportion.parallel.replica.step import OneDeviceStep, ReferenceState


@collective
def made_again(step: Step, before: State) -> State:
    """Loads the state before the last step and makes that step once more; returns the state after it. Called by all
    ranks."""
    step.load_state_dict(before)
    batch = step.take()
    assert batch is not None, "a step that was made can be made again"
    step(batch)
    return step.state_dict()


def unrepeatable(state: State | None, before: State | None, again: Iterator[State]) -> dict[str, Any]:
    """Tells whether one device comes to another state when it makes the same step again: names the tensor, and how far
    it is off. ``again``: the reference from the beginning, where it gives states and no step that makes them."""
    assert state is not None
    if isinstance(state, ReferenceState) and before is not None:
        repeated = made_again(state.maker, before)
    else:
        repeated = next(found for found in again if found.step >= state.step)
    expected = dict(state.tensors())
    worst, name = 0.0, None
    for place, tensor in repeated.tensors():
        other = expected.get(place)
        if other is None or other.shape != tensor.shape:
            return {"unlike": place, "by": float("inf")}
        if not torch.equal(tensor, other):
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            by = float((tensor.to(wide) - other.to(wide)).abs().nan_to_num(0.0, 0.0, 0.0).max())
            if by > worst:
                worst, name = by, place
    return {"unlike": name, "by": worst}


@collective
def predicted(step: Step, rank: int, ranks: int, path: str) -> dict[str, Any]:
    """Writes what the step predicts for this rank's rows of the first batch, as an evaluation divides them, into the
    file; returns which rows these are, how many tensors the outputs have (None: it has none for them), and whether one
    rank has the outputs of whole batches. Of data in parts a rank has the rows of its own parts. Called by all
    ranks."""
    if step.data_shard is None:
        return {"why": "some ranks are servers"}
    in_parts = step.data_shard.parts is not None
    shard = step.data_shard if in_parts else DataShard() if step.whole else DataShard(rank, ranks)
    batch = step.source.at(0, shard)
    rows = [batch.rows.start, batch.rows.stop]
    return {"rows": rows, "whole": step.whole, "tensors": _write_predicted(step, batch, path)}


def _write_predicted(step: Step, batch: Batch, path: str) -> int | None:
    """Writes the outputs for a batch into the file; returns how many tensors these have, None where there are none."""
    outputs = step.predict(batch)
    step.looked()
    if outputs is None:
        return None
    tensors = [t.detach().cpu().resolve_conj() for t in tree.tensors(outputs) if t.layout is torch.strided]
    wide = [torch.view_as_real(t.to(torch.complex128)) if t.is_complex() else t.double() for t in tensors]
    save_file({str(number): t.contiguous().clone() for number, t in enumerate(wide)}, path)
    return len(wide)


def predicted_by(step: Step, of_ranks: Sequence[Sequence[int]] | None, path: str) -> dict[str, Any]:
    """Writes what one device predicts for the first batch. Answers with ``why`` where it does not, as where a network
    is called by an update alone. ``of_ranks``: the rows of each rank, of which it then writes what it predicts for them
    alone, into a file of the rank, where collate places them otherwise than within the whole batch, as where it sorts
    or pads; returns these ranks as ``alone``. None: it predicts for the whole batch, and tells whether collate may do
    so as ``moves``."""
    try:
        if of_ranks is None:
            return {**predicted(step, 0, 1, path), "moves": not step.source.keeps_rows}
        return {"alone": [rank for rank, rows in enumerate(of_ranks) if _writes_alone(step, rank, rows, path)]}
    except Exception as error:
        return _not_by_one_device(error)


def _writes_alone(step: Step, rank: int, rows: Sequence[int], path: str) -> bool:
    """Writes what one device predicts for a rank's rows alone into the file of the rank, where these have another place
    in the whole batch; returns whether that is so."""
    whole = step.source.at(0)
    if list(rows) in ([whole.rows.start, whole.rows.stop], [rows[0], rows[0]]):
        return False
    step.source.set_rank(rank)  # which draws for itself
    try:
        alone = step.source.rows(0, slice(*rows))
        return not _placed_alike(whole, alone) and bool(_write_predicted(step, alone, f"{path}{rank}"))
    finally:
        step.source.set_rank(0)


def _placed_alike(whole: Batch, alone: Batch) -> bool:
    """Tells whether collate makes the same of rows alone and in the whole batch, at their place in it."""
    try:
        within = rows_of((whole.inputs, whole.targets), alone.rows, len(whole))
    except ValueError:  # of which nothing is by row
        return False
    ones, others = tree.tensors(within), tree.tensors((alone.inputs, alone.targets))
    return len(ones) == len(others) and all(
        one.layout is other.layout is torch.strided
        and one.shape == other.shape
        and bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())
        for one, other in zip(ones, others, strict=True)
    )


def predicted_at(
    state: State, workload: Workload, of_ranks: Sequence[Sequence[int]] | None, path: str
) -> dict[str, Any]:
    """Does what ``predicted_by`` does, at a state that ranks have come to, which is what an approximate strategy has to
    predict too."""
    with seeded_rng(workload.seed):
        try:
            step = OneDeviceStep(workload, torch.device("cpu"))
            step.load_state_dict(state)
        except Exception as error:  # a state that one device has no place for
            return _not_by_one_device(error)
        return predicted_by(step, of_ranks, path)


def _not_by_one_device(error: Exception) -> dict[str, Any]:
    return {"why": f"one device does not: {type(error).__name__}: {str(error).partition(chr(10))[0]}"}
