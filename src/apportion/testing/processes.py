"""Starts the ranks of a trial, waits for them, and ends them: on every way out, also by Ctrl-C, no process is left.

They are forked from the process that apportion's own workers are forked from. It has torch imported and lives as long
as the test session, so that every test has fresh ranks within a fraction of a second.

Where a rank makes no progress, its Python stacks, which ``faulthandler`` prints, show where it waits.
"""

from __future__ import annotations

import os
import pickle
import re
import selectors
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apportion.comm.channel import Lines
from apportion.core.installed import in_packages
from apportion.errors import WorkerFailed
from apportion.process import PACKAGE
from apportion.runtime.spawn.client import ForkedProcess, SpawnTask
from apportion.runtime.spawn.stacks import tell_to_print_stacks
from apportion.runtime.spawn.template import template
from apportion.testing.trial import RankPlace

TARGET = "apportion.testing.rank:run"
END_SECONDS = 10.0
LATE_SECONDS = 5.0
"""How long other ranks may go on without progress once one has ended, beside four times its own time."""
SYMPTOM_SECONDS = 2.0
"""How long the cause may take to arrive after a rank has raised that another one is gone."""
_LOOK_SECONDS = 0.25
_SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel")
_SYMPTOMS = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Socket closed")
"""What gloo raises where the process on the other side has ended."""


def prepare() -> None:
    """Start the process that ranks are forked from, if there is none, and have it import what they need; returns at
    once."""
    modules = [TARGET.partition(":")[0]]
    if any(name in sys.modules for name in _SHARDING):
        modules += [*_SHARDING, "torch._dynamo.utils"]  # which they import when they are first used, in each rank
    template().import_ahead(modules)


@dataclass
class _RunningRank:
    place: RankPlace
    lines: Lines
    process: ForkedProcess | None = None
    finished: bool = False
    died: bool = False
    calls: int = -1
    raised: Mapping[str, Any] | None = None
    heard: float = field(default_factory=time.monotonic)


def run_pass(places: Sequence[RankPlace], data: bytes, timeout: float) -> None:
    """Run the processes of a pass to their end. ``timeout``: the seconds for which they may make no progress.

    Raises WorkerFailed with a rank's own traceback where one raised, with its status where one died, and with the
    stacks of all where they do not go on; ValueError where a rank found that the arguments cannot be used.
    """
    prepare()
    template().wait_ready()
    ranks = list[_RunningRank]()
    selector = selectors.DefaultSelector()
    try:
        for place in places:
            ranks.append(_started(place, data))
            selector.register(ranks[-1].lines.socket, selectors.EVENT_READ, ranks[-1])
        _wait(ranks, selector, timeout)
    finally:
        selector.close()
        for rank in ranks:
            rank.lines.close()
        for rank in ranks:
            if rank.process is not None:
                rank.process.kill()
        for rank in ranks:
            if rank.process is not None:
                rank.process.wait(END_SECONDS)


def _started(place: RankPlace, data: bytes) -> _RunningRank:
    ours, theirs = socket.socketpair()
    rank = _RunningRank(place, Lines(ours))
    try:
        with theirs:
            task = SpawnTask(
                target=TARGET,
                payload=pickle.dumps((place, data)),
                environment=_environment(place),
                path=list(sys.path),
                directory=os.getcwd(),
            )
            rank.process = template().spawn(task, theirs)
    except BaseException:
        rank.lines.close()
        raise
    return rank


def _environment(place: RankPlace) -> dict[str, str]:
    """The variables that torchrun sets. The group is open when the user's code runs, so the port is not used."""
    rank, ranks = str(place.rank), str(place.ranks)
    return {
        **os.environ,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "PYTHONUNBUFFERED": "1",
        "TORCHDYNAMO_DISABLE": "1",  # what a compiled module computes is not in question, and compiling takes seconds
    }


def _wait(ranks: Sequence[_RunningRank], selector: selectors.BaseSelector, timeout: float) -> None:
    began = time.monotonic()
    while not all(rank.finished for rank in ranks):
        for key, _ in selector.select(_LOOK_SECONDS):
            rank: _RunningRank = key.data
            messages = rank.lines.receive()
            if messages is None:
                rank.died = True
                selector.unregister(rank.lines.socket)
            for message in messages or ():
                _note(rank, message)
        if (failure := _failure(ranks)) is not None:
            raise failure
        _refuse_waiting(ranks, began, timeout)


def _failure(ranks: Sequence[_RunningRank]) -> Exception | None:
    """Returns what ended a rank; None where all go on. That a connection was closed is a symptom: its cause, the end of
    another rank, may be a moment away."""
    for rank in ranks:
        if rank.died and rank.raised is None:
            return _died(rank)
    raised = [rank for rank in ranks if rank.raised is not None]
    causes = [rank for rank in raised if not _is_symptom(rank)]
    waited = raised and time.monotonic() - min(rank.heard for rank in raised) > SYMPTOM_SECONDS
    if causes or waited or (raised and len(raised) == len(ranks)):
        return _raised(min(causes or raised, key=lambda rank: rank.heard))
    return None


def _is_symptom(rank: _RunningRank) -> bool:
    return rank.raised is not None and any(each in rank.raised["summary"] for each in _SYMPTOMS)


def _note(rank: _RunningRank, message: Mapping[str, Any]) -> None:
    rank.heard = time.monotonic()
    if message["kind"] == "progress":
        rank.calls += 1
    elif message["kind"] == "finished":
        rank.finished = True
    elif message["kind"] == "raised":
        rank.raised = message


def _refuse_waiting(ranks: Sequence[_RunningRank], began: float, timeout: float) -> None:
    """Raises WorkerFailed where ranks wait for what does not come: none has made progress for the whole time, or one
    has ended long ago, after which the others have the same work to do."""
    now = time.monotonic()
    quiet = now - max(rank.heard for rank in ranks)
    ended = [rank.heard for rank in ranks if rank.finished]
    allowed = min([timeout, *(LATE_SECONDS + 4 * (end - began) for end in ended)])
    if quiet <= allowed:
        return
    pids = [rank.process.pid for rank in ranks if rank.process is not None]
    tell_to_print_stacks(pids)
    waiting = [rank for rank in ranks if not rank.finished]
    who = _name(waiting[0]) if len(waiting) == 1 else f"{len(waiting)} ranks"
    message = f"{who} made no progress for {quiet:.0f} s"
    if ended:
        done = next(rank for rank in ranks if rank.finished)
        message += f", after {_name(done)} had made all its steps"
    logs = {_name(rank): (_where(rank), "" if rank.finished else log_of(rank.place)) for rank in ranks}
    raise WorkerFailed(
        f"{message}:\n{where_ranks_wait(logs)}\nEvery rank has to call the same collectives in the same order. Where "
        "the ranks only compute, give a longer timeout=",
        rank=waiting[0].place.rank,
    )


def _where(rank: _RunningRank) -> str:
    if rank.finished:
        return "all steps made"
    return "before step 1" if rank.calls < 0 else f"in step {rank.calls + 1}"


def _died(rank: _RunningRank) -> WorkerFailed:
    status = rank.process.wait(END_SECONDS) if rank.process is not None else None
    how = f"by signal {-status}" if status is not None and status < 0 else f"with exit status {status}"
    printed = log_of(rank.place).strip()[-1500:]
    message = f"{_name(rank)} ended {how}, {_where(rank)}"
    if "gloo::EnforceNotMet" in printed:
        message += (
            ", in a collective that did not fit what another rank sent. Every rank has to call the same collectives in "
            "the same order, with tensors of the same sizes"
        )
    return WorkerFailed(message + (f". It printed:\n{printed}" if printed else ""), rank=rank.place.rank)


def _raised(rank: _RunningRank) -> Exception:
    assert rank.raised is not None
    report = rank.raised
    if report["mistake"]:
        return ValueError(report["summary"])
    what = f"{_name(rank)} raised {report['doing']}: {report['summary']}"
    if not rank.place.alone:
        return WorkerFailed(what, rank=rank.place.rank, traceback=report["traceback"], where=report["where"])
    failure = WorkerFailed(
        f"{what}; the reference is step in one process, with a process group of one rank: where it cannot run so, give "
        "reference=, a function like step that trains the network in one process",
        where=report["where"],
    )
    if report["traceback"] is not None:
        failure.add_note(f"the reference's own traceback:\n{report['traceback']}")
    return failure


def _name(rank: _RunningRank) -> str:
    return "the reference" if rank.place.alone else f"rank {rank.place.rank}"


def log_of(place: RankPlace) -> str:
    """Returns what a rank has printed so far."""
    try:
        return Path(place.folder, f"rank{place.rank}.log").read_text(errors="replace")
    except FileNotFoundError:
        return ""


_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x")
_SHOWN = 6
_OWN_MAIN = f"{PACKAGE}/testing/rank.py"


def where_ranks_wait(logs: Mapping[str, tuple[str, str]]) -> str:
    """Returns the stacks of ranks as text, the innermost frame first. ``logs``: for each rank by its name where it is,
    in words, and what it has printed."""
    return "\n".join(f"  {name}, {where}:\n{_indented(log)}".rstrip(":\n") for name, (where, log) in logs.items())


def before_stacks(log: str) -> str:
    """Returns what a rank had printed before its stacks."""
    lines = log.splitlines()
    first = next((n for n, line in enumerate(lines) if _THREAD.match(line)), len(lines))
    return "\n".join(lines[:first])


def _indented(log: str) -> str:
    frames = main_stack(log)
    return "\n".join(f"    {frame}" for frame in frames)


def main_stack(log: str) -> list[str]:
    """Returns the frames of the last stack of the main thread in a log, from the innermost to the outermost of the
    user's own, as ``file.py:12 in step``."""
    stacks = list[list[tuple[str, str, str]]]()
    for line in log.splitlines():
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and (found := _FRAME.match(line)):
            stacks[-1].append((found["file"], found["line"], found["name"]))
    mains = [stack for stack in stacks if any(file == _OWN_MAIN for file, _, _ in stack)]
    if not mains:
        return []
    outside = [frame for frame in mains[-1] if not frame[0].startswith((f"{PACKAGE}/", "<frozen"))]
    users = [place for place, frame in enumerate(outside) if not _installed(frame[0])]
    inner = outside[: users[0]][:_SHOWN] if users else outside[:_SHOWN]
    own = [outside[place] for place in users]
    return [f"{file}:{line} in {name}" for file, line, name in [*inner, *own]]


def _installed(file: str) -> bool:
    return in_packages(file) or "/lib/python3" in file
