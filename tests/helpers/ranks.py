"""Functions of a test on real processes, one a rank, forked from the template that workers come from."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import cloudpickle
import torch

from apportion.comm.channel import Channel
from apportion.comm.world import World
from apportion.runtime.launch.local import Local
from apportion.runtime.supervisor.worker_pool import WorkerPool

SECONDS = 60.0


@contextmanager
def by_value(module: ModuleType) -> Iterator[None]:
    """What the module defines travels whole: a worker then need not import pytest."""
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """``function(world, *arguments)`` on so many ranks; what each returned, by rank."""
    from commands import free_port  # ranks need nothing of a command line

    with by_value(sys.modules[function.__module__]):
        given: Any = (function, arguments, free_port())
        pool = WorkerPool(Local(workers=ranks, threads=1, device="cpu"), "ranks:run", given, ranks)
    try:
        return [pickle.loads(base64.b64decode(a["data"])) for a in pool.answers("result", SECONDS)]
    finally:
        pool.close()


def apart(*, over: str = "NetworkGroup") -> World:
    """The world of a rank as if each were on a host of its own, whose group is of this class."""
    own = replace(World.from_env(device="cpu", insecure=True), local_rank=0, local_size=1)
    if over == "ProcessGroup":
        from apportion.comm.process_group import ProcessGroup

        group = ProcessGroup.connect(rank=own.rank, size=own.size, device=own.device, local_size=1)
        group.all_waits = own.all_waits
        own._groups["world"] = group
    assert own.size == 1 or type(own.group()).__name__ == over
    return own


def run(sock: socket.socket, payload: bytes) -> int:
    """A rank's side."""
    from apportion.runtime.worker.entry import report

    channel = Channel(sock)
    try:
        function, arguments, port = cloudpickle.loads(payload)
        torch.set_num_threads(1)
        # Workers of local() need no port: where a test has them meet as ranks of others do, rank 0 holds this one.
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        world = World.from_env(device="cpu", channel=channel)
        data = pickle.dumps(function(world, *arguments))
        channel.send({"kind": "result", "data": base64.b64encode(data).decode()})
        while channel.commands.get() is not None:  # until the driver has every rank's answer
            pass
    except BaseException as error:
        report(channel, error)
        return 1
    return 0
