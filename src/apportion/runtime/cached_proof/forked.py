"""A function called in a copy of this process, so that nothing of what it does stays in this one."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from apportion.process import die_with_parent


class ForkedCallError(Exception):
    """The copy raised, was killed, or did not answer in its time; says which."""


def in_fork(function: Callable[[], Any], seconds: float) -> Any:
    """Returns what the function returns, as JSON carries it, in a fork of this process that computes with one thread
    and whose output is discarded. Raises ForkedCallError where it raises, or takes more than ``seconds``."""
    # The answer comes through a pipe, and its end is read as the end of the copy: no wait for the child is needed to
    # see that it has died.
    reads, writes = os.pipe()
    offsets = _offsets()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other threads of a rank wait, and the copy has one
        child = os.fork()
    if child == 0:
        os.close(reads)
        _answer(function, writes, parent)
    # While this process holds the writing end open, the end of the child would not be seen.
    os.close(writes)
    try:
        answer = _read(reads, time.monotonic() + seconds)
        answered = json.loads(answer) if answer else {"raised": "it ended without an answer"}
    except TimeoutError:
        raise ForkedCallError(f"it takes more than {seconds:.3g} s") from None
    finally:
        os.close(reads)
        with suppress(ProcessLookupError):
            # The child is not waited for yet, so that its number cannot belong to another process.
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
        _restore(offsets)
    if "raised" in answered:
        raise ForkedCallError(answered["raised"])
    return answered["returned"]


def _answer(function: Callable[[], Any], writes: int, parent: int) -> None:
    """Calls the function in the copy, and ends the copy without anything that this process would do at its end."""
    try:
        # The handlers of this process belong to its run; the copy must end by a signal, and with its parent.
        die_with_parent(parent)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        gc.disable()  # what it would collect may belong to the other process
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        torch.set_num_threads(1)  # the threads of a pool are not copied
        answered: dict[str, Any] = {"returned": function()}
    except BaseException as error:  # whatever it is, it is reported to the other process
        answered = {"raised": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")}
    try:
        data = json.dumps(answered).encode()
        while data:
            data = data[os.write(writes, data) :]
    finally:
        # exit() would run the handlers of the parent at its end: flush its files a second time, remove its temporary
        # folders.
        os._exit(0)


def _read(descriptor: int, until: float) -> bytes:
    found = bytearray()
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return bytes(found)
        found += piece


def _offsets() -> dict[int, int]:
    """Returns where the open files are read next, which a copy shares with this process (Linux)."""
    found: dict[int, int] = {}
    with suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found[int(entry)] = os.lseek(int(entry), 0, os.SEEK_CUR)
    return found


def _restore(offsets: dict[int, int]) -> None:
    for descriptor, offset in offsets.items():
        with suppress(OSError):
            if os.lseek(descriptor, 0, os.SEEK_CUR) != offset:
                os.lseek(descriptor, offset, os.SEEK_SET)
