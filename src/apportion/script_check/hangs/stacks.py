"""Reads what ``faulthandler`` writes about a process: the Python stacks of its threads."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

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


def shown(stack: Stack, folder: str) -> list[str]:
    """Returns the lines that are printed of a stack: the innermost call, and the frames of the user's code."""
    inner = innermost_call(stack, folder)
    lines = [] if inner is None else [f"{inner.function} ({_short(inner.file)}:{inner.line})"]
    return [*lines, *(f"{place(frame, folder)} in {frame.function}" for frame in user_frames(stack, folder))]


def _short(file: str) -> str:
    return file.rpartition("site-packages" + os.sep)[2]


def waits_for_batch(frames: Sequence[StackFrame]) -> bool:
    """Returns whether a stack is that of a rank which waits for a batch from loader processes."""
    return any(frame.file.endswith(os.path.join("utils", "data", "dataloader.py")) for frame in frames)
