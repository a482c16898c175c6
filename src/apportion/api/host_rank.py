"""The program of a rank that the agent of its host has started: it trains as a rank under torchrun does, and tells the
driver what happens."""

from __future__ import annotations

import os
import socket
import sys
import threading
import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

import cloudpickle

from apportion.comm.channel import Channel
from apportion.core.strategy import Strategy
from apportion.runtime.agents.hosts_launcher import HostsLauncher


@dataclass(frozen=True, kw_only=True)
class HostJob:
    """What every rank of a run on several hosts is given."""

    asked: Any
    """The ``RunRequest``; where its workload is an address, it is one below the folder of the run's code."""
    strategy: Strategy | None
    """The strategy; None: the ranks choose one."""
    launcher: HostsLauncher
    planning: Any
    """The ``Planning`` by which they do."""


def main(sock: socket.socket, payload: bytes) -> int:
    """Trains as one rank, and returns the exit status of the process."""
    _print_to(sock)
    channel = Channel(sock)
    from apportion.runtime.worker.entry import report

    try:
        _train(channel, cloudpickle.loads(payload))
        channel.send({"kind": "finished"})
    except BaseException as error:
        report(channel, error)
        return 1
    return 0


def _print_to(sock: socket.socket) -> None:
    """Has this process print where the agent reads."""
    _, (output,), _, _ = socket.recv_fds(sock, 1, 1)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)


def _train(channel: Channel, job: HostJob) -> None:
    import torch

    from apportion.api import running
    from apportion.process import keep_what_is_freed
    from apportion.runtime.worker.coordination import RunControl

    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_what_is_freed()
    control = RunControl()
    threading.Thread(target=_obey, args=(channel, control), name="orders", daemon=True).start()
    asked: running.RunRequest = job.asked
    if isinstance(asked.workload, str) and asked.workload.rpartition(":")[0].endswith(".py"):
        asked = replace(asked, workload=os.path.join(sys.path[0], asked.workload))
    for event in running.joined(asked, job.strategy, job.launcher, job.planning, control):
        if event.kind != "end" or os.environ["RANK"] == "0":
            channel.send({"kind": "event", "event": asdict(event)})


def _obey(channel: Channel, control: Any) -> None:
    """Carries out the driver's orders, while the main thread trains."""
    while (order := channel.commands.get()) is not None:
        if order["kind"] == "stop":
            control.stop = True
    os._exit(1)  # the agent is gone
