"""Loggers keep the scalars of a run in other programs, fed from its events alone; what they have kept is read back."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from small_work import FILE, rows, work

import apportion

Command = Callable[..., CompletedProcess[str]]
TESTED = work(evaluation=apportion.Evaluation(data=rows), steps=20)
BESIDE = Path(sys.prefix, "loggers")
SCRIPT = (
    FILE
    + """
import sys
if __name__ == "__main__":
    tested = work(evaluation=apportion.Evaluation(data=rows), steps=20)
    result = apportion.train(tested, "single_device", run_dir="run", loggers=sys.argv[1:2])
    print(result.metrics["accuracy"])
"""
)

WANDB_FILE = """
import glob, json, struct
from wandb.proto import wandb_internal_pb2

path, = glob.glob('wandb/offline-run-*/run-*.wandb')
data, at, record, losses = open(path, 'rb').read(), 7, b'', []
while at + 7 <= len(data):  # the log format of LevelDB: checksum, length, and 1 whole, 2 first, 3 middle or 4 last
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    _, length, kind = struct.unpack_from('<IHB', data, at)
    record = (record if kind in (3, 4) else b'') + data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):
        message = wandb_internal_pb2.Record()
        message.ParseFromString(record)
        for item in message.history.item:
            losses += [float(item.value_json)] if (item.key or '.'.join(item.nested_key)) == 'loss' else []
print(json.dumps({'losses': losses}))
"""


def table(path: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            found[row["name"]].append((int(row["step"]), float(row["value"])))
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_a_table_has_the_scalars_of_all_events(workers: int, tmp_path: Path) -> None:
    strategy, launcher = ("single_device", "data_parallel")[workers - 1], apportion.local(workers=workers)
    logged = apportion.csv(str(tmp_path / "metrics.csv"))
    events = list(
        apportion.run(TESTED, strategy, launcher=launcher, run_dir=tmp_path / "run", loggers=[logged], check=False)
    )
    found = table(tmp_path / "metrics.csv")
    steps = [event for event in events if event.kind == "step"]
    assert found["loss"] == [(event.step, event.values["loss"][-1]) for event in steps]
    assert found["learning_rate"][-1] == (20, 0.05)
    assert found["evaluation/accuracy"][-1] == (20, events[-1].metrics["accuracy"])


def test_a_run_that_is_resumed_goes_on_in_its_table(tmp_path: Path) -> None:
    logged = [f"csv('{tmp_path / 'metrics.csv'}')"]
    for event in apportion.run(TESTED, "single_device", run_dir=tmp_path / "run", loggers=logged):
        if event.step >= 10:
            break
    before = table(tmp_path / "metrics.csv")["loss"]
    apportion.train(TESTED, "single_device", run_dir=tmp_path / "run", loggers=logged, resume="auto")
    after = table(tmp_path / "metrics.csv")["loss"]
    assert after[: len(before)] == before


def test_from_the_command_line(tmp_path: Path, apportion_command: Command) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    ran = apportion_command("train", "mine.py:tested", "single_device", "--log", "csv", "--log", "tensorboard")
    assert ran.returncode == 0, ran.stderr
    assert table(tmp_path / "metrics.csv")["evaluation/accuracy"]
    (folder,) = (tmp_path / "tensorboard").iterdir()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    assert read.Scalars("loss")[-1].step == 6


@pytest.mark.parametrize(
    ("logger", "named"),
    [("csv('no/folder/metrics.csv')", "no/folder"), ("excel", "excel"), ("csv(file='a')", "'file'"), (3, "3")],
)
def test_a_logger_that_cannot_log_is_refused(logger: object, named: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, apportion.ApportionError), match=named):
        apportion.train(TESTED, "single_device", run_dir=tmp_path / "run", loggers=[logger])  # type: ignore[list-item]


def test_a_program_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(apportion.ApportionError, match="pip install trackio"):
        apportion.train(TESTED, "single_device", run_dir=tmp_path / "run", loggers=["trackio"])


def run_with(logger: str, folder: Path, read: str, **environment: str) -> dict[str, object]:
    """Trains with a logger, and returns what a script reads back of it, both with the program on their path."""
    (folder / "mine.py").write_text(SCRIPT)
    path = os.pathsep.join([str(BESIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {**os.environ, "PYTHONPATH": path, "HOME": str(folder), **environment}
    for command in (("mine.py", logger), ("-c", read)):
        ran = subprocess.run(
            [sys.executable, *command], cwd=folder, env=given, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.skipif(not BESIDE.is_dir(), reason="scripts/test slow installs MLflow")
def test_mlflow_without_a_server(tmp_path: Path) -> None:
    found = run_with(
        f"mlflow(tracking_uri='file:{tmp_path / 'mlruns'}')",
        tmp_path,
        "import json, mlflow, os\n"
        f"client = mlflow.MlflowClient('file:{tmp_path / 'mlruns'}')\n"
        "run, = client.search_runs([client.get_experiment_by_name('apportion').experiment_id])\n"
        "loss = client.get_metric_history(run.info.run_id, 'loss')\n"
        "print(json.dumps({'status': run.info.status, 'step': loss[-1].step, 'strategy': run.data.params['strategy'],"
        " 'accuracy': run.data.metrics['evaluation/accuracy']}))",
        MLFLOW_ALLOW_FILE_STORE="true",
    )
    assert (found["status"], found["step"], found["strategy"]) == ("FINISHED", 20, "single_device")
    assert isinstance(found["accuracy"], float)


@pytest.mark.slow
@pytest.mark.skipif(not BESIDE.is_dir(), reason="scripts/test slow installs Weights & Biases")
def test_wandb_offline(tmp_path: Path) -> None:
    found = run_with(
        "wandb(project='mine', mode='offline')",
        tmp_path,
        WANDB_FILE,
    )
    losses = found["losses"]
    assert isinstance(losses, list)
    assert losses
    assert all(0 < loss < 2 for loss in losses)


@pytest.mark.slow
@pytest.mark.skipif(not BESIDE.is_dir(), reason="scripts/test slow installs Trackio")
def test_trackio_on_this_machine(tmp_path: Path) -> None:
    found = run_with(
        "trackio(project='mine', name='first')",
        tmp_path,
        "import glob, json, sqlite3\n"
        "path, = glob.glob('**/mine*.db', recursive=True, include_hidden=True)\n"
        "rows = sqlite3.connect(path).execute('select step, metrics from metrics order by step').fetchall()\n"
        "print(json.dumps({'step': rows[-1][0], 'metrics': json.loads(rows[-1][1])}))",
        TRACKIO_DIR=str(tmp_path / "trackio"),
    )
    assert found["step"] == 20
    assert "evaluation/accuracy" in str(found["metrics"])
