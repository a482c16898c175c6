"""Every rank's part of a state in memory: what was written is read, as the state changes its numbers and its layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ranks import on_ranks

from apportion.comm.world import World
from apportion.core.strategy import State
from apportion.parallel.partition.committed_shards import CommittedShards, Version, whole

pytestmark = pytest.mark.processes


def state(step: int, rank: int, *, grown: bool = False) -> State:
    model = {"weight": torch.full((3, 2 + rank), step + 0.5), "none": torch.empty(0, 4), "count": torch.tensor(step)}
    slots = {"weight/exp_avg": torch.full((3, 2 + rank), -step, dtype=torch.bfloat16)}
    slots |= {"weight/history": torch.arange(100.0 * step)} if grown else {}
    return State(step=step, model=model, optimizer=slots, settings={"lr": 1 / (step + 1), "notes": "." * 2**step})


def equal(a: State, b: State) -> bool:
    tensors = [(k, t.dtype, t.tolist()) for k, t in a.tensors()] == [(k, t.dtype, t.tolist()) for k, t in b.tensors()]
    return tensors and (a.step, a.settings) == (b.step, b.settings)


def written(world: World) -> list[str]:
    """What is wrong of the last two states, as every rank reads them after each update."""
    committed, pieces, wrong = CommittedShards(world), {"weight": [world.rank, 2]}, []
    for step in range(16):
        if step == 9:
            pieces = {"weight": [world.rank, 3]}
        grown = step in (6, 7, 8)
        committed.write(state(step, world.rank, grown=grown), pieces)
        world.group().barrier()
        there = committed.versions()
        assert sorted({v.step for v in there}) == [max(step - 1, 0), step][step == 0 :]
        assert whole(there) is not None
        for rank, (found, beside) in enumerate(committed.latest()):
            same = equal(found, state(step, rank, grown=grown)) and beside == {"weight": [rank, 2 if step < 9 else 3]}
            wrong += [] if same else [f"step {step} of rank {rank}"]
    return wrong


def test_what_every_rank_has_written_is_read_whatever_has_changed() -> None:
    """Numbers, settings that grow out of their room, tensors that grow, and what is beside them."""
    assert on_ranks(written, 2) == [[], []]


def version(rank: int, step: int, *, replica: int = 0, size: int = 2, generation: int = 0) -> Version:
    """A version that lies somewhere."""
    return Version(rank, rank, step % 2, step, generation, replica, rank, size, 64)


def test_one_replica_is_enough_where_a_host_has_taken_the_other_along() -> None:
    kept = [version(rank, 7, replica=1) for rank in range(2)]
    assert whole([version(0, 8), *kept, version(0, 7)]) == kept


def layouts(world: World) -> list[Any]:
    """Is what lies where worked out again?"""
    committed, pieces, seen = CommittedShards(world), {"weight": [0]}, []
    for number, own in enumerate((pieces, pieces, pieces, dict(pieces), dict(pieces))):
        committed.write(state(1, 0, grown=number == 2), own)
        seen.append(committed._packed)
    return [a is b for a, b in itertools.pairwise(seen)]


def test_what_lies_where_is_worked_out_where_it_changes() -> None:
    assert on_ranks(layouts, 1) == [[True, False, False, False]]
