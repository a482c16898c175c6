"""What each rank of a pass was doing when it was stopped: waiting in a collective, ended, raised, or something else.
The collectives of each rank in order, group by group, show what it is inside of, and the Python stacks of its threads
are those that ``faulthandler`` has written."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from apportion.script_check.record import Event, RankRecord

KINDS = ("collective", "recorder_collective")
Sequences = Mapping[str, Mapping[int, Sequence[Event]]]
"""The calls of each rank in each group, in order, by group and rank."""


@dataclass(frozen=True)
class Waiting:
    """The call that a rank is inside of, or waits for. ``call``: its event ``collective``; None for a work handle that
    no recorded function has returned. ``site``, ``line``: where the rank waits, and ``time``: since when."""

    call: Event | None
    site: str
    line: str
    time: float


def sequences(records: Sequence[RankRecord]) -> Sequences:
    """Returns the calls in each group, by rank; also for a rank of the group that has made none."""
    found = defaultdict[str, dict[int, list[Event]]](dict)
    for record in records:
        for event in record.events_of(*KINDS):
            if event["sequence"] is not None:
                for rank in event["ranks"]:
                    found[event["group"]].setdefault(rank, [])
                found[event["group"]][record.rank].append(event)
    return found


def begun_call(record: RankRecord) -> Waiting | None:
    """Returns what a rank is inside of: the last call, or wait for one, that has begun and not ended; None where the
    rank is in code of its own, or has ended."""
    if record.outcome is not None:
        return None
    calls = {event["call"]: event for event in record.events_of(*KINDS)}
    ended = {event["call"] for event in record.events_of("collective_end")}
    open_waits = list[Event]()
    for event in record.events_of("wait", "wait_end"):
        if event["kind"] == "wait":
            open_waits.append(event)
        elif open_waits:
            open_waits.pop()
    if open_waits and open_waits[-1]["call"] not in ended:
        wait = open_waits[-1]
        return Waiting(calls.get(wait["call"]), wait["site"], wait["line"], wait["time"])
    inside = [event for number, event in calls.items() if number not in ended and not event["pending"]]
    if not inside:
        return None
    last = inside[-1]
    return Waiting(last, last["site"], last["line"], last["time"])


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class StackFrame:
    """One frame of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Stack:
    """The stack of one thread, the innermost frame first."""

    thread: int
    frames: tuple[StackFrame, ...]


def stacks(text: str) -> list[Stack]:
    """Returns the stacks in the text of a dump, as they stand there."""
    found = list[tuple[int, list[StackFrame]]]()
    for line in text.splitlines():
        if match := _THREAD.match(line):
            found.append((int(match[1], 16), []))
        elif (match := _FRAME.match(line)) and found:
            found[-1][1].append(StackFrame(match[1], int(match[2]), match[3]))
    return [Stack(thread, tuple(frames)) for thread, frames in found]


def is_user_file(file: str, folder: str) -> bool:
    """Returns whether a file is the user's: in the folder of the script and not of an installed package."""
    return file.startswith(folder.rstrip(os.sep) + os.sep) and "site-packages" not in file


def place(frame: StackFrame, folder: str) -> str:
    """Returns file and line of a frame, as ``train.py:31``; the file as it is outside of the script's folder."""
    file = os.path.relpath(frame.file, folder) if is_user_file(frame.file, folder) else frame.file
    return f"{file}:{frame.line}"


def user_frames(stack: Stack, folder: str) -> list[StackFrame]:
    """Returns the frames of the user's code, the innermost first."""
    return [frame for frame in stack.frames if is_user_file(frame.file, folder)]


def innermost_call(stack: Stack, folder: str) -> StackFrame | None:
    """Returns the frame of torch, or of another installed package, that the thread is in; None where it is in the
    user's code, or in the standard library called from there."""
    for frame in stack.frames:
        if is_user_file(frame.file, folder):
            return None
        if "site-packages" in frame.file:
            return frame
    return None


def stack_lines(stack: Stack, folder: str) -> list[str]:
    """Returns the lines that are printed of a stack: the innermost call, and the frames of the user's code."""
    inner = innermost_call(stack, folder)
    lines = [] if inner is None else [f"{inner.function} ({_short(inner.file)}:{inner.line})"]
    return [*lines, *(f"{place(frame, folder)} in {frame.function}" for frame in user_frames(stack, folder))]


def _short(file: str) -> str:
    return file.rpartition("site-packages" + os.sep)[2]


def waits_for_batch(frames: Sequence[StackFrame]) -> bool:
    """Returns whether a stack is that of a rank which waits for a batch from loader processes."""
    return any(frame.file.endswith(os.path.join("utils", "data", "dataloader.py")) for frame in frames)


How = Literal["waits", "raised", "ended", "died", "loading", "elsewhere"]
_OF_THE_OTHERS = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|[Tt]imed out|[Tt]imeout|gloo/transport|gloo/rendezvous|recvValue|"
    r"recvBytes|sendBytes|monitoredBarrier|Socket|failed to recv|wait timeout|op\.preamble|NCCL|unhandled system error"
)
"""Messages of collectives that fail because of what another rank does, or does not."""


@dataclass(frozen=True)
class RankState:
    """What a rank was doing.

    ``how``: it "waits" in a collective (also one that it has left by an error about its peers), "raised" an exception
    of its own, "ended", "died" without an exception, was "loading" a batch, or "elsewhere". ``waiting``: the call that
    it waits in. ``outcome``: its event ``end``. ``site``: of the script. ``stacks``: of its threads, its main thread
    first.
    """

    rank: int
    how: How
    waiting: Waiting | None = None
    outcome: Event | None = None
    site: str = ""
    stacks: tuple[Stack, ...] = ()
    last: Event | None = None
    steps: int = 0

    @property
    def call(self) -> Event | None:
        """The event of the call that it waits in; None where it does not wait, or the call is not known."""
        return None if self.waiting is None else self.waiting.call


def states(
    records: Sequence[RankRecord], dumps: Mapping[int, str], died: Sequence[int], folder: str
) -> list[RankState]:
    """Returns the state of each rank. ``dumps``: what ``faulthandler`` has written, by rank; ``folder``: of the
    script."""
    return [_state(record, dumps.get(record.rank, ""), record.rank in died, folder) for record in records]


def _state(record: RankRecord, dump: str, died: bool, folder: str) -> RankState:
    calls = record.events_of(*KINDS)
    last, steps = (calls[-1] if calls else None), len(record.steps)
    outcome = record.outcome
    if outcome is not None:
        how: How = "raised" if outcome["how"] == "raised" else "ended"
        # A rank that raised since another one went away did wait, and is not the cause.
        failed = _failed_call(record) if how == "raised" else None
        if failed is not None:
            waiting = Waiting(failed, failed["site"], failed["line"], failed["time"])
            return RankState(record.rank, "waits", waiting, outcome, failed["site"], (), last, steps)
        return RankState(record.rank, how, None, outcome, outcome.get("site", ""), (), last, steps)
    waiting_in = begun_call(record)
    if died:
        return RankState(record.rank, "died", waiting_in, None, waiting_in.site if waiting_in else "", (), last, steps)
    threads = _main_first(stacks(dump), record)
    if waiting_in is not None:
        return RankState(record.rank, "waits", waiting_in, None, waiting_in.site, threads, last, steps)
    frames = threads[0].frames if threads else ()
    users = user_frames(threads[0], folder) if threads else []
    site = place(users[0], folder) if users else ""
    return RankState(
        record.rank, "loading" if waits_for_batch(frames) else "elsewhere", None, None, site, threads, last, steps
    )


def _failed_call(record: RankRecord) -> Event | None:
    """The call by whose error about other ranks a rank has ended."""
    outcome = record.outcome
    ends = record.events_of("collective_end")
    if outcome is None or not ends or "error" not in ends[-1] or not _OF_THE_OTHERS.search(outcome["message"]):
        return None
    if not ends[-1]["error"].endswith(outcome["message"]):
        return None
    return next(event for event in record.events_of(*KINDS) if event["call"] == ends[-1]["call"])


def _main_first(found: Sequence[Stack], record: RankRecord) -> tuple[Stack, ...]:
    start = record.events_of("start")
    main = start[0].get("thread") if start else None
    return tuple(sorted(found, key=lambda stack: stack.thread != main))
