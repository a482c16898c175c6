"""The program of a worker process from its first line to its last: become a rank, do its job, report how it went."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import cloudpickle
import torch

from apportion.comm.channel import Channel, Message
from apportion.comm.world import World
from apportion.core.own_frames import formatted
from apportion.errors import ApportionError, CheckpointError, NotFinite, PeerLost, RanksDiffer, StateLost
from apportion.process import keep_what_is_freed
from apportion.runtime.cached_proof.read_recorder import ReadRecorder
from apportion.runtime.worker.coordination import RunControl
from apportion.runtime.worker.job import Job, WorkerJob
from apportion.runtime.worker.mistakes import frames_of, is_mistake, package_of
from apportion.runtime.worker.progress import NBYTES, Progress
from apportion.runtime.worker.step_server import serve_reference, serve_steps
from apportion.runtime.worker.survey import serve_survey
from apportion.runtime.worker.training.loop import work


def train(sock: socket.socket, payload: bytes) -> int:
    """Run a job to its end."""
    if os.environ.get("RANK") == "0":  # which makes the key of the run's proof
        ReadRecorder.started()
    return run_program(sock, payload, train_job)


def steps(sock: socket.socket, payload: bytes) -> int:
    """Make steps on command."""
    return run_program(sock, payload, serve_steps)


def reference(sock: socket.socket, payload: bytes) -> int:
    """Give the states that a strategy must compute."""
    return run_program(sock, payload, serve_reference)


def survey(sock: socket.socket, payload: bytes) -> int:
    """Look at a workload before it is proved."""
    return run_program(sock, payload, serve_survey)


def run_program(sock: socket.socket, payload: bytes, program: Callable[[Any, World, Channel], None]) -> int:
    """Become a rank and call ``program`` with the pickled job; returns the exit status of the process."""
    return run_loaded(sock, lambda: cloudpickle.loads(payload), program)


def run_loaded(
    sock: socket.socket, load: Callable[[], WorkerJob], program: Callable[[Any, World, Channel], None]
) -> int:
    """Becomes a rank and calls ``program`` with the job that ``load`` returns; returns the exit status of the
    process."""
    channel = Channel(sock)
    try:
        job = load()
        torch.set_num_threads(job.threads)
        keep_what_is_freed()
        world = World.from_env(device=job.device, channel=channel)
        if job.replaceable:
            world = world.join()
        program(job, world, channel)
        channel.send({"kind": "finished"})
    except BaseException as error:
        report(channel, error)
        return 1
    return 0


def train_job(job: Job, world: World, channel: Channel) -> None:
    """Train as one rank, under the supervisor's orders, and tell it every event."""
    control = RunControl()
    settled = queue.SimpleQueue[dict[str, Any]]()
    # Orders are carried out while the main thread is inside a collective that may never return.
    threading.Thread(target=_obey, args=(channel, control, settled), name="orders", daemon=True).start()
    supervise(control, world)
    control.settle = lambda asked: _settle(asked, world, channel, settled)
    for event in work(job, world, control):
        channel.send({"kind": "event", "event": asdict(event)})


def supervise(control: RunControl, world: World) -> None:
    """Lets a supervisor see how far this rank is, and this rank take its place in the worlds that come."""
    control.progress = progress(world)
    control.rejoined = lambda changed: _rejoined(changed, control)


def progress(world: World) -> Progress:
    """Returns this rank's line of the progress that the supervisor reads; its group notes there when it waits."""
    line = Progress.of_slot(world.shared("progress", NBYTES * world.slots), world.slot)
    world.group().waiting = line.waiting_word
    return line


def _rejoined(world: World, control: RunControl) -> None:
    world.group().waiting = control.progress.waiting_word
    assert world.members is not None
    control.stop = control.stop or world.members.ending


def _settle(
    asked: dict[str, Any], world: World, channel: Channel, settled: queue.SimpleQueue[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the supervisor's answer whether the run is proved; a run that the supervisor ends is waiting in this
    call."""
    if world.rank == 0:
        channel.send({"kind": "prove", **asked})
    return settled.get()


def _obey(channel: Channel, control: RunControl, settled: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Carries out the supervisor's orders, while the main thread trains."""
    while (order := channel.commands.get()) is not None:
        if order["kind"] == "stop":
            control.stop = True
        elif order["kind"] == "settled":
            settled.put(order["proof"])
        elif order["kind"] == "save":
            channel.send({"kind": "saved", **_save_now(control, order["seconds"])})
    # The main thread may wait in C code for ranks that are gone; nothing but the end of the process ends that.
    os._exit(1)  # the supervisor is gone


def _save_now(control: RunControl, seconds: float) -> dict[str, Any]:
    """Writes the last update without waiting for the step under way; returns its number, or None and why not. A
    replacement has ``seconds`` until it has a state."""
    if not control.begun.wait(seconds):
        return {"step": None, "why": "its worker had not begun"}
    try:
        return {"step": control.save_now(), "why": None}
    except Exception as error:  # whatever it is, the supervisor is waiting for an answer
        return {"step": None, "why": _summary(error)}


def report(channel: Channel, error: BaseException) -> None:
    """Tells the supervisor what a rank has raised; where it is gone, standard error."""
    try:
        channel.send(described(error))
    except OSError:
        traceback.print_exception(error)
        sys.stderr.flush()


def described(error: BaseException) -> Message:
    """Returns the message that tells a supervisor what a rank has raised."""
    own = isinstance(error, ApportionError) or is_mistake(error)
    return {
        "kind": "raised",
        "summary": _summary(error),
        "traceback": None if own else formatted(error),
        "mistake": is_mistake(error),
        "symptom": isinstance(error, PeerLost),
        "state_lost": isinstance(error, StateLost),
        "where": None if own else _where(error),
        "checkpoint": isinstance(error, CheckpointError),
        "not_finite": isinstance(error, NotFinite),
        "differs": isinstance(error, RanksDiffer),
    }


def _summary(error: BaseException) -> str:
    text = str(error).strip()
    if isinstance(error, ApportionError) or is_mistake(error):
        return text
    kind, first = type(error).__name__, text.partition("\n")[0]  # the rest is in the traceback
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text.lower():
        cure = "no memory is left: use fewer workers, a smaller batch_size, or data_parallel(microbatches=2)"
        return f"{kind}: {first} ({cure})" if first else f"{kind}: {cure}"
    if isinstance(error, SystemExit):
        return f"SystemExit: the model, the data or the loss left Python with status {error.code!r}"
    return f"{kind}: {first}" if first else kind


def _where(error: BaseException) -> str | None:
    """Returns the innermost line of the user's own code; None where there is none."""
    if isinstance(error, SyntaxError):  # the line that did not even run
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    own = [f for f in frames_of(error) if package_of(f) is None]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}".rstrip(": ")
    return _where(error.__cause__) if error.__cause__ is not None else None
