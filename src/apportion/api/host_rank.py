"""The program of a rank that the agent of its host has started: it trains, or carries out another verb, as a rank under
torchrun does, and tells the driver what happens."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cloudpickle

from apportion.api.shipment import HostJob, HostVerb
from apportion.comm.channel import Channel
from apportion.core.json_data import cache_folder
from apportion.core.place_names import split_address
from apportion.errors import PeerLost
from apportion.process import PACKAGE


def main(sock: socket.socket, payload: bytes) -> int:
    """Does as one rank what the payload says, and returns the exit status of the process."""
    return _run(sock, lambda: cloudpickle.loads(payload))


def main_opened(sock: socket.socket, payload: bytes) -> int:
    """Trains as one rank with the job that the spare, which this process was forked from, has opened."""
    from apportion.runtime.worker import preloaded

    return _run(sock, lambda: preloaded.opened)


def stand_by(sock: socket.socket, payload: bytes) -> int:
    """Opens the job, and forks the ranks that are asked for."""
    from apportion.runtime.worker import preloaded

    return preloaded.stand_by(sock, lambda: _opened(cloudpickle.loads(payload)))


def _opened(job: HostJob) -> HostJob:
    """Returns the job with its workload opened."""
    from apportion.runtime.worker.preloaded import opened_job

    asked = replace(job.asked, workload=_here(job.asked.workload))
    workload = opened_job(replace(asked.job(job.strategy, job.launcher, 1), workers=job.ranks)).workload
    return replace(job, asked=replace(asked, workload=workload, changes={}))


def _run(sock: socket.socket, load: Callable[[], HostJob | HostVerb]) -> int:
    _print_to(sock)
    channel = Channel(sock)
    from apportion.runtime.worker.entry import report

    try:
        given = load()
        control = _prepare(channel)
        if isinstance(given, HostVerb):
            return _answer(channel, given)
        _train(channel, given, control)
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


def _prepare(channel: Channel) -> Any:
    """Sets this process up for computing, and returns how the driver stops what it does."""
    import torch

    from apportion.process import keep_what_is_freed
    from apportion.runtime.worker.coordination import RunControl

    # What a rank that is killed has not removed goes with the folder of the run; what was compiled stays for the next,
    # in the folder of caches of this user.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("torchinductor")))
    tempfile.tempdir = os.path.dirname(os.environ["APPORTION_SECRET_FILE"])
    warnings.showwarning = lambda message, category, file, *_: _warn(channel, str(message), file)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_what_is_freed()
    control = RunControl()
    threading.Thread(target=_obey, args=(channel, control), name="orders", daemon=True).start()
    return control


def _warn(channel: Channel, text: str, file: str) -> None:
    """Passes on a warning: to the driver, which has it recorded, or to standard error where it is not this
    package's."""
    if Path(file).is_relative_to(PACKAGE):
        with suppress(OSError):
            channel.send({"kind": "warned", "text": text})
            return
    print(f"warning: {text}", file=sys.stderr)


def _train(channel: Channel, job: HostJob, control: Any) -> None:
    import torch

    from apportion.api import running

    asked: running.RunRequest = replace(job.asked, workload=_here(job.asked.workload))
    on_cpu = job.launcher.device == "cpu" or not torch.cuda.is_available()  # GPUs meet over NCCL, once
    supervised = channel if job.replaceable and on_cpu else None
    for event in running.joined(asked, job.strategy, job.launcher, job.planning, control, channel=supervised):
        if event.kind != "end" or supervised is not None or os.environ["RANK"] == "0":  # else each rank gets one
            channel.send({"kind": "event", "event": asdict(event)})
        _acknowledge(channel, control)
    _acknowledge(channel, control)


def _acknowledge(channel: Channel, control: Any) -> None:
    """Reports which of the events that the driver has sent are in the record now."""
    if numbers := control.outside.recorded():
        channel.send({"kind": "noted", "numbers": numbers})


def _answer(channel: Channel, given: HostVerb) -> int:
    """Carries out a verb, whose value rank 0 tells, and returns the exit status of the process. An error that is one of
    this package's is sent whole, so that the driver can raise the same one."""
    from apportion.runtime.launched.outcome import failed, result
    from apportion.runtime.worker.entry import described

    try:
        verb = replace(given.verb, workload=_here(given.verb.workload))
        answer, rank = verb.answer_of_ranks(given.launcher)
    except BaseException as error:
        report = described(error)
        if report["traceback"] is None:
            report["error"] = failed(error)
            # Of a rank that is lost all others tell; the one that has ended is the cause.
            report["symptom"] = isinstance(error, PeerLost) or getattr(error, "traceback", "") is None
        channel.send(report)
        return 1
    if rank == 0:
        channel.send(result(answer))
    channel.send({"kind": "finished"})
    return 0


def _here(workload: Any) -> Any:
    """Returns the workload, or its address on this host."""
    if isinstance(workload, str) and split_address(workload).place.endswith(".py"):
        return os.path.join(sys.path[0], workload)
    return workload


def _obey(channel: Channel, control: Any) -> None:
    """Carries out the driver's orders, while the main thread trains."""
    while (order := channel.commands.get()) is not None:
        if order["kind"] == "stop":
            control.notice = order.get("notice", 0)
            control.stop = True
        elif order["kind"] == "note":
            control.outside.add_events(order["events"])
    os._exit(1)  # the agent is gone
