"""A spare's own side: it opens a job, or imports packages, before they are needed, and forks workers that have them.

The spare is as single-threaded as the template, and shares nothing that moves: a workload that starts threads, or
keeps files open (all copies of an open file read at one place of it), cannot be stood by for.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from apportion.core.data.source import BatchSource
from apportion.core.rng import RngState, seed_everything
from apportion.core.workload import Workload
from apportion.parallel.replica.step import OneDeviceStep
from apportion.runtime.spawn.fork_server import ForkServer
from apportion.runtime.spawn.imports import Imports, repeat
from apportion.runtime.spawn.template import UNFIT
from apportion.runtime.worker.entry import run_loaded, train_job
from apportion.runtime.worker.job import Job

opened: Any = None
"""The job that is already open in the processes that are forked from this one."""


def train_opened(sock: socket.socket, payload: bytes) -> int:
    """Run the job that the spare, which this process was forked from, has opened, to its end."""
    job = opened
    assert job is not None
    return run_loaded(sock, lambda: job, train_job)


def serve(sock: socket.socket, payload: bytes) -> int:
    """Opens the job, and forks the workers that are asked for."""
    return stand_by(sock, lambda: opened_job(cloudpickle.loads(payload)))


def serve_imports(sock: socket.socket, payload: bytes) -> int:
    """Imports the packages of a workload, and forks processes that open the workload by themselves."""
    imports: Imports = cloudpickle.loads(payload)
    sets = {name: value for name, value in imports.environment.items() if value is not None}
    return stand_by(sock, lambda: repeat(imports) or None, sets=sets)


def stand_by(sock: socket.socket, open_job: Callable[[], Any], *, sets: Mapping[str, str] | None = None) -> int:
    """Opens a job, and forks the processes that are asked for, which find it in ``opened``. Returns the exit status of
    this process: UNFIT where ``open_job`` raises or returns None, or leaves threads or open files. ``sets``: the
    environment variables that the forked processes have besides those of their task."""
    global opened
    torch.set_num_threads(1)
    # Compared after the job is open: a copy of an open file or of a second thread is not safe to fork.
    files = _files()
    with _silent(), suppress(Exception):  # whatever it is, the workers have it too
        opened = open_job()
    _give_back()
    gc.freeze()  # a collection would write to every page that is shared with the template
    if opened is None or _threads() > 1 or _files() - files:
        return UNFIT
    ForkServer(sock, gives_to=os.getppid(), sets=sets).serve()
    return 0


def opened_job(job: Job) -> Job:
    """Returns the job with its data in memory, unless they are in parts, and everything imported that a first step
    imports."""
    workload = job.open()
    opened = workload
    if workload.parts is None:  # else a replacement opens its own parts, and no other
        data = BatchSource(workload).dataset
        opened = replace(workload, data=lambda: data)
    if workload.evaluation is not None:
        held = BatchSource.of_evaluation(workload).dataset
        opened = replace(opened, evaluation=replace(workload.evaluation, data=lambda: held))
    with suppress(Exception):  # then the first step loads it
        _warm(opened, -(-workload.update_size // job.workers))
    return replace(job, workload=replace(opened, model=_Built(workload)), changes={})


def _warm(workload: Workload, rows: int) -> None:
    """Makes one step of a model that is thrown away, on as many rows as a worker takes: kernels are made for a
    shape."""
    share = replace(workload, batch_size=rows, accumulate=1, compile=False, evaluation=None)
    if workload.parts is not None:
        share = replace(share, parts=None, data=lambda: workload.open_part(0))
    step = OneDeviceStep(share, torch.device("cpu"))
    batch = step.take()
    if batch is not None:
        step(batch)


def _give_back() -> None:
    """Gives memory that is free back to the system: a child would copy its pages where fresh ones are zeros (glibc)."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class _Built:
    """A workload's model, built before it is asked for: the first caller that asks in the same surroundings gets it."""

    def __init__(self, workload: Workload) -> None:
        self._make = workload.model
        seed_everything(workload.seed)
        self._before = _surroundings()
        self._model: nn.Module | None = self._make()
        self._after = RngState.now()

    def __call__(self) -> nn.Module:
        model, self._model = self._model, None
        if model is None or _surroundings() != self._before:
            return self._make()
        self._after.restore()
        return model


def _surroundings() -> object:
    """Returns what a model that is built may depend on, besides the workload."""
    return RngState.now().fingerprint(), torch.get_default_dtype(), torch.get_default_device()


@contextmanager
def _silent() -> Iterator[None]:
    """Silences what the workload prints while it is opened: its workers print it too."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        for descriptor, own in zip((1, 2), kept, strict=True):
            os.dup2(own, descriptor)
            os.close(own)
        os.close(nowhere)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _files() -> set[str]:
    """Returns the open descriptors, by number and what they are of."""
    found = set[str]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them is gone
            found.add(f"{entry.name} {os.readlink(entry)}")
    return found
