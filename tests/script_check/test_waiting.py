"""Ranks that wait are distinguished from ranks that compute: the ranks here are small programs that write records."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from apportion.script_check import waiting
from apportion.script_check.processes import Activity, ProcessorTimes, activity, rank_processes
from apportion.script_check.recording.stacks import SIGNAL
from apportion.script_check.waiting import WaitOutcome, wait_for_ranks

pytestmark = pytest.mark.processes
PROGRAM = "apportion.script_check.recording.main"
HEAD = """
import faulthandler, os, pathlib, pickle, signal, sys, time
folder, rank = pathlib.Path(sys.argv[2]), os.environ["RANK"]
faulthandler.register(int(sys.argv[3]), file=open(folder / f"rank{rank}.stacks", "w"))
file = open(folder / f"rank{rank}.pkl", "wb")
def emit(kind, **fields):
    pickle.dump({"kind": kind, "step": 0, **fields}, file)
    file.flush()
def begin():
    emit("collective", call=0, op="barrier", pending=False, sequence=0, site="", line="", time=0.0)
def end():
    emit("end", how="ended")
    (folder / f"rank{rank}.end").touch()
def forever():
    while True:
        signal.pause()
emit("start")
"""


class Ranks:
    """Starts programs in the place of ranks, and waits for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def wait(self, *programs: str, seconds: float = 60.0) -> WaitOutcome:
        for rank, program in enumerate(programs):
            arguments = [sys.executable, "-c", HEAD + program, PROGRAM, str(self.folder), str(SIGNAL)]
            self.processes.append(subprocess.Popen(arguments, env={**os.environ, "RANK": str(rank)}))
        roots = [process.pid for process in self.processes]
        return wait_for_ranks(self.folder, len(programs), roots, time.monotonic() + seconds)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    for name, seconds in (("SHORTEST", 1.0), ("AFTER_AN_END", 0.7), ("OUTSIDE", 2.0), ("_NOTICED", 0.3)):
        monkeypatch.setattr(waiting, name, seconds)
    started = Ranks(tmp_path)
    yield started
    for process in started.processes:
        process.kill()
        process.wait()


IDLE = Activity(ticks=50, transferred=0, ready={"8": 20})


@pytest.mark.parametrize(
    ("now", "spare", "active"),
    [
        (IDLE, True, False),
        (IDLE, False, True),
        (Activity(50, 0, {"9": 20}), True, False),
        (Activity(51, 0, {"8": 21}), True, True),
        (Activity(51, 0, {}), True, False),
        (Activity(52, 0, {}), True, True),
        (Activity(50, 4096, {}), True, True),
        (Activity(50, 0, {}, blocked=1), True, True),
        (Activity(50, 0, {}), False, False),
    ],
    ids=[
        "seems ready", "waits for a busy processor", "seems ready since now", "computes a little", "woke up",
        "computes", "reads", "waits for a disk", "sleeps",
    ],
)  # fmt: skip
def test_a_thread_that_only_seems_ready_is_not_active(now: Activity, spare: bool, active: bool) -> None:
    assert now.since(IDLE, spare=spare) == active


@pytest.mark.parametrize(
    ("total", "idle", "spare"), [(400, 400, True), (400, 50, True), (400, 49, False), (400, 0, False), (0, 0, False)]
)
def test_half_of_a_processor_that_is_idle_is_to_spare(
    total: int, idle: int, spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert ProcessorTimes(1000 + total, 500 + idle).spare(ProcessorTimes(1000, 500)) == spare


def test_ranks_have_ended_when_their_records_say_so(ranks: Ranks) -> None:
    outcome = ranks.wait("end(); forever()", "end(); forever()")
    assert (outcome.how, outcome.unfinished) == ("ended", ())
    assert all(process.poll() is None for process in ranks.processes)


def test_ranks_inside_of_collectives_hang(ranks: Ranks) -> None:
    outcome = ranks.wait("begin(); forever()", "begin(); forever()")
    assert (outcome.how, outcome.unfinished) == ("hang", (0, 1))
    assert outcome.quiet > 1.0
    assert all("in forever" in text for text in outcome.stacks.values())
    assert sorted(outcome.stacks) == [0, 1]


@pytest.mark.thorough
def test_a_rank_outside_of_a_collective_has_longer(ranks: Ranks) -> None:
    assert ranks.wait("begin(); forever()", "forever()").quiet > 2.0


def test_a_rank_that_computes_is_waited_for(ranks: Ranks) -> None:
    busy = "begin()\nsince = time.process_time()\nwhile time.process_time() < since + 1.5: pass\n"
    outcome = ranks.wait(
        f"{busy}end(); forever()", "begin()\nwhile not list(folder.glob('*.end')): time.sleep(0.05)\nend()"
    )
    assert (outcome.how, outcome.unfinished) == ("ended", ())


def test_a_child_that_computes_is_waited_for(ranks: Ranks) -> None:
    busy = "import time\nsince = time.process_time()\nwhile time.process_time() < since + 1.5: pass"
    outcome = ranks.wait(f"import subprocess; begin(); subprocess.run([sys.executable, '-c', {busy!r}]); end()")
    assert outcome.how == "ended"


def test_pauses_that_the_script_makes_are_no_hang(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "TIMES", 4.0)
    pauses = "begin()\nfor pause in (0.7, 1.8): time.sleep(pause); emit('batch')\nend()"
    assert ranks.wait(pauses).how == "ended"


def test_a_process_that_ends_without_a_word_has_died(ranks: Ranks) -> None:
    outcome = ranks.wait("os._exit(1)", "begin(); forever()")
    assert (outcome.how, outcome.unfinished, outcome.died) == ("hang", (0, 1), (0,))


@pytest.mark.thorough
def test_seconds_in_which_the_watch_itself_was_stopped_do_not_count(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SHORTEST", 20.0)
    monkeypatch.setattr(waiting, "OUTSIDE", 20.0)
    stopped, looks, real = [0.0], [0], time.monotonic

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        looks[0] += any(path.stat().st_size for path in ranks.folder.glob("*.pkl"))
        stopped[0] = 100.0 if looks[0] > 5 else 0.0  # once the record has been seen

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: real() + stopped[0], sleep=sleep))
    outcome = ranks.wait("begin(); time.sleep(2.0); end(); forever()", seconds=300.0)
    assert (stopped[0], outcome.how) == (100.0, "ended")


def test_the_limit_holds(ranks: Ranks) -> None:
    outcome = ranks.wait("while True: emit('batch'); time.sleep(0.01)", seconds=1.0)
    assert (outcome.how, outcome.unfinished) == ("limit", (0,))
    assert outcome.unrecorded < waiting.SHORTEST


def test_ranks_are_found_among_descendants() -> None:
    child = [sys.executable, "-c", "import signal; print('ready', flush=True); signal.pause()", PROGRAM]
    code = f"import subprocess, os; subprocess.run({child!r}, env={{**os.environ, 'RANK': '5'}})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        found = rank_processes([parent.pid])
        assert list(found) == [5]
        assert found[5] != parent.pid
        os.kill(found[5], 9)
    assert activity(found[5]) is None


def test_a_record_that_is_being_written_is_read(ranks: Ranks) -> None:
    whole = pickle.dumps({"kind": "batch", "step": 0})
    program = f"begin(); file.write({whole[: len(whole) // 2]!r}); file.flush(); forever()"
    assert ranks.wait(program).how == "hang"
