"""Measurements that were made while other programs held the cores say so, and are trusted less."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import networks
import pytest
from by_hand import GB, chain, machine
from ranks import by_value
from torch import nn
from torch.utils.data import TensorDataset

from apportion.core.workload import Workload
from apportion.cost_model.profile import Pass
from apportion.planner.auto import _Deciding
from apportion.planner.build import why_first
from apportion.planner.candidate import Measurement, Priced, tied
from apportion.planner.decision import Planning
from apportion.planner.predict import offered
from apportion.planner.trials.trial import Measured, parked
from apportion.planner.trials.trial import candidate as made
from apportion.runtime.launch.local import Local
from apportion.runtime.worker.cpu_wait import NOTED, Waited, noted
from apportion.strategies.single_device import SingleDevice

needs_schedstat = pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="only Linux tells how long a process waits for a core"
)


@contextmanager
def busy(each: int) -> Iterator[None]:
    """So many programs a core that do nothing but hold it, each in a session of its own as the programs of other users
    are: a kernel with autogroup shares the cores between sessions."""
    command = [
        sys.executable,
        "-c",
        "import os\nparent = os.getppid()\nprint(flush=True)\nwhile os.getppid() == parent: pass",
    ]
    spinning = [
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(each * len(os.sched_getaffinity(0)))
    ]
    try:
        for process in spinning:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in spinning:
            process.kill()
            process.communicate()


def spin(seconds: float) -> None:
    """Use the core for so long."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.processes
@needs_schedstat
@pytest.mark.thorough
def test_a_process_that_shares_its_core_knows_how_long_it_had_none() -> None:
    with busy(2):
        waited = Waited()
        spin(0.3)
        assert waited.share() > 0.2
    waited = Waited()
    time.sleep(0.5)  # however many others run, it waits for a core once, to wake up
    assert waited.share() < 0.2, "who sleeps wants no core"


def test_a_small_share_is_not_worth_a_sentence() -> None:
    assert noted(NOTED) is None
    sentence = noted(0.43)
    assert sentence is not None
    assert "held the cores for 43%" in sentence
    assert "remeasure=True" in sentence


def perceptron() -> Workload:
    data = lambda: TensorDataset(networks.numbers(64, 100).float(), networks.classes(64, 3))  # noqa: E731
    model = lambda: nn.Sequential(nn.Linear(100, 400), nn.ReLU(), nn.Linear(400, 3))  # noqa: E731
    return networks.workload(model, data, 32, precision="float32", steps=100_000)


@pytest.mark.processes
@needs_schedstat
def test_a_trial_beside_busy_programs_says_so() -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        candidates = [made(SingleDevice(), Local(workers=1, threads=1))]
        with parked(candidates, perceptron(), {}) as (group,), busy(2):
            group.go(200)
    assert group.measured.without_core_share > 0.2, group.measured


# What it widens


def row(without_core: float = 0.0, *, tried: Measurement | None = None) -> Priced:
    cost = SingleDevice().cost(PROFILE, machine(1))
    return Priced(strategy=SingleDevice(), layout=machine(1), cost=cost, tried=tried, without_core=without_core)


PROFILE = chain(1.0, parameter_bytes=GB)
BUSY = replace(PROFILE, passes=(Pass(rows=1, forward=1.0, backward=1.0, update=1.0, without_core=0.4),))


def test_a_prediction_and_a_measurement_may_be_off_by_what_others_held() -> None:
    assert row(0.4).error == pytest.approx(row().error + 0.4)
    assert row().with_overhead(BUSY).without_core == 0.4
    quiet = Measurement(step_seconds=1.0, low=0.9, high=1.1, steps=10)
    assert row(tried=quiet).error == pytest.approx(0.1)
    assert row(tried=replace(quiet, without_core=0.4)).error == pytest.approx(0.5)
    # Whether two that took turns can be told apart is another question: both were held up alike.
    slower = Measurement(step_seconds=1.2, low=1.1, high=1.3, steps=100, without_core=0.4)
    assert not tied(row(tried=replace(quiet, steps=100, without_core=0.4)), row(tried=slower))


def test_the_plan_says_that_others_held_the_cores() -> None:
    assert "held the cores for 40%" in why_first([row()], BUSY)[-1]
    assert not any("held" in line for line in why_first([row()], PROFILE))
    tried = Measurement(step_seconds=1.0, low=0.9, high=1.1, steps=10, without_core=0.3)
    assert "held the cores for 30%" in why_first([row(tried=tried)], BUSY)[-1]


def test_a_pass_that_is_read_from_an_older_profile_was_quiet() -> None:
    old = BUSY.to_json()
    for each in old["passes"]:
        del each["without_core"]
    assert type(BUSY).from_json(old).without_core == 0.0


@pytest.mark.processes
def test_a_run_whose_trial_was_disturbed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Measured, "without_core_share", 0.4)
    launcher = Local(threads=1)
    with by_value(networks), by_value(sys.modules[__name__]):
        offers = offered(launcher)
        told = _Deciding(perceptron(), {}, launcher, Planning(), offers).decide().plan
    assert told is not None
    assert "other programs held the cores for 40%" in told["why"]
