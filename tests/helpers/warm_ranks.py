"""Ranks that stay for the next proof: to start five processes for each of a thousand proofs took longer than to prove.

``kept`` stands in for ``WorkerPool`` in ``apportion.runtime.launched.ranks``. A pool is used again where the
environment and the folder are the same and nothing has failed in it; each proof has memory and a store of its own, and
a new ``World``.
"""

from __future__ import annotations

import base64
import os
import socket
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle
import psutil
import torch

from apportion.comm.channel import Channel, Message
from apportion.comm.world import World
from apportion.process import keep_what_is_freed
from apportion.runtime.launch.local import Local
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.runtime.worker.job import Job

SECONDS = 10.0
"""How long ranks may take to be done with a proof that has ended."""
MOST = 12
"""So many processes wait for another proof at most."""
idle: list[_Pool] = []


class _Pool(WorkerPool):
    """Worker processes that take one job after the other."""

    def __init__(self, launcher: Local, ranks: int, key: Hashable) -> None:
        self.key = key
        super().__init__(launcher, "warm_ranks:obey", None, ranks)  # type: ignore[arg-type]

    def begin(self, target: str, job: Job) -> None:
        """Gives the ranks a job, with memory and a store that no other job has seen."""
        self.history.clear()
        port = self.renew()
        data = base64.b64encode(cloudpickle.dumps(job)).decode()
        self.send({"kind": "job", "target": target, "port": port, "data": data})

    def lives(self) -> bool:
        """Tells whether all ranks are there: a test that fails, or kills what it finds, may have ended one at rest."""
        return all(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in self.pids())

    def rest(self) -> None:
        """Lets go of what the job had."""
        self.send({"kind": "close"})
        self.answers("idle", SECONDS)
        self.release()


class Kept:
    """A pool for as long as one proof has it; closed like a ``WorkerPool``."""

    def __init__(self, pool: _Pool) -> None:
        self._pool, self._fit = pool, True

    def send(self, order: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        self._pool.send(order, ranks)

    def answers(self, kind: str, seconds: float) -> list[Message]:
        try:
            return self._pool.answers(kind, seconds)
        except BaseException:
            self._fit = False
            raise

    def close(self) -> None:
        """Keeps the processes where they are at rest; ends them where anything has failed."""
        if self._fit:
            try:
                self._pool.rest()
            except Exception:
                self._fit = False
        if not self._fit:
            self._pool.close()
            return
        idle.append(self._pool)
        while sum(pool.ranks for pool in idle) > MOST:
            idle.pop(0).close()


def kept(launcher: Local, target: str, job: Job, ranks: int) -> Kept:
    """Returns a pool that has been used before and fits, or a new one."""
    key = surroundings(launcher, ranks)
    for dead in [pool for pool in idle if not pool.lives()]:
        idle.remove(dead)
        dead.close()
    pool = next((pool for pool in reversed(idle) if pool.key == key), None)
    if pool is None:
        pool = _Pool(launcher, ranks, key)
    else:
        idle.remove(pool)
    pool.begin(target, job)
    return Kept(pool)


def surroundings(launcher: Local, ranks: int) -> Hashable:
    """Returns what processes have from the one that asks for them: those with other surroundings compute elsewhere."""
    unlike = ("PYTEST_CURRENT_TEST",)
    environment = frozenset(pair for pair in os.environ.items() if pair[0] not in unlike)
    return ranks, launcher.threads_each(ranks), launcher.device, environment, os.getcwd(), tuple(sys.path)


def processes() -> set[int]:
    """The processes that are kept: no test has left them behind."""
    return {pid for pool in idle for pid in pool.pids()}


@contextmanager
def keeping() -> Iterator[None]:
    """Ends at the end what is kept."""
    try:
        yield
    finally:
        while idle:
            idle.pop().close()


def obey(sock: socket.socket, payload: bytes) -> int:
    """A rank's side: one job after the other, until one fails or the driver is gone."""
    from apportion.runtime.worker import entry, step_server

    programs = {"steps": step_server.serve_steps, "reference": step_server.serve_reference}
    channel = Channel(sock)
    keep_what_is_freed()
    try:
        while (order := channel.commands.get()) is not None:
            if order["kind"] != "job":  # meant for the one before
                continue
            os.environ["MASTER_PORT"] = str(order["port"])
            job = cloudpickle.loads(base64.b64decode(order["data"]))
            torch.set_num_threads(job.threads)
            world = World.from_env(device=job.device, channel=channel)
            programs[order["target"].partition(":")[2]](job, world, channel)
            channel._maps.clear()
            channel.send({"kind": "idle"})
    except BaseException as error:
        entry.report(channel, error)
        return 1
    return 0
