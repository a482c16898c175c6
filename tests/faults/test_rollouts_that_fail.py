"""Environments that raise or hang, workers that are killed in a rollout, and runs that go on: real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import played
import pytest
from commands import SECONDS
from conftest import Within
from killed import faults_of, saved

import apportion
from apportion import Policy, WorkerFailed, local
from apportion.reporting.html import write_html
from apportion.reporting.journal import read_events
from apportion.runtime.spawn.template import close_template, template
from apportion.runtime.supervisor import watchdog

PLAYED = Path(played.__file__)
STRATEGIES = ["data_parallel", "parameter_server"]
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:.*they take turns")]


def trained(name: str, strategy: str, folder: Path, **settings: Any) -> apportion.core.event.Result:
    return apportion.train(
        f"{PLAYED}:{name}", strategy, launcher=local(2), run_dir=folder / "run", check=False, **settings
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_environment_that_raises_shows_its_own_line(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="RuntimeError: the game has crashed") as failed:
        trained("broken", strategy, tmp_path, policy=Policy(max_restarts=0))
    assert failed.value.where is not None
    assert failed.value.where.startswith(str(PLAYED))
    assert 'raise RuntimeError("the game has crashed")' in failed.value.where


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.thorough
def test_an_environment_that_hangs_is_named(
    strategy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    within: Within,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Where others wait for it; with a parameter server that is at the end, and ends the run."""
    monkeypatch.setattr(watchdog, "LATE_SECONDS", 1.0)
    monkeypatch.setattr(watchdog, "LATE_STEPS", 1)
    monkeypatch.setattr(watchdog, "LATE_FIRST", 1)
    close_template()  # the next one has this test's standard error
    template().wait_ready()
    with within(SECONDS, "finding the late rank"), pytest.raises(WorkerFailed, match=r"rank 1 has not moved"):
        trained("late", strategy, tmp_path, policy=Policy(max_restarts=0))
    told = capfd.readouterr().err
    assert f'File "{PLAYED}", line' in told
    assert "in step" in told
    close_template()


@pytest.mark.parametrize("strategy", ["parameter_server", "hogwild"])
@pytest.mark.thorough
def test_an_environment_that_hangs_is_named_while_the_others_go_on(
    strategy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    within: Within,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 would go on for a minute, and wait for nobody."""
    monkeypatch.setattr(watchdog, "LATE_SECONDS", 2.0)
    close_template()  # the next one has this test's standard error
    template().wait_ready()
    events = apportion.run(f"{PLAYED}:late_by_far", strategy, launcher=local(2), run_dir=tmp_path / "run", check=False)
    seen = 0
    with within(SECONDS, "finding the rank that stands still"):
        for event in events:
            if event.kind == "fault":
                break
            seen = max(seen, event.step)
    assert event.data["rank"] == 1
    assert "rank 1 has not moved for" in event.data["cause"]
    assert "while others went on" in event.data["cause"]
    assert event.data["action"] == "the others go on, and wait for it at the end"
    assert 0 < seen < played.late_by_far.steps
    told = capfd.readouterr().err
    assert f'File "{PLAYED}", line' in told
    assert "in step" in told
    close_template()


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        ("data_parallel", 1),
        ("parameter_server", 2),
        ("hogwild", 1),
        pytest.param("parameter_server", 50, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
@pytest.mark.thorough
def test_workers_that_are_killed_in_rollouts_are_replaced(strategy: str, kills: int, tmp_path: Path) -> None:
    """The run goes on to its last update; the environments of a new worker begin new episodes."""
    name = "longer" if kills < 10 else "endless"
    policy = Policy(max_restarts=kills)
    doomed = [(one + 1) % 2 for one in range(kills)]
    faults = faults_of(f"{PLAYED}:{name}", strategy, 2, tmp_path / "run", doomed, policy=policy, check=False)
    assert len(faults) == kills
    assert all("was killed by SIGKILL" in fault.data["cause"] for fault in faults)
    end = read_events(tmp_path / "run")[-1]
    assert (end.kind, end.data["reason"]) == ("end", "finished")
    steps = getattr(played, name).steps
    assert end.step == steps
    assert all(weights.isfinite().all() for weights in saved(tmp_path / "run").values())


@pytest.mark.thorough
def test_a_run_that_is_resumed_goes_on_with_new_episodes_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = apportion.run(f"{PLAYED}:longer", "data_parallel", launcher=local(2), run_dir=tmp_path / "run", check=False)
    for event in run:
        if event.kind == "step" and event.step >= 20:
            break
    run.close()
    from apportion.reporting.progress.plain_lines import PlainLines

    lines = PlainLines()
    for event in apportion.run(
        f"{PLAYED}:longer", "data_parallel", launcher=local(2), run_dir=tmp_path / "run", resume=True, check=False
    ):
        lines.show(event)
    assert event.step == 400
    told = capfd.readouterr().out
    assert "frames a step" in told
    assert "its environments begin new episodes" in told


def test_a_run_tells_scores_and_speeds_in_events_report_and_tensorboard(tmp_path: Path) -> None:
    end = trained("good", "parameter_server", tmp_path)
    assert set(end.metrics) == {"score", "length"}
    events = read_events(tmp_path / "run")
    assert next(e for e in events if e.kind == "start").data["frames"] == 24
    rollouts = [e.data for e in events if e.kind == "rollouts"]
    assert {data["rank"] for data in rollouts} == {0, 1}
    assert sum(max(d["frames"] for d in rollouts if d["rank"] == rank) for rank in (0, 1)) <= 20 * 2 * 24
    assert all(0 < d["environment"] < 1 and 0 < d["acting"] < 1 for d in rollouts if d["frames_per_second"])
    scores = [d["score"] for d in rollouts if d["score"] is not None]
    assert scores
    assert all(-20 < score < 0 for score in scores)
    report = write_html(tmp_path / "run").read_text()
    assert "<h2>Rollouts</h2>" in report
    assert "score against frames" in report
    assert "pushing and pulling" in report
    assert any((tmp_path / "run" / "tensorboard").iterdir())
