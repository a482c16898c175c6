"""local_sgd with a deadline: averages of the replicas that are there, and a log by which the run can be made again."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from ranks import by_value, on_ranks

import apportion
from apportion import Workload
from apportion.comm.world import World
from apportion.core.strategy import State, batches
from apportion.parallel.averaging.reference import check_log
from apportion.parallel.averaging.round_log import LoggedPart, LoggedRound, RoundLog
from apportion.strategies.local_sgd import LocalSgd

pytestmark = pytest.mark.processes

EXACT = 1e-10
QUIET = "20 s"
"""A deadline that nobody misses."""
SOON = 10.0
"""The seconds within which all have come to a round of such small networks, long before its deadline."""


def trained(
    world: World, strategy: LocalSgd, workload: Workload, first: State | None, slow: dict[int, list[float]]
) -> tuple[list[State], RoundLog | None]:
    """Each average in turn as rank 0 takes it. ``slow``: how long a rank sleeps before each of its steps."""
    own = World.from_env(device="cpu", meets=False)
    if own.unmet is None:  # there is one rank alone
        own = own._by_itself()
    step = strategy.build(workload, own)
    if first is not None and own.rank == 0:
        step.load_state_dict(first)
    states, done, pauses = [], step.done, list(slow.get(own.rank, ()))
    for batch in batches(step):
        if pauses:
            time.sleep(pauses.pop(0))
        step(batch)
        if own.rank == 0 and step.done != done:
            done = step.done
            states.append(step.state_dict())
    if own.rank == 0 and step.done != done:
        states.append(step.state_dict())
    log = step.log()
    step.close()
    own.close()
    return states, log[0] if log else None


def on(
    ranks: int,
    strategy: LocalSgd,
    workload: Workload,
    first: State | None = None,
    **slow: Any,
) -> tuple[list[State], RoundLog]:
    pauses = {int(rank.removeprefix("rank")): of for rank, of in slow.items()}
    with by_value(networks):
        states, log = on_ranks(trained, ranks, strategy, workload, first, pauses)[0]
    assert log is not None
    return states, log


def assert_same(found: State, expected: State, bound: float = EXACT) -> None:
    left, right = dict(found.tensors()), dict(expected.tensors())
    assert left.keys() == right.keys()
    assert found.step == expected.step
    for name, tensor in right.items():
        rounded = 1e-4 if tensor.dtype == torch.float32 else bound  # Adam's counts of steps, and their mean
        assert (left[name].double() - tensor.double()).abs().max() <= rounded, name


def made_again(strategy: LocalSgd, workload: Workload, log: RoundLog) -> State:
    return next(strategy.reference(workload, 1, (log,)))


STRATEGIES = [
    LocalSgd(every=3, deadline=QUIET, slots="averaged"),
    LocalSgd(every=2, deadline=QUIET, slots="averaged", outer="nesterov"),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(("ranks", "name", "steps"), [(1, "mlp", 8), (2, "adam", 13), (3, "one_cycle", 23)])
def test_where_all_are_in_time_every_average_is_that_of_the_reference(
    ranks: int, name: str, steps: int, strategy: LocalSgd
) -> None:
    workload = replace(networks.cases[name](61), steps=steps, epochs=None)
    expected = {state.step: state for state in replace(strategy, deadline=None).reference(workload, ranks)}
    states, log = on(ranks, strategy, workload)
    assert [state.step for state in states] == [step for step in expected if step]
    for state in states:
        assert_same(state, expected[state.step])
    assert_same(states[-1], made_again(strategy, workload, log))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "name"),
    [(1, "adam"), (2, "batch_norm_2d"), (3, "adam"), (2, "tied_weights"), (2, "buffers"),
     (2, "frozen_and_unused_parameters"), (3, "one_cycle"), (2, "draws_in_the_data")],
)  # fmt: skip
def test_with_slots_that_are_kept_the_log_leads_to_the_same_network(ranks: int, name: str) -> None:
    """Those that are saved are rank 0's, since no others travel."""
    strategy = LocalSgd(every=3, deadline=QUIET, outer="nesterov")
    workload = replace(networks.cases[name](61), steps=14, epochs=None)
    *_, expected = replace(strategy, deadline=None).reference(workload, ranks)
    states, log = on(ranks, strategy, workload)
    assert_same(states[-1], made_again(strategy, workload, log))
    assert max(logged.seconds for logged in log.rounds) < SOON, "a round is over when all have come"
    for key, tensor in expected.model.items():
        assert (states[-1].model[key].double() - tensor.double()).abs().max() <= EXACT, key


@pytest.mark.parametrize("slots", ["kept", "averaged"])
@pytest.mark.thorough
def test_a_round_closes_without_who_is_late_whose_batches_others_make(slots: Any) -> None:
    strategy = LocalSgd(every=3, deadline="300 ms", slots=slots)
    # The mean of Adam's counts of steps is rounded to float32.
    workload = replace(networks.cases["adam" if slots == "kept" else "one_cycle"](61), steps=90, epochs=None)
    states, log = on(3, strategy, workload, rank2=[0.0] * 4 + [0.9], rank0=[0.05] * 90, rank1=[0.05] * 90)
    check_log(log, 0)
    missed = [each for each in log.rounds if 2 not in {p.rank for p in each.parts if p.examples}]
    assert missed
    assert missed[0].waited == pytest.approx(0.3, abs=0.15)
    late = [part for each in log.rounds for part in each.parts if not part.examples]
    assert late, "it says what it has made, and goes on"
    assert late[0].rank == 2
    assert log.took_part(2)[-1] > missed[0].number
    assert states[-1].step == 90
    assert_same(states[-1], made_again(strategy, workload, log))


def test_a_state_goes_on_with_the_batches_that_it_lacks() -> None:
    strategy = replace(STRATEGIES[1], deadline="300 ms")
    workload = replace(networks.cases["one_cycle"](61), steps=24, epochs=None)
    states, _ = on(2, strategy, workload, rank1=[0.0] * 3 + [0.9], rank0=[0.01] * 40)
    lacking = [state for state in states if state.settings["unpushed"]]
    assert lacking, "what rank 1 was late with"
    first = lacking[0]
    rest, log = on(2, replace(strategy, deadline=QUIET), workload, first)
    assert rest[-1].step == 24
    made = [batch for each in log.rounds for part in each.parts for batch in part.batches]
    behind = set(range(first.step + len(first.settings["unpushed"]))) - set(first.settings["unpushed"])
    assert sorted(made) == sorted(set(range(24)) - behind)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_check_holds_replicas_that_are_in_time_against_the_reference(workers: int) -> None:
    workload = replace(networks.cases["adam"](61), steps=8 * workers)
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, LocalSgd(every=2, deadline=QUIET), workers=workers, steps=8)
    assert proof.holds
    assert not proof.exact
    assert proof.rounds[0].worst.absolute <= EXACT


# The log


def test_a_log_is_read_as_it_was_saved(tmp_path: Path) -> None:
    part = LoggedPart(rank=1, life=4, begun=0, batches=(1, 3), dealt=2, examples=122.0)
    log = RoundLog(0, (LoggedRound(0, 0, 2, 0.5, 0.4, (part,)),))
    log.save(tmp_path / "log")
    assert RoundLog.load(tmp_path / "log") == log


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"batches": (0, 1)}, "batch 0 is in two averages"),
        ({"begun": 0}, "round 1 has a part of round 0"),
    ],
)
def test_a_log_that_is_not_one_runs_is_refused(changed: dict[str, Any], said: str) -> None:
    parts = [LoggedPart(0, 1, 0, (0, 1), 2, 8.0), LoggedPart(0, 1, 1, (2, 3), 2, 8.0)]
    parts[1] = replace(parts[1], **changed)
    log = RoundLog(0, tuple(LoggedRound(i, 2 * i, 1, 0.1, 0.1, (parts[i],)) for i in range(2)))
    with pytest.raises(ValueError, match=said):
        check_log(log, 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"deadline": "soon"}, "must be a time above 0"),
        ({"deadline": "2 s", "overlap": True}, "use one of the two"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LocalSgd(**fields)
