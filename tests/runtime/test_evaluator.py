"""Evaluations in a process beside the rank: real processes, which are killed, raise, and end with their run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import played
import psutil
import pytest
import torch
from commands import SECONDS
from conftest import Within
from torch import nn

import apportion
from apportion import Policy, WorkerFailed, local
from apportion.core.strategy import State
from apportion.parallel.rollouts.unrolled import Unrolled
from apportion.reporting.journal import read_events
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.worker.training import evaluations
from apportion.runtime.worker.training.evaluations import EvaluationFailed, Evaluator

PLAYED = Path(played.__file__)
pytestmark = pytest.mark.filterwarnings("ignore:.*they take turns")


def state_of(seed: int, step: int) -> State:
    """The snapshot of a network, as drawn from a seed."""
    torch.manual_seed(seed)
    return State(step=step, model=played.good.model().state_dict())


def scored(state: State) -> float:
    """What the greedy episodes of a snapshot score, played here."""
    model: nn.Module = played.good.model()
    model.load_state_dict(state.model)
    assert isinstance(model, Unrolled)
    assert played.good.evaluation is not None
    episodes: Any = played.good.evaluation.data()
    episodes.network, episodes.seed = model, played.good.seed
    _, targets = episodes.act(np.arange(len(episodes)), 0)
    return float(targets["score"].double().mean())


@pytest.fixture
def beside() -> Any:
    made = Evaluator(played.good, None)
    yield made
    made.close()


def no_beat() -> None:
    """Nobody watches."""


@pytest.mark.processes
def test_snapshots_are_evaluated_as_they_were_and_in_their_order(beside: Evaluator, within: Within) -> None:
    states = [state_of(seed, step) for seed, step in ((1, 10), (2, 20), (3, 30))]
    with within(SECONDS, "evaluating three snapshots"):
        found = [one for state in states for one in beside.submit(state, no_beat)]
        assert len(found) >= 1, "the third waits until the first is done"
        found += beside.wait_for_all(no_beat)
    assert [state.step for state, _ in found] == [10, 20, 30]
    for state, metrics in found:
        assert metrics["score"] == pytest.approx(scored(state), abs=1e-6)
    assert len({metrics["score"] for _, metrics in found}) >= 2, "the networks differ"


@pytest.mark.processes
def test_a_snapshot_from_a_gpu_is_evaluated_on_the_cpu(
    beside: Evaluator, within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked process cannot use its parent's GPU. What is saved says here that it lay on one, which this torch may
    not even know."""
    state = state_of(1, 10)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    with within(SECONDS, "evaluating a snapshot"):
        found = [*beside.submit(state, no_beat), *beside.wait_for_all(no_beat)]
    assert [metrics["score"] for _, metrics in found] == [pytest.approx(scored(state), abs=1e-6)]


@pytest.mark.processes
def test_one_that_is_killed_is_started_again_and_asked_the_same(beside: Evaluator, within: Within) -> None:
    own = psutil.Process()
    before = {child.pid for child in own.children()}
    beside.submit(state_of(1, 10), no_beat)
    (child,) = [child for child in own.children() if child.pid not in before]
    child.kill()
    with within(SECONDS, "evaluating again"), pytest.warns(UserWarning, match="ended with exit status -9"):
        ((state, metrics),) = beside.wait_for_all(no_beat)
    assert metrics["score"] == pytest.approx(scored(state), abs=1e-6)


@pytest.mark.processes
def test_one_that_always_ends_ends_the_run_with_the_reason(
    beside: Evaluator, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setattr(evaluations, "_Snapshot", lambda *_: os._exit(7))
    beside.submit(state_of(1, 10), no_beat)
    with (
        within(SECONDS, "giving up"),
        pytest.warns(UserWarning, match="exit status 7"),
        pytest.raises(apportion.ApportionError, match="has ended 4 times, the last time with exit status 7"),
    ):
        beside.wait_for_all(no_beat)


@pytest.mark.processes
def test_what_an_environment_raises_is_told(within: Within) -> None:
    beside = Evaluator(played.broken_when_judged, None)
    try:
        beside.submit(state_of(1, 10), no_beat)
        with within(SECONDS, "failing"), pytest.raises(EvaluationFailed, match="the evaluation has crashed"):
            beside.wait_for_all(no_beat)
    finally:
        beside.close()


@pytest.mark.processes
def test_it_shows_that_it_goes_on_and_ends_when_it_is_told_to(within: Within) -> None:
    """An evaluation of a second beats several times; the process is gone when it is closed."""
    own, beats = psutil.Process(), []
    before = {child.pid for child in own.children()}
    beside = Evaluator(played.slow, None)
    beside.submit(state_of(1, 10), no_beat)
    (child,) = [child for child in own.children() if child.pid not in before]
    with within(SECONDS, "evaluating slowly"):
        beside.wait_for_all(lambda: beats.append(time.monotonic()))
    assert len(beats) >= 3
    beside.submit(state_of(1, 20), no_beat)
    beside.close()
    assert not psutil.pid_exists(child.pid)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["single_device", "parameter_server", "hogwild"])
def test_a_run_tells_each_evaluation_and_keeps_the_best(strategy: str, tmp_path: Path) -> None:
    workers = 1 if strategy == "single_device" else 2
    apportion.train(
        f"{PLAYED}:good", strategy, launcher=local(workers, threads=1), run_dir=tmp_path / "run", check=False
    )
    found = [event for event in read_events(tmp_path / "run") if event.kind == "evaluation"]
    told = [event.final for event in found]
    assert told == [False] * (len(told) - 1) + [True]
    assert len(told) == 4 if workers == 1 else len(told) >= 2, "updates of others may pass two at once"
    assert [event.step for event in found] == sorted(event.step for event in found)
    best = max(found, key=lambda event: event.metrics["score"])
    directory = RunDirectory(tmp_path / "run")
    kept = directory.restore("best")
    assert kept.step == best.step
    assert kept.settings["best"] == pytest.approx(best.metrics["score"])
    assert scored(kept) == pytest.approx(best.metrics["score"], abs=1e-6)
    assert directory.restore("latest").step == 20


@pytest.mark.processes
def test_an_environment_that_raises_in_an_evaluation_shows_its_own_line(tmp_path: Path, within: Within) -> None:
    with within(SECONDS, "failing"), pytest.raises(WorkerFailed, match="the evaluation has crashed") as failed:
        apportion.train(
            f"{PLAYED}:broken_when_judged", "parameter_server", launcher=local(2, threads=1),
            run_dir=tmp_path / "run", check=False, policy=Policy(max_restarts=0),
        )  # fmt: skip
    assert failed.value.where is not None
    assert 'raise RuntimeError("the evaluation has crashed")' in failed.value.where


@pytest.mark.processes
@pytest.mark.parametrize("whom", ["the evaluator", "its rank"])
@pytest.mark.thorough
def test_a_run_goes_on_when_the_evaluator_or_its_rank_is_killed(whom: str, tmp_path: Path, within: Within) -> None:
    killed: list[psutil.Process] = []
    policy = Policy(max_restarts=1)
    with within(4 * SECONDS, "training on"):
        for event in apportion.run(
            f"{PLAYED}:judged_slowly", "parameter_server", launcher=local(2, threads=1), run_dir=tmp_path / "run",
            check=False, policy=policy,
        ):  # fmt: skip
            if event.kind == "step" and not killed and (found := evaluators()):
                killed = [found[0] if whom == "the evaluator" else found[0].parent(), found[0]]
                killed[0].send_signal(signal.SIGKILL)
    assert killed
    assert event.kind == "end"
    assert event.reason == "finished"
    assert not any(process.is_running() for process in killed)
    assert set(event.metrics) == {"score", "length"}


def evaluators() -> list[psutil.Process]:
    """The processes that the ranks of this program's template have started."""
    found = []
    for template in psutil.Process().children():
        for rank in template.children():
            found += [child for child in rank.children() if child.status() != psutil.STATUS_ZOMBIE]
    return found


def test_a_best_that_is_known_late_leaves_the_latest_where_it_is(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    (tmp_path / "checkpoints").mkdir()

    def save(step: int, *, best: bool = False) -> None:
        directory.save(state_of(step, step), epoch=0.0, strategy="single_device", keep=2, best=best)

    save(10)
    save(20)
    save(30)
    save(15, best=True)
    assert (directory.restore("latest").step, directory.restore("best").step) == (30, 15)
    assert directory.steps() == [15, 20, 30]
    save(40, best=True)
    assert (directory.restore("latest").step, directory.restore("best").step) == (40, 40)
    assert directory.steps() == [30, 40]
