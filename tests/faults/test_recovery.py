"""Workers are killed and stopped, at every moment of a run, and the run ends as if nothing had happened to it.

Real processes and real signals. What must come out is what comes out of an undisturbed run, to the bit.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import surviving
import torch
from safetensors.torch import load_file
from surviving import Forgetful, Mortal, Surviving, workload

from apportion import Event, Policy
from apportion.api.train import run, train
from apportion.core.strategy import Strategy
from apportion.core.value import find, names
from apportion.core.workload import Workload
from apportion.errors import WorkerFailed
from apportion.reporting.journal import read_events
from apportion.runtime.launch.local import Local
from apportion.runtime.spawn.template import template
from apportion.runtime.supervisor import recovery
from apportion.runtime.supervisor import run as supervisor
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.strategies.data_parallel import DataParallel

pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]
SECONDS, RUN_SECONDS = 20.0, 100.0
"""For what takes a fraction of one, on a busy machine; and for a run."""
MARGIN_SECONDS = 3.0
"""On a busy machine."""
STEPS, PACE = 60, 0.01
"""The steps of a run, and the seconds that each of them sleeps: a test has so long to do something to the run."""
CREWS: list[WorkerPool] = []
"""Of the test's runs so far."""
Undisturbed = Callable[[Strategy, int, int], dict[str, torch.Tensor]]
STRATEGIES = [Surviving(), DataParallel()]
REGISTERED = names("apportion.strategies")
by_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: str(s))


@pytest.fixture(autouse=True)
def crews(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of the runs are known."""
    CREWS.clear()
    monkeypatch.setattr(supervisor, "WorkerPool", lambda *given: CREWS.append(WorkerPool(*given)) or CREWS[-1])
    template().wait_ready()


def local(workers: int) -> Local:
    return Local(workers=workers, threads=1)


@dataclass
class Marks:
    """What the processes of a run write down about themselves, and where they are held."""

    folder: Path
    environment: pytest.MonkeyPatch

    def pace(self, seconds: float) -> None:
        """So long does each step sleep in the workers that begin from here on."""
        self.environment.setenv("SURVIVING_PACE", str(seconds))

    def told(self, where: str, who: int | str) -> list[tuple[int, int]]:
        """(process id, step), in order."""
        try:
            lines = (self.folder / where).read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [(int(pid), int(step)) for name, pid, step in map(str.split, lines) if name == str(who)]

    def hold(self, where: str, who: int | str) -> None:
        (self.folder / f"hold-{where}-{who}").touch()

    def release(self, where: str, who: int | str) -> None:
        (self.folder / f"hold-{where}-{who}").unlink()


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Marks:
    folder = tmp_path / "marks"
    folder.mkdir()
    monkeypatch.setenv("SURVIVING_MARKS", str(folder))
    found = Marks(folder, monkeypatch)
    found.pace(PACE)
    return found


def final_state(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / "latest"
    return {
        f"{part}/{name}": tensor
        for part in ("model", "optimizer")
        for name, tensor in load_file(folder / f"{part}.safetensors").items()
    }


@pytest.fixture
def without_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacements come from the template, and build everything themselves."""
    monkeypatch.setattr(recovery, "SPARES", 0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The final state of a run that nothing happened to."""
    known: dict[Any, dict[str, torch.Tensor]] = {}

    def get(strategy: Strategy, workers: int, steps: int) -> dict[str, torch.Tensor]:
        key = (str(strategy), workers, steps)
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SURVIVING_PACE", "0")
                patch.delenv("SURVIVING_MARKS", raising=False)
                train(workload, strategy, launcher=local(workers), run_dir=folder, steps=steps)
            known[key] = final_state(folder)
        return known[key]

    return get


class Disturbed:
    """A run in a thread of its own, beside which something is done to it: ``with Disturbed(...) as one: ...``."""

    def __init__(
        self,
        tmp_path: Path,
        strategy: Strategy,
        workers: int,
        steps: int = STEPS,
        given: Workload = workload,
        **options: Any,
    ) -> None:
        self.run_dir, self.workers, self.strategy, self.steps = tmp_path / "run", workers, strategy, steps
        self.events: list[Event] = []
        self.raised: BaseException | None = None
        self._given, self._options = given, options
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        where = {"launcher": local(self.workers), "run_dir": self.run_dir, "steps": self.steps}
        try:
            for event in run(self._given, self.strategy, **where, **self._options):
                self.events.append(event)
        except BaseException as error:
            self.raised = error

    def __enter__(self) -> Disturbed:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._thread.join(RUN_SECONDS)
        if kind is None:
            assert not self._thread.is_alive(), f"it does not end: {self.events[-3:]}"

    @property
    def step(self) -> int:
        return max((e.step for e in self.events if e.kind == "step"), default=0)

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"not within {SECONDS:g} s: {what}; {self.events[-3:]}"
            assert self._thread.is_alive(), f"the run ended before {what}: {self.raised}; {self.events[-3:]}"
            time.sleep(0.002)

    def until_spare(self, after: int | None = None) -> int:
        """Its process id, once it can fork; `after`: of the one that came in place of that process."""
        found: list[int] = []

        def is_ready() -> bool:
            spare = CREWS[-1].spare if CREWS else None
            found.extend([spare.pid] if spare is not None and spare.ready and spare.pid != after else [])
            return bool(found)

        self.until(is_ready, "a spare that is ready")
        return found[0]

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step >= step, f"step {step}")

    def faults(self) -> list[tuple[int, str]]:
        return [(e.data["rank"], e.data["action"]) for e in self.events if e.kind == "fault"]

    def until_faults(self, number: int) -> None:
        self.until(lambda: len(self.faults()) >= number, f"{number} faults")

    def assert_as_if_nothing_had_happened(self, undisturbed: Undisturbed, *, evaluated: bool = True) -> None:
        assert self.raised is None, self.raised
        end = self.events[-1]
        assert (end.kind, end.step, end.data["reason"]) == ("end", self.steps, "finished")
        assert [e.kind for e in self.events].count("start") == 1
        wanted, found = undisturbed(self.strategy, self.workers, self.steps), final_state(self.run_dir)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), f"{name} differs by {(found[name] - tensor).abs().max()}"
        if evaluated:
            steps = {e.step for e in self.events if e.kind == "evaluation"}
            assert steps == {*range(40, self.steps + 1, 40), self.steps}


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def pid_of(rank: int) -> int:
    """In the run that is under way."""
    return CREWS[-1].pids()[rank]


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


# One worker, at some moment


@by_strategy
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.usefixtures("without_spare")
def test_any_rank_may_be_killed_and_the_others_live_on(
    rank: int, strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    with Disturbed(tmp_path, strategy, 3) as one:
        one.until_step(10)
        others = [pid_of(slot) for slot in range(3) if slot != rank]
        kill(pid_of(rank))
        one.until_faults(1)
        assert all(map(lives, others))
    ((lost, action),) = one.faults()
    assert lost == rank
    assert float(re.fullmatch(r"replaced in (.*) s", action)[1]) < SECONDS, "by a fork, in a fraction of one"  # type: ignore[index]
    assert [len(marks.told("building", slot)) for slot in range(3)] == [1 + (slot == rank) for slot in range(3)]
    one.assert_as_if_nothing_had_happened(undisturbed)


@by_strategy
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_be_killed_in_an_evaluation_which_is_made_again(
    rank: int, strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    marks.hold("evaluating", rank)
    with Disturbed(tmp_path, strategy, 2) as one:
        one.until(lambda: marks.told("evaluating", rank), "the evaluation")
        marks.release("evaluating", rank)
        kill(pid_of(rank))
    assert [rank for rank, _ in one.faults()] == [rank]
    one.assert_as_if_nothing_had_happened(undisturbed)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_be_killed_at_a_checkpoint_which_is_made_again(
    rank: int, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    marks.hold("saving", rank)
    given, policy = replace(workload, evaluation=None), Policy(checkpoint_every="25 steps", keep=9)
    with Disturbed(tmp_path, Surviving(), 2, given=given, policy=policy) as one:
        one.until(lambda: marks.told("saving", rank), "the checkpoint")
        assert marks.told("saving", rank)[0][1] == 25
        marks.release("saving", rank)
        kill(pid_of(rank))
    one.assert_as_if_nothing_had_happened(undisturbed, evaluated=False)
    saved = [e.step for e in one.events if e.kind == "checkpoint"]
    assert set(saved) == {25, 50, 60}


@by_strategy
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_be_killed_before_it_has_begun(
    rank: int, strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    marks.hold("building", rank)
    with Disturbed(tmp_path, strategy, 2) as one:
        one.until(lambda: marks.told("building", rank), "the start")
        kill(pid_of(rank))
        marks.release("building", rank)
    assert one.faults() == [(rank, "all workers are started again")]
    one.assert_as_if_nothing_had_happened(undisturbed)


@by_strategy
def test_two_ranks_may_be_killed_at_once(
    strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    with Disturbed(tmp_path, strategy, 3) as one:
        one.until_step(10)
        kill(pid_of(0), pid_of(2))
    assert sorted(rank for rank, _ in one.faults()) == [0, 2]
    one.assert_as_if_nothing_had_happened(undisturbed)


@by_strategy
@pytest.mark.thorough
def test_all_ranks_may_be_killed_at_once(
    strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    with Disturbed(tmp_path, strategy, 3) as one:
        one.until_step(10)
        kill(*(pid_of(rank) for rank in range(3)))
    assert sorted(rank for rank, _ in one.faults()) == [0, 1, 2]
    one.assert_as_if_nothing_had_happened(undisturbed)


def died(tmp_path: Path, workers: int, deaths: str, marks: Marks, undisturbed: Undisturbed) -> None:
    """Their deaths leave no trace but the faults."""
    marks.pace(0.0)
    with Disturbed(tmp_path, Mortal(deaths), workers) as one:
        pass
    assert sorted(rank for rank, _ in one.faults()) == sorted(int(death.split()[0]) for death in deaths.split(";"))
    one.strategy = DataParallel()
    one.assert_as_if_nothing_had_happened(undisturbed)


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("where", ["gradient", "arriving", "arrived", "slice", "written", "met", "committed"])
def test_a_worker_may_die_at_any_point_of_an_update(
    where: str, slot: int, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    died(tmp_path, 2, f"{slot} {where} 25", marks, undisturbed)


@pytest.mark.parametrize(
    ("workers", "deaths"),
    [
        (2, "1 slice 25; 0 rejoining 0"),  # the last who had the weights
        (2, "0 met 25; 1 rejoined 0"),
        (2, "0 committed 25; 0 rejoining 0"),  # the replacement itself
        (2, "1 arrived 25; 1 rejoined 0"),
        (3, "0 met 25; 1 rejoining 0; 2 rejoined 0"),
        (3, "2 slice 25; 2 rejoining 0; 0 rejoining 0"),
    ],
)
def test_more_may_die_while_the_others_rejoin(
    workers: int, deaths: str, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    died(tmp_path, workers, deaths, marks, undisturbed)


@pytest.mark.usefixtures("without_spare")
def test_a_replacement_that_has_built_for_a_world_that_is_over_builds_again(
    tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    with Disturbed(tmp_path, Mortal("2 rejoining 0"), 3) as one:
        one.until_step(10)
        for where, slot in (("building", 1), ("rejoining", 2)):
            marks.hold(where, slot)
        kill(pid_of(1))
        one.until(lambda: len(marks.told("building", 1)) == 2, "the replacement")
        one.until(lambda: marks.told("rejoining", 2), "the survivor")
        for where, slot in (("rejoining", 2), ("building", 1)):
            marks.release(where, slot)
    assert sorted(rank for rank, _ in one.faults()) == [1, 2]
    assert len(marks.told("building", 1)) == 3
    one.strategy = DataParallel()
    one.assert_as_if_nothing_had_happened(undisturbed)


@by_strategy
@pytest.mark.usefixtures("without_spare")
@pytest.mark.thorough
def test_a_replacement_that_still_builds_is_not_lost_with_the_next_one(
    strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    with Disturbed(tmp_path, strategy, 3) as one:
        one.until_step(10)
        marks.hold("building", 1)
        kill(pid_of(1))
        one.until(lambda: len(marks.told("building", 1)) == 2, "the replacement")
        kill(pid_of(2))
        time.sleep(3.0)  # longer than one who has begun may be silent
        marks.release("building", 1)
    assert sorted(rank for rank, _ in one.faults()) == [1, 2], [e.data for e in one.events if e.kind == "fault"]
    one.assert_as_if_nothing_had_happened(undisturbed)


@by_strategy
@pytest.mark.usefixtures("without_spare")
def test_a_replacement_may_be_killed_before_it_has_begun(
    strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    with Disturbed(tmp_path, strategy, 2) as one:
        one.until_step(10)
        marks.hold("building", 1)
        kill(pid_of(1))
        one.until(lambda: len(marks.told("building", 1)) == 2, "the replacement")
        kill(pid_of(1))
        one.until(lambda: len(marks.told("building", 1)) == 3, "the replacement's replacement")
        marks.release("building", 1)
    assert [rank for rank, _ in one.faults()] == [1, 1]
    one.assert_as_if_nothing_had_happened(undisturbed)


@pytest.mark.parametrize("saved", [True, False], ids=["from a checkpoint", "from the start"])
@pytest.mark.thorough
def test_where_nobody_is_left_with_the_state_all_begin_again(
    saved: bool, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    given, policy = replace(workload, evaluation=None), Policy(checkpoint_every="10 steps" if saved else "99 s")
    with Disturbed(tmp_path, Forgetful(), 2, given=given, policy=policy) as one:
        one.until_step(30)
        kill(pid_of(0))
    actions = [action for _, action in one.faults()]
    assert actions == ["replaced", "all workers are started again"]
    one.assert_as_if_nothing_had_happened(undisturbed, evaluated=False)
    again = [e.kind for e in one.events].index("fault")
    first = next(e.step for e in one.events[again:] if e.kind == "step")
    assert (first > 10) == saved


# What replacements are forked from


@pytest.mark.thorough
def test_a_spare_that_is_killed_costs_no_worker_and_is_replaced(
    tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    marks.pace(2 * PACE)
    with Disturbed(tmp_path, Surviving(), 2, steps=140) as one:
        spare = one.until_spare()
        kill(pid_of(1))
        one.until_faults(1)
        kill(spare)
        born_of_it = pid_of(1)
        one.until(lambda: not lives(spare), "the end of the spare")
        one.until_spare(after=spare)  # the pool may still name the dead one for a moment
        assert lives(born_of_it)
        kill(pid_of(0))
    assert [rank for rank, _ in one.faults()] == [1, 0]
    opened = {pid for slot in (0, 1) for pid, _ in marks.told("opening", slot)}
    assert born_of_it not in opened, "it was not forked from the spare, which had the data open"
    one.assert_as_if_nothing_had_happened(undisturbed)


@pytest.mark.thorough
def test_a_spare_that_is_stopped_is_not_waited_for(tmp_path: Path, marks: Marks, undisturbed: Undisturbed) -> None:
    marks.pace(2 * PACE)
    with Disturbed(tmp_path, Surviving(), 2, steps=140) as one:
        os.kill(one.until_spare(), signal.SIGSTOP)
        kill(pid_of(1))
    assert [rank for rank, _ in one.faults()] == [1]
    one.assert_as_if_nothing_had_happened(undisturbed)


@pytest.mark.parametrize("trouble", ["threads", "files"])
@pytest.mark.thorough
def test_a_workload_that_cannot_be_forked_gets_its_replacements_from_the_template(
    trouble: str, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    given = replace(workload, data=getattr(surviving, f"data_with_{trouble}"))
    marks.pace(2 * PACE)
    with Disturbed(tmp_path, Surviving(), 2, steps=140, given=given) as one:
        one.until(lambda: marks.told("building", "spare"), "the spare")
        one.until(lambda: not lives(marks.told("building", "spare")[0][0]), "its end")
        kill(pid_of(1))
    assert [rank for rank, _ in one.faults()] == [1]
    assert len(set(marks.told("building", "spare"))) == 1
    assert len(marks.told("opening", 1)) >= 4  # training and evaluation data, twice
    one.assert_as_if_nothing_had_happened(undisturbed)


@pytest.mark.thorough
def test_a_template_that_is_killed_takes_all_workers_along_and_the_run_goes_on(
    tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    with Disturbed(tmp_path, DataParallel(), 2) as one:
        one.until_step(10)
        process = template()._process
        assert process is not None
        process.kill()
    assert sorted(rank for rank, _ in one.faults()) == [0, 1]
    one.assert_as_if_nothing_had_happened(undisturbed)


# Frozen, slow


@by_strategy
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.thorough
def test_a_worker_that_is_stopped_is_noticed_within_two_seconds_and_replaced(
    rank: int, strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    with Disturbed(tmp_path, strategy, 2) as one:
        one.until_step(10)
        stopped, began = pid_of(rank), time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        one.until(lambda: not lives(stopped), "its end")
        took = time.monotonic() - began
    assert took < 2.0 + MARGIN_SECONDS, f"noticed after {took:.2f} s"
    (fault,) = [e for e in one.events if e.kind == "fault"]
    assert fault.data["rank"] == rank
    assert "been stopped (SIGSTOP, or a debugger)" in fault.data["cause"]
    one.assert_as_if_nothing_had_happened(undisturbed)


@pytest.mark.thorough
def test_workers_that_are_all_stopped_lose_nobody(tmp_path: Path, marks: Marks, undisturbed: Undisturbed) -> None:
    with Disturbed(tmp_path, Surviving(), 2) as one:
        one.until_step(10)
        pids = [pid_of(0), pid_of(1)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(3.0)  # longer than one alone may be
    assert not one.faults()
    one.assert_as_if_nothing_had_happened(undisturbed)


@pytest.mark.thorough
def test_a_slow_worker_is_waited_for(tmp_path: Path, marks: Marks, undisturbed: Undisturbed) -> None:
    with Disturbed(tmp_path, Surviving(), 2) as one:
        one.until_step(10)
        marks.hold("evaluating", 1)
        one.until(lambda: marks.told("evaluating", 1), "the evaluation")
        time.sleep(3.0)  # longer than a stopped one may be
        marks.release("evaluating", 1)
    assert not one.faults()
    one.assert_as_if_nothing_had_happened(undisturbed)


@pytest.mark.thorough
def test_a_survivor_that_does_not_answer_is_replaced_too(
    tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    with Disturbed(tmp_path, Surviving(), 3) as one:
        one.until_step(5)  # the evaluation was tried before the training
        tried = len(marks.told("evaluating", 2))
        marks.hold("evaluating", 2)
        one.until(lambda: len(marks.told("evaluating", 2)) > tried, "the evaluation")
        kill(pid_of(1))
        one.until(lambda: not lives(marks.told("evaluating", 2)[0][0]), "the end of the silent one")
        marks.release("evaluating", 2)
    causes = {e.data["rank"]: e.data["cause"] for e in one.events if e.kind == "fault"}
    assert causes.keys() == {1, 2}
    assert "has not answered" in causes[2]
    one.assert_as_if_nothing_had_happened(undisturbed)


@pytest.mark.thorough
def test_the_body_of_the_loop_holds_up_no_recovery(tmp_path: Path, marks: Marks, undisturbed: Undisturbed) -> None:
    one, killed = Disturbed(tmp_path, Surviving(), 2), False
    for event in run(workload, Surviving(), launcher=local(2), run_dir=one.run_dir, steps=one.steps):
        one.events.append(event)
        if event.kind == "step" and event.step > 10 and not killed:
            killed, before = True, pid_of(1)
            kill(before)
            deadline = time.monotonic() + SECONDS
            while marks.told("computing", 1)[-1][0] == before:  # the replacement, while the loop's body is here
                assert time.monotonic() < deadline
                time.sleep(0.01)
    one.assert_as_if_nothing_had_happened(undisturbed)


@by_strategy
@pytest.mark.usefixtures("without_spare")
def test_ctrl_c_while_rank_0_is_replaced_saves_the_last_update(
    strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    run_dir, policy = tmp_path / "run", Policy(checkpoint_every="1000 steps")
    reached = 0
    for event in run(workload, strategy, launcher=local(2), run_dir=run_dir, steps=STEPS, policy=policy):
        if event.kind == "step" and event.step > 10 and not reached:
            reached = event.step
            marks.hold("building", 0)
            kill(pid_of(0))
            wait_for(lambda: len(marks.told("building", 0)) == 2, "the replacement")
            threading.Timer(0.5, marks.release, ("building", 0)).start()
            with pytest.raises(KeyboardInterrupt) as interrupt:
                signal.raise_signal(signal.SIGINT)
    assert (event.kind, event.data["reason"], event.data["why"]) == ("end", "interrupted", None)
    assert f"step {event.step} is saved" in interrupt.value.__notes__[0]
    assert saved_step(run_dir) == event.step >= reached
    marks.pace(0.0)
    train(workload, strategy, launcher=local(2), run_dir=run_dir, resume=True, steps=STEPS)
    for name, tensor in undisturbed(strategy, 2, STEPS).items():
        assert torch.equal(final_state(run_dir)[name], tensor), name


@by_strategy
@pytest.mark.thorough
def test_a_break_is_obeyed_by_a_replacement_too(
    strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    run_dir, given = tmp_path / "run", replace(workload, evaluation=None)
    marks.pace(6 * PACE)  # it is not at its end before the replacement hears of the break
    for event in run(given, strategy, launcher=local(2), run_dir=run_dir, steps=STEPS):
        if event.kind == "step" and event.step > 10:
            kill(pid_of(0))
            break
    last = read_events(run_dir)[-1]
    assert (last.kind, last.data["reason"]) == ("end", "stopped")
    assert event.step <= last.step < STEPS
    marks.pace(0.0)
    train(given, strategy, launcher=local(2), run_dir=run_dir, resume=True, steps=STEPS)
    for name, tensor in undisturbed(strategy, 2, STEPS).items():
        assert torch.equal(final_state(run_dir)[name], tensor), name


# The policy


@by_strategy
def test_a_run_may_go_on_with_fewer_workers(
    strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    with Disturbed(tmp_path, strategy, 3, policy=Policy(on_loss="shrink")) as one:
        one.until_step(10)
        kill(pid_of(0))
        one.until_faults(1)
        one.until_step(one.step + 10)
        kill(pid_of(1))
    assert one.raised is None
    assert [action for _, action in one.faults()] == ["goes on with 2 workers", "goes on with 1 worker"]
    assert (one.events[-1].data["reason"], one.events[-1].step) == ("finished", one.steps)
    found, wanted = final_state(one.run_dir), undisturbed(strategy, 1, one.steps)
    for name, tensor in wanted.items():  # sums of other parts round otherwise
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-9), name


@by_strategy
@pytest.mark.parametrize("rank", [0, 1])
def test_after_max_restarts_a_run_ends_with_the_last_update_saved(
    rank: int, strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    policy = Policy(max_restarts=1, checkpoint_every="1000 steps")
    with Disturbed(tmp_path, strategy, 3, policy=policy) as one:
        for lost in range(2):
            one.until_step(one.step + 10)
            kill(pid_of(rank))
            one.until_faults(lost + 1)
    assert isinstance(one.raised, WorkerFailed)
    assert f"rank {rank} was killed by SIGKILL" in str(one.raised)
    assert "(max_restarts=1); resume=True goes on" in str(one.raised)
    assert [action for _, action in one.faults()][-1] == "stops"
    assert saved_step(one.run_dir) >= one.step > 10
    marks.pace(0.0)
    train(workload, strategy, launcher=local(3), run_dir=one.run_dir, resume=True, steps=one.steps)
    for name, tensor in undisturbed(strategy, 3, one.steps).items():
        assert torch.equal(final_state(one.run_dir)[name], tensor), name


@by_strategy
def test_an_exception_ends_a_run_with_its_traceback_and_the_last_update_saved(
    strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    policy = Policy(checkpoint_every="1000 steps")
    with Disturbed(tmp_path, strategy, 2, policy=policy) as one:
        one.until_step(10)
        (marks.folder / "raise-computing-1").touch()
    assert isinstance(one.raised, WorkerFailed)
    assert one.raised.rank == 1
    assert 'raise RuntimeError("asked for")' in str(one.raised.traceback)
    assert saved_step(one.run_dir) >= one.step >= 10
    (marks.folder / "raise-computing-1").unlink()
    marks.pace(0.0)
    train(workload, strategy, launcher=local(2), run_dir=one.run_dir, resume=True, steps=one.steps)
    for name, tensor in undisturbed(strategy, 2, one.steps).items():
        assert torch.equal(final_state(one.run_dir)[name], tensor), name


def saved_step(run_dir: Path) -> int:
    return int(os.readlink(run_dir / "checkpoints" / "latest").removeprefix("step-"))


@pytest.mark.usefixtures("without_spare")
def test_a_replacement_that_cannot_begin_ends_the_run_with_its_traceback(tmp_path: Path, marks: Marks) -> None:
    with Disturbed(tmp_path, DataParallel(), 2, policy=Policy(max_restarts=100)) as one:
        one.until_step(10)
        (marks.folder / "raise-building-1").touch()
        kill(pid_of(1))
    assert isinstance(one.raised, WorkerFailed)
    assert 'raise RuntimeError("asked for")' in str(one.raised.traceback)
    assert [action for _, action in one.faults()] == ["replaced", "stops"]
    assert saved_step(one.run_dir) >= one.step


def test_workers_that_crash_at_each_start_end_the_run_soon(tmp_path: Path, marks: Marks) -> None:
    with Disturbed(tmp_path, DataParallel(), 2, given=surviving.crashing, policy=Policy(max_restarts=100)) as one:
        pass
    assert isinstance(one.raised, WorkerFailed)
    assert "it has happened 3 times at step 0, which is not an accident" in str(one.raised)
    assert len(one.faults()) <= 6


def test_a_crash_that_repeats_stops_the_run(tmp_path: Path, marks: Marks) -> None:
    with Disturbed(tmp_path, Surviving(), 2, given=surviving.poisoned) as one:
        pass
    assert isinstance(one.raised, WorkerFailed)
    assert "crashed in native code (SIGSEGV)" in str(one.raised)
    assert re.search(r"it has happened 3 times at step \d", str(one.raised))
    assert len(one.faults()) == 3


# Many


EXACT: list[Any] = [find(n, "apportion.strategies")() for n in ("data_parallel", "map_reduce") if n in REGISTERED]
by_exact = pytest.mark.parametrize("strategy", EXACT, ids=str)


def killed_often(times: int, seed: int, strategy: Strategy, tmp_path: Path, undisturbed: Undisturbed) -> list[float]:
    """Random workers at random moments; the seconds from each kill to the next update that is made."""
    chance, took = random.Random(seed), []
    steps = 100 + 25 * times
    with Disturbed(tmp_path, strategy, 2, steps=steps, policy=Policy(max_restarts=times)) as one:
        one.until_step(5)
        for number in range(times):
            time.sleep(chance.random() * 0.3)
            pid, killed = pid_of(chance.randrange(2)), time.monotonic()
            kill(pid)
            one.until_faults(number + 1)  # told once the next step is made
            took.append(time.monotonic() - killed)
    assert len(one.faults()) == times
    assert all(action.startswith("replaced in ") for _, action in one.faults())
    one.assert_as_if_nothing_had_happened(undisturbed)
    return sorted(took)


@by_exact
@pytest.mark.thorough
def test_ten_kills_at_random_moments_leave_no_trace(
    strategy: Strategy, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    took = killed_often(10, 1, strategy, tmp_path, undisturbed)
    assert statistics.median(took) < SECONDS / 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@by_exact
def test_a_hundred_kills_at_random_moments_leave_no_trace(
    strategy: Strategy, seed: int, tmp_path: Path, marks: Marks, undisturbed: Undisturbed
) -> None:
    took = killed_often(100, seed, strategy, tmp_path, undisturbed)
    print(f"a step {statistics.median(took):.2f} s after a kill in the median, {took[-1]:.2f} s at most")
    assert statistics.median(took) <= 0.25
    assert took[-1] <= 1.0


# The driver


def test_a_driver_that_is_killed_takes_the_spare_and_the_replacements_along(tmp_path: Path, marks: Marks) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {[str(Path(__file__).parents[1] / 'helpers')]!r}\nimport apportion, surviving\n"
        "if __name__ == '__main__':\n    apportion.train(surviving.workload, surviving.Surviving(),"
        " launcher=apportion.local(workers=2, threads=1), run_dir='run', steps=100_000, check=False)\n"
    )
    process = psutil.Popen([sys.executable, script], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: marks.told("computing", "spare"), "the spare")
        first = marks.told("computing", 1)[0][0]
        kill(first)
        wait_for(lambda: marks.told("computing", 1)[-1][0] != first, "the replacement")
        everyone = process.children(recursive=True)
        pids = {marks.told("computing", 0)[0][0], marks.told("computing", 1)[-1][0]}
        assert pids < {p.pid for p in everyone}
    finally:
        process.kill()
        process.wait(SECONDS)
    wait_for(lambda: not any(lives(p.pid) for p in everyone), "the end of all")


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 3 * SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# What is written about all this


def test_the_fault_contract_names_every_strategy_as_it_is() -> None:
    table = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    survive, others = re.findall(r"\| (?:strategies that survive|the others) \(([^)]*)\)", table)
    for name in REGISTERED:
        cls: Any = find(name, "apportion.strategies")
        assert (f"`{name}`" in survive, f"`{name}`" in others) == (cls.survives, not cls.survives), name
        assert f"| `{name}` |" in table.partition("## What is lost")[2], name
