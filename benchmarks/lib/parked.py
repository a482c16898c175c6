"""Processes that wait, blocked on a pipe, until they are told to run: two sides share the cores and never disturb
each other."""

import os
import select
import socket
import subprocess
import sys
import tempfile
import time

import torch

DEADLINE = 180
"""Seconds that a side may take to answer."""


class SideFailed(Exception):
    """A side did not start, died, or did not answer in time."""


KEPT = {
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_MMAP_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""With these in its environment a process keeps the memory that it frees, as apportion's workers do."""


def environment(*, rank=0, ranks=1, port=0):
    """One thread a process, and torchrun's variables."""
    pinned = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return os.environ | pinned | {name: str(number) for name, number in place.items()}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Side:
    """One side of a comparison: a process a rank, parked until `go`. `hosts`: a rank on each of them (hosts.py)."""

    def __init__(self, command, *, ranks, python=sys.executable, more=None, hosts=None):
        port = free_port() if hosts is None else hosts.port()
        command = [python, *command]
        self._errors = [tempfile.TemporaryFile() for _ in range(ranks)]  # noqa: SIM115 (closed by __exit__)
        self._processes = [
            subprocess.Popen(
                command if hosts is None else hosts.command(rank, command),
                env=environment(rank=rank, ranks=ranks, port=port)
                | ({} if hosts is None else hosts.environment(rank, ranks, port))
                | (more or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors[rank],
                bufsize=0,
            )
            for rank in range(ranks)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        for file in self._errors:
            file.close()

    def wait_until_ready(self):
        self._answers()

    def go(self, steps):
        """Seconds for so many steps, by the slowest rank."""
        return max(self.each(steps))

    def each(self, steps):
        """Of so many steps what every rank answers."""
        return [float(answer) for answer in self.ask(steps)]

    def ask(self, line):
        """What every rank answers to a line."""
        for rank, process in enumerate(self._processes):
            try:
                process.stdin.write(f"{line}\n".encode())
            except BrokenPipeError:
                raise self._failed(rank, "died") from None
        return self._answers()

    def _answers(self):
        end = time.monotonic() + DEADLINE
        return [self._answer(rank, end - time.monotonic()) for rank in range(len(self._processes))]

    def _answer(self, rank, seconds):
        pipe = self._processes[rank].stdout
        if not select.select([pipe], [], [], max(0.0, seconds))[0]:
            raise self._failed(rank, f"did not answer in {DEADLINE} s")
        line = pipe.readline()
        if not line:
            raise self._failed(rank, "died")
        return line.decode().strip()

    def _failed(self, rank, what):
        self._errors[rank].seek(0)
        said = self._errors[rank].read().decode(errors="replace").strip().splitlines()
        return SideFailed(f"rank {rank} {what}: {said[-1] if said else 'it said nothing'}")


def settle():
    """Of a parked process, first of all: what would make two runs of the same code differ in speed.

    A side trains far longer than its schedule was made for: moments that die out would become denormal numbers, which
    are slow, and more of them on one side than on the other.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def serve(run):
    """Of a parked process: say ready, then run as many steps as each line of standard input says, and answer with
    the seconds that they took, or with what `run` gives."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is no answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        found = run(int(line))
        print(time.perf_counter() - start if found is None else found, file=answers, flush=True)
