"""Why one won and the others lost, in words; and what to type: from steps with round numbers."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from by_hand import GB, ROWS, chain, machine

from apportion.core.strategy import Strategy
from apportion.cost_model.cluster import Placement
from apportion.cost_model.cost import Cost
from apportion.planner.build import (
    MOST_HOSTS,
    approximate,
    differences,
    make,
    match,
    milliseconds,
    per_batch,
    size,
    why_first,
    why_not,
)
from apportion.planner.candidate import Measurement, Priced, priced
from apportion.planner.plan import commands
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.fully_sharded import FullySharded
from apportion.strategies.local_sgd import LocalSgd
from apportion.strategies.map_reduce import MapReduce
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.single_device import SingleDevice

PROFILE = chain(1.0, parameter_bytes=GB)
ALONE = machine(1)


def row(strategy: Strategy, layout: Placement | None = None, *, examples: float = ROWS, **terms: float) -> Priced:
    cost = Cost(terms=terms, examples=examples, memory={"weights": 1})
    return Priced(strategy=strategy, layout=layout or machine(), cost=cost)


def measured(p: Priced, seconds: float, apart: float = 0.0) -> Priced:
    return replace(p, tried=Measurement(step_seconds=seconds, low=seconds - apart, high=seconds + apart, steps=1))


# Why the first won


def test_where_the_network_plays_it_says_where_the_time_of_a_frame_goes() -> None:
    """8 examples of 100 frames in 0.8 s on one worker: 1 ms a frame, of which half is played."""
    playing = replace(PROFILE, frames=100, environment_seconds=0.03, acting_seconds=0.02)
    first = row(SingleDevice(), ALONE, examples=8, computing=0.8)
    (told,) = (line for line in why_first([first], playing) if "frames" in line)
    assert told == (
        "1,000 frames/s: of a frame 300 us in the environment, 200 us acting and 500 us learning, on a worker's core; "
        "50% of it is played step by step, which more cores divide and a GPU does not hasten"
    )


def test_one_process_is_told_to_be_alone_where_nothing_else_that_is_exact_runs() -> None:
    one, approx = row(SingleDevice(), ALONE, computing=1.0), row(LocalSgd(), computing=0.5)
    refused = Priced(strategy=DataParallel(), layout=machine(), refusal="no")
    nothing = "do not distribute: one process is fastest, and nothing else that is exact can run this network there"
    assert why_first([one, approx, refused], PROFILE)[1:] == (nothing,)
    fused = row(SingleDevice(fused=True), ALONE, computing=2.0)
    assert why_first([one, fused, approx], PROFILE)[1] == nothing
    slower = row(DataParallel(), computing=2.0)
    told = why_first([one, approx, slower], PROFILE)
    assert told[1] == "do not distribute: one process is fastest"
    assert told[2].startswith("2.00 times as fast as data_parallel on"), "the next exact one"
    assert len(why_first([slower, approx], PROFILE)) == 1


def test_the_first_line_has_what_it_takes_and_how_far_off_that_may_be() -> None:
    first = row(DataParallel(), computing=0.5)
    (line,) = why_first([first], PROFILE)
    assert line == (
        "data_parallel on local(workers=2, threads=1): 500 ms a step, predicted, 200 examples/s (within 10%)"
    )
    (line,) = why_first([measured(first, 0.25, 0.05)], PROFILE)
    assert line.endswith("250 ms a step, measured, 400 examples/s (within 20%)")


def test_what_one_saves_and_spends_is_of_one_batch_and_the_largest_first() -> None:
    first = row(DataParallel(), computing=0.5, communicating=0.3, waiting=0.11)
    second = row(SingleDevice(), ALONE, computing=0.9, updating=1.0, waiting=0.1)
    saved, spent = differences(first, second, ROWS)
    assert list(saved.items()) == [("updating", 1.0), ("computing", pytest.approx(0.4))]
    assert spent == {"communicating": 0.3}, "10 ms are too little to be told"
    often = row(LocalSgd(), examples=2 * ROWS, computing=2.0, communicating=1.0)
    assert per_batch(often, ROWS) == {
        **dict.fromkeys(("updating", "bubble", "waiting", "loading"), 0.0),
        "computing": 1.0,
        "communicating": 0.5,
    }


def test_who_only_spends_more_and_was_still_faster_is_told_so() -> None:
    first = measured(row(DataParallel(), computing=1.0, communicating=0.5), 1.0)
    second = measured(row(SingleDevice(), ALONE, computing=1.0), 2.0)
    told = why_first([first, second], PROFILE)[-1]
    assert told.endswith(", measured; predicted were 1.5 s against 1 s a step")
    shorter = measured(row(DataParallel(), computing=0.4, communicating=0.5), 1.0)
    told = why_first([shorter, second], PROFILE)[-1]
    assert told.endswith(": by prediction it saves computing and spends more communication that nothing hides")
    same = why_first([measured(row(DataParallel(), computing=1.0), 1.0), second], PROFILE)[-1]
    assert same == (
        "2.00 times as fast as single_device on local(workers=1, threads=1), measured; predicted were 1 s against 1 s "
        "a step"
    )


def test_who_was_taken_because_it_is_simpler_is_told_to_be_slower() -> None:
    first, second = row(SingleDevice(), ALONE, computing=1.02), row(DataParallel(), computing=1.0)
    (*_, told) = why_first([first, second], PROFILE)
    assert told.endswith(
        "2.0% faster, which is within the uncertainty: the simpler one is taken (1 worker instead of 2 workers)"
    )
    assert why_not(second, first, PROFILE) == "as fast within the uncertainty (2.0% faster), and less simple: 2 workers"


# Why another lost


def lost(strategy: Strategy, **terms: float) -> str:
    return why_not(row(strategy, **terms), row(SingleDevice(), ALONE, computing=1.0), PROFILE)


def test_what_is_hardly_slower_may_not_be_told_apart() -> None:
    tie = "1.0% slower, which is within the uncertainty: computes 30 ms longer: 2 workers of 1 thread"
    first = row(SingleDevice(), ALONE, computing=1.0, updating=0.02)
    assert why_not(row(DataParallel(), computing=1.03, updating=0.0002), first, PROFILE) == tie
    assert lost(DataParallel(), computing=1.05) == "5.0% slower: computes 50 ms longer: 2 workers of 1 thread"
    assert lost(DataParallel(), computing=1.5).startswith("1.50 times as long: ")


def test_small_parts_of_all_kinds_are_a_little_of_everything() -> None:
    terms = dict.fromkeys(("updating", "communicating", "bubble", "waiting", "loading"), 0.016)
    assert lost(DataParallel(), computing=1.0, **terms) == "8.0% slower: a little of everything"


@pytest.mark.parametrize(
    "strategy", [DataParallel(), FullySharded(), MapReduce(), DataParallel(of=PipelineParallel(), replicas=2)], ids=str
)
def test_who_sums_gradients_waits_for_their_sum(strategy: Strategy) -> None:
    assert lost(strategy, computing=1.0, communicating=0.5).endswith("waits 500 ms for the sum of 1 GB of gradients")


def test_a_bubble_is_told_by_its_share_of_the_step() -> None:
    shares = [lost(PipelineParallel(), computing=1.0, bubble=b).split(": ")[1] for b in (0.25, 0.9, 1.1, 4.0)]
    assert shares == [f"{what} of each step is bubble" for what in ("20%", "half", "half", "80%")]


def test_what_computes_something_else_is_faster_only_by_the_example() -> None:
    exact = row(DataParallel(), computing=1.0)
    assert approximate(row(LocalSgd(), computing=2.0, examples=400), exact).startswith("approximate: 2.00x faster")
    assert approximate(row(LocalSgd(), computing=2.0), exact) == "approximate, and no faster per example (0.50x)"
    assert approximate(row(LocalSgd(), computing=1.0), exact) == "approximate, and no faster per example (1.00x)"


def test_sizes_and_times_are_for_people() -> None:
    assert [size(n) for n in (999, 1000, 40e6, 4e9, 4e12)] == ["999 B", "1 kB", "40 MB", "4 GB", "4 TB"]
    assert [milliseconds(s) for s in (0.00312, 0.0000213, 0.999, 1.5, 12.34)] == [
        "3.12 ms", "0.0213 ms", "999 ms", "1.5 s", "12.3 s",
    ]  # fmt: skip


# Two clusters side by side


def matched(ours: Any, theirs: Any) -> tuple[int | None, str]:
    strategy = SingleDevice() if ours.ranks == 1 else DataParallel()
    found = match(priced(strategy, ours, HEAVY), HEAVY, ours.cluster, replace(theirs.cluster, name="other"))
    return found.hosts, found.text.partition("a step")[2]


HEAVY = replace(chain(30.0, activation_bytes=8), layers=chain(30.0, activation_bytes=8, timings=(), flops=30e9).layers)
"""Worked out from rates: 90 s of one device of 1 GFLOP/s."""


def test_the_slower_cluster_is_told_by_how_many_of_its_hosts_would_do() -> None:
    fast = machine(1, flops=3.5e9)
    hosts, text = matched(machine(1), fast)
    assert (hosts, text) == (4, ", 3.50 times as fast as here; 4 of the hosts here match that")
    hosts, text = matched(fast, machine(1))
    assert (hosts, text) == (4, ", 3.50 times as long as here; 4 of those hosts match what is here")
    assert matched(fast, fast) == (None, ", as long as here")
    slow = machine(1, flops=1e6)
    assert matched(fast, slow) == (
        None, f", {3500:.2f} times as long as here; no number up to {MOST_HOSTS} of those hosts match what is here"
    )  # fmt: skip


def test_an_approximate_one_that_was_asked_for_stands_first() -> None:
    exact, approx = row(DataParallel(), computing=1.0), row(LocalSgd(), computing=0.5)
    layout = machine()
    plan = make([exact, approx], PROFILE, layout.cluster, chosen=approx)
    assert [str(p.strategy) for p in plan.candidates] == ["local_sgd", "data_parallel"]
    assert plan.chosen.strategy == LocalSgd()
    assert str(make([approx, exact], PROFILE, layout.cluster).chosen.strategy) == "data_parallel"
    with pytest.raises(ValueError, match="nothing exact can run by hand on cluster made"):
        make([approx], PROFILE, layout.cluster)


# What to type


def typed(p: Priced, workload: str = "mine.py:workload") -> tuple[str | None, str]:
    return commands(workload, p)


def test_one_worker_of_a_host_needs_no_core_of_its_own_and_gpus_none() -> None:
    one = typed(row(SingleDevice(), ALONE))[1]
    assert one == (
        "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 torchrun --standalone --nproc-per-node=1 --no-python "
        "apportion train mine.py:workload --strategy single_device --launcher env"
    )
    gpus = typed(row(DataParallel(), machine(2, kind="cuda")))[1]
    assert "taskset" not in gpus
    assert "--nproc-per-node=2" in gpus
    assert "taskset" in typed(row(DataParallel(), machine(2)))[1]


def test_who_trains_on_the_cores_of_a_host_with_gpus_says_so() -> None:
    gpus = machine(2, kind="cuda").cluster
    cluster = replace(gpus, devices=(*gpus.devices, *machine(2).cluster.devices))
    ours, torchrun = typed(row(DataParallel(), Placement(cluster=cluster, devices=("h0/cpu0",) * 2)))
    assert ours is not None
    assert shlex.split(ours)[-1] == "local(workers=2, threads=1, device='cpu')"
    assert shlex.split(shlex.split(torchrun)[-1])[-1] == "env(device='cpu')"


def test_every_host_starts_its_own_workers_with_their_threads() -> None:
    wide = machine(4, hosts=2)
    layout = replace(wide, devices=("h0/cpu0",) * 2 + ("h1/cpu0",) * 2, threads=2)
    ours, torchrun = typed(row(DataParallel(), layout))
    assert ours is None
    assert torchrun.startswith("OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 torchrun --nnodes=2 ")
    assert "--nproc-per-node=2 " in torchrun
    assert "taskset -c $((LOCAL_RANK * 2))-$((LOCAL_RANK * 2 + 1)) apportion" in shlex.split(torchrun)[-1]


@pytest.mark.parametrize("path", ["my file.py", "$HOME/mine.py", "a'b.py", 'a"b.py', "`x`.py"])
def test_a_shell_gives_the_words_as_they_were(path: str) -> None:
    ours, torchrun = typed(row(SingleDevice(), ALONE), f"{path}:workload")
    assert ours is not None
    for line in (ours, torchrun):
        assert f"{path}:workload" in shlex.split(line)
    assert shlex.split(typed(row(SingleDevice(), ALONE), "a profile")[1])[-5] == "FILE:NAME"
    assert ("'$HOME" in ours) == (path[0] == "$"), "what a shell would replace stands in single quotes"
