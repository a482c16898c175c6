"""The CIFAR-10 network, trained without end by workers that note what they do, on both sides of `faults.py`.

A line of three numbers a rank, in a file that NOTES names: the process id, the updates made, and when the last one was
(the monotonic clock, in nanoseconds). It is written by a schedule, which is called once an update.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from endless import endless

NOTES = "APPORTION_BENCHMARK_NOTES"
"""The environment variable with the file."""
RANKS = 2
PID, UPDATES, TIME = range(3)


def notes(path):
    """The lines, by rank."""
    return np.memmap(path, dtype=np.int64, mode="r+", shape=(RANKS, 3))


def create(path):
    """An empty file of them."""
    Path(path).write_bytes(bytes(RANKS * 3 * 8))
    return notes(path)


def noting(schedule):
    """The same schedule, in a process that has a rank."""

    def make(optimizer, steps):
        made = schedule(optimizer, steps)
        if "RANK" in os.environ:
            torch.set_flush_denormal(True)  # see parked.settle
            line = notes(os.environ[NOTES])[int(os.environ["RANK"])]
            line[PID] = os.getpid()
            made.__class__ = type("Noting", (type(made),), {"step": stepping(type(made), line)})
        return made

    return make


def stepping(kind, line):
    def step(self):
        kind.step(self)
        line[UPDATES] = self.last_epoch
        line[TIME] = time.monotonic_ns()

    return step


cifar10 = endless(f"{Path(__file__).resolve().parents[2] / 'examples' / 'cifar10.py'}:workload")
cifar10 = replace(cifar10, schedule=noting(cifar10.schedule))
