"""Runs a script once, as N cold processes with torchrun's variables, and returns what its ranks have recorded."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from apportion.errors import ApportionError
from apportion.script_check.feed import Feed
from apportion.script_check.record import RankRecord, joined_runs, read_records
from apportion.script_check.recording.plan import PassPlan
from apportion.script_check.recording.recorder import UNWRITABLE
from apportion.script_check.sandbox.sandbox import Command, Sandbox
from apportion.script_check.sandbox.scope import scope_of
from apportion.script_check.script import ReferenceFunction, Script
from apportion.script_check.waiting import WaitOutcome, wait_for_ranks

_LOG = logging.getLogger(__name__)
"""Reports each pass as it begins."""
_OFF = {
    "WANDB_MODE": "disabled", "WANDB_DISABLED": "true", "COMET_MODE": "disabled", "MLFLOW_TRACKING_URI": "",
    "NEPTUNE_MODE": "offline", "CLEARML_OFFLINE_MODE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1",
}  # fmt: skip
"""Variables that keep loggers and hubs from calling out."""


@dataclass(frozen=True)
class PassResult:
    """One pass: what the ranks recorded, what they printed, how they were waited for, and how the user's files were
    protected, as a sentence. ``then``: where the script was run a second time, the arguments that it then had besides;
    ``outputs``, ``waited`` and ``seconds`` are those of that run."""

    records: Sequence[RankRecord]
    outputs: Sequence[str]
    waited: WaitOutcome
    seconds: float
    sandbox: str = ""
    then: tuple[str, ...] | None = None

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that did not end by themselves."""
        return self.waited.unfinished

    @property
    def failed(self) -> list[RankRecord]:
        """The ranks whose script raised or ended with a status other than 0, or that died."""
        return [
            record for record in self.records if record.outcome is None or record.outcome["how"] in ("raised", "exited")
        ]


@dataclass(frozen=True)
class Conditions:
    """How passes run. ``folder``: for records; ``limit``: seconds for one pass; ``threads``: of each rank;
    ``sandbox``: the only kind to use, see ``sandbox/sandbox.py``; the others as in ``recording/plan.py``."""

    folder: Path
    limit: float = 120.0
    threads: int = 1
    steps: int = 20
    epoch_batches: int = 8
    float64: bool = True
    no_gpu: bool = False
    gpus: int = 0
    join_gathers: bool = False
    split_rows: bool = False
    by_rank: tuple[str, ...] = ()
    reference: ReferenceFunction | None = None
    sandbox: str | None = None
    memory: int = field(default_factory=lambda: _available_memory())


def run_pass(name: str, script: Script, ranks: int, conditions: Conditions, feed: Feed | None = None) -> PassResult:
    """Run a script once and return what was recorded; ``name`` names the pass's folder.

    Raises ApportionError where the folder takes no records, as on a full disk.
    """
    folder = conditions.folder / name
    folder.mkdir(parents=True)
    try:
        return _run_in(folder, name, script, ranks, conditions, feed)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free >> 20
        raise ApportionError(
            f"the records of the check do not fit into {folder} ({error.strerror}), where {free} MiB are free: set "
            "TMPDIR to a folder of a file system with more room"
        ) from error


def _run_in(
    folder: Path, name: str, script: Script, ranks: int, conditions: Conditions, feed: Feed | None
) -> PassResult:
    if feed is not None:
        feed.save(folder / "feed.pkl")
    _LOG.info("%s (%s)", f"{ranks} ranks" if ranks > 1 else "one process", name)
    arguments = (*script.arguments, *(script.then or ()))
    named = [] if conditions.reference is None else [str(conditions.reference.file)]
    scope = scope_of(script.folder, [*arguments, *named], os.environ)
    with Sandbox(scope, folder, conditions.folder, conditions.sandbox) as sandbox:
        passed = _run_once(sandbox, folder, script, ranks, conditions)
        if script.then is None or passed.waited.how != "ended" or passed.failed:
            return passed
        again = folder / "again"
        again.mkdir()
        if feed is not None and feed.again is not None:
            feed.again.save(again / "feed.pkl")
        # In the same sandbox, where the second run finds what the first one has written.
        resumed = _run_once(sandbox, again, replace(script, arguments=arguments), ranks, conditions)
    if resumed.waited.how != "ended":
        return replace(resumed, then=script.then)
    return replace(resumed, records=joined_runs(passed.records, resumed.records), then=script.then)


def _run_once(sandbox: Sandbox, folder: Path, script: Script, ranks: int, conditions: Conditions) -> PassResult:
    """Runs a script in a sandbox with its ``arguments``. ``folder``: for what it records, and of the file of its feed,
    where there is one."""
    since = time.monotonic()
    _plan(script, ranks, conditions, folder, sandbox).save(folder / "plan.json")
    port = _free_port()
    processes = sandbox.start(
        [
            Command(
                [sys.executable, "-m", "apportion.script_check.recording.main", str(folder / "plan.json")],
                _environment(rank, ranks, port, conditions.threads),
                folder / f"rank{rank}.log",
            )
            for rank in range(ranks)
        ]
    )
    waited = wait_for_ranks(folder, ranks, [process.pid for process in processes], since + conditions.limit)
    found = read_records(folder)  # before the ranks end, as those that wait raise when another one ends
    unwritable = [rank for rank, process in enumerate(processes) if process.poll() == UNWRITABLE]
    missing = set(range(ranks)) - {record.rank for record in found}  # their process died before it could record
    records = sorted([*found, *map(RankRecord, missing)], key=lambda record: record.rank)
    if unwritable:
        raise OSError(errno.ENOSPC, f"rank {unwritable[0]} could not write its record")
    outputs = [_text(folder / f"rank{rank}.log") for rank in range(ranks)]
    return PassResult(records, outputs, waited, time.monotonic() - since, sandbox.sentence)


def _plan(script: Script, ranks: int, conditions: Conditions, folder: Path, sandbox: Sandbox) -> PassPlan:
    """The plan of a pass, with the paths at which the script sees its files."""
    reference = conditions.reference
    return PassPlan(
        target=script.target if script.module else sandbox.path(script.path),
        arguments=tuple(map(sandbox.argument, script.arguments)),
        module=script.module,
        folder=sandbox.path(script.folder),
        record=str(folder),
        ranks=ranks,
        steps=conditions.steps,
        epoch_batches=conditions.epoch_batches,
        memory=conditions.memory,
        float64=conditions.float64,
        no_gpu=conditions.no_gpu,
        gpus=conditions.gpus or ranks,
        join_gathers=conditions.join_gathers,
        split_rows=conditions.split_rows,
        by_rank=conditions.by_rank,
        reference="" if reference is None else f"{sandbox.path(reference.file)}:{reference.name}",
        feed=str(folder / "feed.pkl") if (folder / "feed.pkl").exists() else None,
    )


def _environment(rank: int, ranks: int, port: int, threads: int) -> Mapping[str, str]:
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
        "PYTHONUNBUFFERED": "1",
    }


def _text(path: Path) -> str:
    """What a rank has printed; empty where its process ended before it could open the file."""
    return path.read_text(errors="replace") if path.exists() else ""


def _available_memory() -> int:
    """The bytes that processes can use without swapping; half of all where the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Free at this moment alone: another program may take it before the ranks open it, which
        # ``run_until_port_is_free`` sees.
        return int(server.getsockname()[1])


ATTEMPTS = 3


def run_until_port_is_free(
    name: str, script: Script, ranks: int, conditions: Conditions, feed: Feed | None = None
) -> PassResult:
    """Run a pass as ``run_pass`` does, at most ``ATTEMPTS`` times."""
    passed = run_pass(name, script, ranks, conditions, feed)
    for attempt in range(2, ATTEMPTS + 1):
        if not port_was_taken(passed):
            break
        passed = run_pass(f"{name}-{attempt}", script, ranks, conditions, feed)
    return passed


def port_was_taken(passed: PassResult) -> bool:
    """Whether a rank failed as it could not listen on the port of its group."""
    return any(
        record.outcome is not None
        and record.outcome["how"] == "raised"
        and ("EADDRINUSE" in str(record.outcome["message"]) or "failed to listen" in str(record.outcome["message"]))
        for record in passed.records
    )
