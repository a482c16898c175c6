"""Runs a script once, as N cold processes with torchrun's variables, and returns what its ranks have recorded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from apportion.script_check.feed import Feed
from apportion.script_check.record import RankRecord, read_records
from apportion.script_check.recording.plan import Plan
from apportion.script_check.script import Script

_OFF = {
    "WANDB_MODE": "disabled", "WANDB_DISABLED": "true", "COMET_MODE": "disabled", "MLFLOW_TRACKING_URI": "",
    "NEPTUNE_MODE": "offline", "CLEARML_OFFLINE_MODE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1",
}  # fmt: skip
"""Variables that keep loggers and hubs from calling out."""
LEFT_SECONDS = 8.0
"""How long ranks may go on after another rank has ended before they count as waiting for it."""


@dataclass(frozen=True)
class Passed:
    """One pass: what the ranks recorded, what they printed, and those that did not end by themselves."""

    records: Sequence[RankRecord]
    outputs: Sequence[str]
    unfinished: tuple[int, ...]
    seconds: float

    @property
    def failed(self) -> list[RankRecord]:
        """The ranks whose script raised or ended with a status other than 0, or that died."""
        return [
            record for record in self.records if record.outcome is None or record.outcome["how"] in ("raised", "exited")
        ]


@dataclass(frozen=True)
class Conditions:
    """How passes run. ``folder``: for records; ``limit``: seconds for one pass; ``threads``: of each rank; the others
    as in ``recording/plan.py``."""

    folder: Path
    limit: float = 120.0
    threads: int = 1
    steps: int = 20
    epoch_batches: int = 8
    float64: bool = True
    no_gpu: bool = False
    memory: int = field(default_factory=lambda: _available_memory())


def run_pass(name: str, script: Script, ranks: int, conditions: Conditions, feed: Feed | None = None) -> Passed:
    """Run a script once and return what was recorded; ``name`` names the pass's folder."""
    folder = conditions.folder / name
    (folder / "temporary").mkdir(parents=True)
    if feed is not None:
        feed.save(folder / "feed.pkl")
    plan = Plan(
        target=script.target if script.module else str(script.path),
        arguments=script.arguments,
        module=script.module,
        folder=str(script.folder),
        record=str(folder),
        ranks=ranks,
        steps=conditions.steps,
        epoch_batches=conditions.epoch_batches,
        memory=conditions.memory,
        float64=conditions.float64,
        no_gpu=conditions.no_gpu,
        feed=None if feed is None else str(folder / "feed.pkl"),
    )
    plan.save(folder / "plan.json")
    since = time.monotonic()
    port = _free_port()
    processes = list[subprocess.Popen[bytes]]()
    try:
        for rank in range(ranks):
            with (folder / f"rank{rank}.log").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "apportion.script_check.recording.main", str(folder / "plan.json")],
                        env=_environment(rank, ranks, port, folder / "temporary", conditions.threads),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        unfinished = _wait(processes, since + conditions.limit)
    finally:
        for process in processes:
            _kill(process)
    outputs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(ranks)]
    return Passed(read_records(folder), outputs, unfinished, time.monotonic() - since)


def _environment(rank: int, ranks: int, port: int, temporary: Path, threads: int) -> Mapping[str, str]:
    return {
        **os.environ,
        **_OFF,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(ranks),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": str(threads),
        "TMPDIR": str(temporary),
        "PYTHONUNBUFFERED": "1",
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> tuple[int, ...]:
    """Waits until all have ended, or some have and the others do not; returns the ranks of those that have not."""
    first_end: float | None = None
    while True:
        running = [rank for rank, process in enumerate(processes) if process.poll() is None]
        now = time.monotonic()
        if first_end is None and len(running) < len(processes):
            first_end = now
        late = first_end is not None and now > first_end + LEFT_SECONDS
        if not running or now > deadline or late:
            return tuple(running)
        try:
            processes[running[0]].wait(0.05)
        except subprocess.TimeoutExpired:
            continue


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a rank and the loader processes that it has left."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()


def _available_memory() -> int:
    """The bytes that processes can use without swapping; half of all where the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
