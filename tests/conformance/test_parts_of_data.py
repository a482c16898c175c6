"""A data set in parts trains the network that one process trains on all of it: in float64, on real ranks as if on hosts
of their own, of which none can open another's parts, and gone on with on other hosts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import torch
from ranks import by_value, on_ranks
from safetensors.torch import load_file
from slots import kills, on_slots
from slots import train as train_on_slots
from torch.utils.data import Dataset, Subset, TensorDataset

import apportion
from apportion import Workload
from apportion.api.proof_rows import gather_proof_rows
from apportion.comm.world import World
from apportion.core.data import sent_rows
from apportion.core.data.source import BatchSource
from apportion.core.parts import deal_parts, learn_lengths
from apportion.core.sampler import DataShard
from apportion.core.strategy import State, Strategy
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.map_reduce import MapReduce
from apportion.strategies.single_device import SingleDevice

pytestmark = pytest.mark.processes

PARTS = 3
STEPS = networks.STEPS
BOUND = 1e-10
STRATEGIES: dict[str, Strategy] = {"data_parallel": DataParallel(), "map_reduce": MapReduce(part=7)}


def part_of(make: Any, part: int) -> Dataset[Any]:
    """One of three uneven parts of a data set."""
    whole = make()
    n = len(whole)
    bounds = [0, n // 2, n // 2 + n // 5, n]
    rows = range(bounds[part], bounds[part + 1])
    if type(whole) is TensorDataset:
        return TensorDataset(*(t[rows.start : rows.stop] for t in whole.tensors))
    return Rows(whole, rows)


class Rows(Dataset[Any]):
    """Some rows of a data set, each asked for by itself: what it draws is then its own."""

    def __init__(self, data: Any, rows: range) -> None:
        self.data, self.rows = data, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.rows[index]]


def in_parts(workload: Workload) -> Workload:
    return replace(workload, data=partial(part_of, workload.data), parts=PARTS)


def guarded(workload: Workload, parts: tuple[int, int] | None) -> Workload:
    """The workload of a rank to which only these parts are there."""

    def data(part: int) -> Dataset[Any]:
        assert parts is not None, "a rank of no parts"
        if not parts[0] <= part < parts[1]:
            raise FileNotFoundError(f"part {part} is on another host")
        return workload.data(part)

    return replace(workload, data=data)


def on_hosts(hosts: Sequence[int]) -> World:
    """The world of a rank as if the ranks were on these hosts, one after the other."""
    world = World.from_env(device="cpu", insecure=True)
    here = [rank for rank in range(world.size) if hosts[rank] == hosts[world.rank]]
    return replace(world, local_rank=here.index(world.rank), local_size=len(here))


def train(
    world: World, strategy: Strategy, workload: Workload, hosts: Sequence[int] | None, states: list[State], steps: int
) -> State:
    """From the last of these states, so many steps. ``hosts``: None, all on this one, in shared memory."""
    own = world if hosts is None else on_hosts(hosts)
    share = deal_parts(PARTS, own.hosts())[own.rank] if own.size > 1 else DataShard(parts=(0, PARTS))
    step = strategy.build(guarded(workload, share.parts), own)
    if states:
        step.load_state_dict(states[-1])
    for _ in range(steps):
        batch = step.take()
        assert batch is not None
        step(batch)
    state = step.state_dict()
    assert step.source.dataset.opened == [*range(*share.parts)]  # type: ignore[attr-defined,misc]
    step.close()
    own.close()
    return state


def alone(workload: Workload, steps: int = STEPS) -> State:
    with by_value(networks):
        return on_ranks(train, 1, SingleDevice(), workload, None, [], steps)[0]


def difference(found: State, expected: State) -> float:
    """The largest, of all weights and optimizer slots."""
    left, right = dict(found.tensors()), dict(expected.tensors())
    assert left.keys() == right.keys()
    return max(float((left[name].double() - tensor.double()).abs().max()) for name, tensor in right.items())


LAYOUTS: dict[str, list[int] | None] = {
    "1 rank": [0],
    "2 hosts": [0, 1],
    "3 hosts": [0, 1, 2],
    "2 hosts of 2": [0, 0, 1, 1],
    "2 ranks of a host": None,
    "hosts in turn": [0, 1, 0, 1],
}
SAME = [
    ("mlp", "data_parallel", "1 rank"),
    ("mlp", "map_reduce", "1 rank"),
    ("mlp", "data_parallel", "3 hosts"),
    ("mlp", "map_reduce", "3 hosts"),
    ("batch_norm_2d", "data_parallel", "2 hosts"),
    ("counted_tokens_without_norm", "map_reduce", "2 hosts"),
    ("coupled_examples", "data_parallel", "2 hosts of 2"),
    ("augmented", "data_parallel", "2 ranks of a host"),
    ("mlp", "data_parallel", "hosts in turn"),
]
MORE = [
    *((name, "data_parallel", layout) for name in ("two_optimizers", "counted_tokens", "augmented", "own_collate",
      "draws_in_the_data", "class_weights", "frozen_and_unused_parameters", "sparse_embeddings")
      for layout in LAYOUTS),
    *((name, "map_reduce", layout) for name in ("augmented", "own_collate", "draws_in_the_data", "large_parameters")
      for layout in LAYOUTS),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "strategy", "layout"), [*SAME, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)]
)
def test_ranks_that_open_their_own_parts_train_the_network_of_one_process(
    name: str, strategy: str, layout: str
) -> None:
    workload, hosts = in_parts(networks.cases[name](16)), LAYOUTS[layout]
    with by_value(networks):
        ranks = 2 if hosts is None else len(hosts)
        states = on_ranks(train, ranks, STRATEGIES[strategy], workload, hosts, [], STEPS)
    expected = alone(workload)
    assert max(difference(state, expected) for state in states) <= BOUND


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_goes_on_in_the_middle_on_other_hosts_that_share_the_parts(strategy: str) -> None:
    workload, chosen = in_parts(networks.cases["mlp"](16)), STRATEGIES[strategy]
    with by_value(networks):
        first = on_ranks(train, 3, chosen, workload, [0, 1, 2], [], 3)[0]
        second = on_ranks(train, 2, chosen, workload, [0, 1], [first], 3)[1]
        last = on_ranks(train, 1, chosen, workload, [0], [second], 2)[0]
    assert last.step == STEPS
    assert difference(last, alone(workload)) <= BOUND


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for _, p in parameters], max_iter=5, line_search_fn="strong_wolfe")


def test_lbfgs_searches_over_the_parts_of_three_hosts_as_over_all_of_them_in_one_process() -> None:
    """Each host goes through its own part for every evaluation of the loss and its gradient over all rows."""
    workload = in_parts(networks.cases["mlp"](16))
    workload = replace(workload, batch_size=49, optimizer=lbfgs, steps=4)
    with by_value(networks):
        states = on_ranks(train, 3, MapReduce(part=7), workload, [0, 1, 2], [], 4)
    expected = alone(workload, 4)
    assert max(difference(state, expected) for state in states) <= BOUND


def test_the_network_is_that_of_the_same_rows_in_the_same_batches() -> None:
    """What one process trains on is no matter of parts: a workload without them, which is given the rows of each batch
    in that order, trains the same."""
    workload = replace(in_parts(networks.cases["mlp"](16)), steps=4)
    source = BatchSource(workload)
    index = np.concatenate([source.deal.index(step) for step in range(4)]).tolist()
    assert sorted(index) == list(range(len(index))), "an epoch"
    whole = source.dataset
    plain = replace(workload, parts=None, data=lambda: Subset(whole, index), order="sequential")
    found, expected = (next(reversed([*SingleDevice().reference(of, 1)])) for of in (workload, plain))
    assert difference(found, expected) == 0.0


def test_workers_that_die_leave_their_parts_to_those_that_replace_them() -> None:
    workload = replace(in_parts(networks.cases["mlp"](16)), steps=60)
    with by_value(networks):
        outcome = on_slots(train_on_slots, 3, DataParallel(), workload, killed=kills(2, 60, 3, seed=4))
    assert outcome.changes >= 1
    expected = alone(workload, 60)
    assert max(difference(state, expected) for state, _ in outcome.results) <= BOUND


def test_workers_that_die_and_are_not_replaced_leave_their_parts_to_the_others() -> None:
    workload = replace(in_parts(networks.cases["mlp"](16)), steps=60)
    with by_value(networks):
        outcome = on_slots(train_on_slots, 3, MapReduce(), workload, killed=kills(1, 60, 3, seed=5), replaced=False)
    left = [result for result in outcome.results if result is not None]
    assert {made[-1] for _, made in left} == {2}
    expected = alone(workload, 60)
    assert max(difference(state, expected) for state, _ in left) <= BOUND


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("data_parallel", 2),
        ("map_reduce", 3),
        ("tensor_parallel", 2),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("single_device", 1), ("data_parallel", 3), ("fully_sharded", 2), ("pipeline_parallel", 2),
                        ("local_sgd(every=2)", 2), ("parameter_server", 2))
        ),
    ],
)  # fmt: skip
def test_a_strategy_is_proved_on_parts(strategy: str, workers: int) -> None:
    """Those that need rows of all parts on every worker open all of them, on this one host."""
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(in_parts(networks.cases["mlp"](16)), strategy, workers=workers, steps=STEPS)
    assert proof.holds, proof


@pytest.mark.filterwarnings("ignore:.*they take turns")
def test_a_run_opens_the_parts_of_each_worker_there_alone(tmp_path: Path) -> None:
    """With data-loading processes, too, which open them for themselves."""
    workload = in_parts(networks.cases["own_collate"](16))
    make = workload.data

    def data(part: int) -> Dataset[Any]:
        with (tmp_path / f"rank-{os.environ['RANK']}").open("a") as file:
            file.write(f"{part} ")
        return make(part)

    launcher = apportion.local(workers=3, threads=1, device="cpu", loaders=1)
    with by_value(networks), by_value(sys.modules[__name__]):
        last = apportion.train(
            replace(workload, data=data), "data_parallel", launcher=launcher, run_dir=tmp_path / "run"
        )
    assert last.step == STEPS
    for rank in range(3):
        assert {*(tmp_path / f"rank-{rank}").read_text().split()} == {str(rank)}
    weights = load_file(tmp_path / "run" / "checkpoints" / "latest" / "model.safetensors")
    expected = alone(workload).model
    assert max(float((weights[name] - tensor).abs().max()) for name, tensor in expected.items()) <= BOUND


# Rows that are sent


def sent(world: World, workload: Workload, wanted: list[list[int]], limit: int) -> Any:
    own = on_hosts([0, 0, 1])
    shares = deal_parts(PARTS, own.hosts())
    dataset = guarded(workload, shares[own.rank].parts).parted_data()
    learn_lengths(dataset, shares[own.rank], own)
    sent_rows.MOST_BYTES, before = limit, sent_rows.MOST_BYTES
    try:
        found = sent_rows.send_rows(dataset, wanted, shares, own)
        few = sent_rows.broadcast_rows(dataset, 2, own)
    except sent_rows.RowsNotSentError as error:
        return str(error)
    finally:
        sent_rows.MOST_BYTES = before
        own.close()
    if found is None:
        return None, few
    return ([{at: found(part)[at] for at in rows} for part, rows in enumerate(wanted)], [*map(len, found.parts)]), few


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(left, right, strict=True))


def test_rows_of_all_parts_are_sent_to_rank_0_and_a_few_to_every_rank() -> None:
    workload, wanted = in_parts(networks.cases["mlp"](16)), [[0, 7, 23], [], [4]]
    with by_value(networks):
        told = on_ranks(sent, 3, workload, wanted, 1 << 20)
    parts = [workload.open_part(part) for part in range(PARTS)]
    assert [found is None for found, _ in told] == [False, True, True]
    found, lengths = told[0][0]
    assert lengths == [len(part) for part in parts]  # type: ignore[arg-type]
    for part, rows in enumerate(wanted):
        assert [*found[part]] == rows
        assert all(same(found[part][at], parts[part][at]) for at in rows)
    for _, few in told:
        assert same(few[0], parts[0][0])
        assert same(few[1], parts[0][len(parts[0]) // 2])  # type: ignore[arg-type]


def test_rows_that_cannot_be_sent_are_named_with_their_rank_on_all_ranks() -> None:
    workload = in_parts(networks.cases["mlp"](16))
    with by_value(networks):
        large = on_ranks(sent, 3, workload, [[0], [1], [*range(10)]], 1000)
        strange = on_ranks(sent, 3, replace(workload, data=lambda part: [{part, 1, 2}]), [[], [0], []], 1000)
    assert len({*large}) == len({*strange}) == 1
    assert re.search(r"rank 2 on host .*: 1,\d+ bytes of rows are more than the 1,000 that a rank sends", large[0])
    assert re.search(r"rank 1 on host .*: an example holds a builtins\.set", strange[0])


def gathered(world: World, cases: Sequence[tuple[Workload, bool]]) -> list[Any]:
    """What a rank has of the rows of each proof: how many, of parts of which lengths; why none; and whether hosts have
    parts of their own. Each workload comes with whether rank 0, whose word alone counts, knows the answer."""
    own = on_hosts([0, 0, 1])
    shares, told = deal_parts(PARTS, own.hosts()), []
    try:
        for workload, known in cases:
            dataset = guarded(workload, shares[own.rank].parts).parted_data()
            learn_lengths(dataset, shares[own.rank], own)
            found = gather_proof_rows(workload, dataset, own, known=known == (own.rank == 0))
            sent = None if found.sent is None else (found.sent.rows, [*map(len, found.sent.parts)])
            told.append((sent, found.refused, found.apart))
    finally:
        own.close()
    return told


def test_rank_0_is_sent_the_rows_of_a_proof_unless_it_knows_the_answer() -> None:
    workload = in_parts(networks.cases["mlp"](16))
    strange = replace(workload, data=lambda part: [{part, 1, 2}] * 9)
    with by_value(networks):
        told = on_ranks(gathered, 3, [(workload, False), (workload, True), (strange, False)])
    asked, known, unsent = zip(*told, strict=True)
    (rows, lengths), refused, apart = asked[0]
    assert lengths == [len(workload.open_part(part)) for part in range(PARTS)]  # type: ignore[arg-type]
    assert 0 < rows <= sum(lengths)
    assert (refused, apart) == (None, True)
    assert [*asked[1:], *known] == [(None, None, True)] * 5
    assert len({*unsent}) == 1
    assert "an example holds a builtins.set" in unsent[0][1]


# What goes wrong


def refused(world: World, hosts: Sequence[int], workload: Workload, missing: Sequence[int]) -> str:
    own = on_hosts(hosts)

    def data(part: int) -> Dataset[Any]:
        if part in missing:
            raise FileNotFoundError(f"no file of part {part}")
        return workload.data(part)

    try:
        DataParallel().build(replace(workload, data=data), own)
    except (apportion.errors.ApportionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        own.close()
    return ""


def test_a_part_that_cannot_be_opened_is_named_with_its_rank_and_host_on_all_ranks() -> None:
    workload = in_parts(networks.cases["mlp"](16))
    with by_value(networks):
        said = on_ranks(refused, 3, [0, 1, 2], workload, [1])
    assert len({*said}) == 1
    host = os.uname().nodename
    assert said[0].startswith(
        f"ApportionError: part 1 of 3 could not be opened on rank 1 on host {host}: FileNotFoundError: no file of part"
    )
    assert "data(1) is called on each rank that is dealt part 1" in said[0]


def unlike(world: World, workload: Workload) -> str:
    own = on_hosts([0, 0, 1])
    make = workload.data

    def data(part: int) -> Dataset[Any]:
        return Subset(make(part), range(5)) if own.rank == 1 else make(part)

    try:
        DataParallel().build(replace(workload, data=data, parts=2), own)
    except ValueError as error:
        return str(error)
    finally:
        own.close()
    return ""


def test_a_part_that_has_other_lengths_on_two_ranks_is_refused() -> None:
    with by_value(networks):
        said = on_ranks(unlike, 3, in_parts(networks.cases["mlp"](16)))
    assert len({*said}) == 1
    assert said[0].startswith("part 0 of 2 has 5 rows on rank 1 on host ")


def test_fewer_parts_than_hosts_are_refused_before_any_is_opened() -> None:
    workload = replace(in_parts(networks.cases["mlp"](16)), parts=2)
    with by_value(networks):
        said = on_ranks(refused, 3, [0, 1, 2], workload, [0, 1])
    assert {*said} == {said[0]}
    assert said[0].startswith("ValueError: parts=2 cannot be dealt to 3 hosts")


def test_a_loss_of_all_rows_is_refused_where_the_ranks_have_them_in_another_order() -> None:
    with by_value(networks):
        said = on_ranks(refused, 4, [0, 1, 0, 1], in_parts(networks.cases["coupled_examples"](16)), [])
    assert len({*said}) == 1
    assert said[0].startswith("ValueError: count=None gathers the outputs of all ranks in their order")
