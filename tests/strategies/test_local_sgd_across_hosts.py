"""local_sgd where no memory holds all replicas: one sum of the weights a round, also while the next one is computed."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from commands import finish, start
from ranks import by_value, on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.comm.network.hierarchical_group import HierarchicalGroup
from apportion.comm.network.network_group import NetworkGroup
from apportion.comm.network.rank_connection import RankConnection
from apportion.comm.network.rendezvous import meet
from apportion.comm.world import World
from apportion.core.strategy import State, batches
from apportion.errors import StateLost
from apportion.parallel.averaging.notes import Note, Notes, gather_notes
from apportion.parallel.averaging.rounds import dealt
from apportion.strategies.local_sgd import LocalSgd, LocalSgdStep

pytestmark = pytest.mark.processes

EXACT = 1e-10
OVERLAP = LocalSgd(every=3, overlap=True)


def on_hosts(world: World, hosts: list[int]) -> World:
    """The same ranks as if they were on these hosts; those of a host have memory in common."""
    flat = NetworkGroup(meet(world.rank, world.size, one_host=True, insecure=False), range(world.size))
    ranks = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    own = replace(world, channel=None, local_rank=ranks.index(world.rank), local_size=len(ranks), _groups={})
    flat.all_waits = own.all_waits
    own._groups["world"] = HierarchicalGroup.make(flat, hosts, spins=False)
    return own


def trained(
    world: World, hosts: list[int], strategy: LocalSgd, workload: Workload, first: State | None, stop: int | None = None
) -> list[State]:
    """Each average in turn, as a state. In a round there is none to be had: ranks do not take it at one point."""
    own = on_hosts(world, hosts)
    step = strategy.build(workload, own)
    assert step.lockstep
    if first is not None:
        step.load_state_dict(first)
    states, done = [], step.done
    for batch in batches(step, stop=stop):
        step(batch)
        if step.done != done:
            done = step.done
            states.append(step.state_dict())
    if step.done != done:  # this rank has had no batch in the last round
        states.append(step.state_dict())
    step.close()
    own.close()
    return states


def assert_same(found: State, expected: State, bound: float = EXACT) -> None:
    left, right = dict(found.tensors()), dict(expected.tensors())
    assert left.keys() == right.keys()
    assert found.step == expected.step
    for name, tensor in right.items():
        assert (left[name].double() - tensor.double()).abs().max() <= bound, name


STRATEGIES = [
    LocalSgd(every=3),
    LocalSgd(every=2, outer="nesterov", slots="averaged"),
    OVERLAP,
    LocalSgd(every=2, outer="nesterov", overlap=True),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(
    ("name", "hosts", "steps"),
    [("adam", [0, 1], 13), ("batch_norm_2d", [0, 0, 1], 28), ("one_cycle", [0, 1, 2], 23)],
)
def test_every_average_is_that_of_the_reference(name: str, hosts: list[int], steps: int, strategy: LocalSgd) -> None:
    """Also with 2 + 1 ranks, and where the last round has batches for some ranks alone, or more for some."""
    workload = replace(networks.cases[name](61), steps=steps, epochs=None)
    expected = {state.step: state for state in strategy.reference(workload, len(hosts)) if state.step}
    with by_value(networks):
        for states in on_ranks(trained, len(hosts), hosts, strategy, workload, None):
            assert [state.step for state in states] == list(expected)
            assert states[-1].step == steps
            for state in states:
                assert_same(state, expected[state.step])
