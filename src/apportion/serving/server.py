"""The server's program: it prepares the members, listens, answers until a signal, and ends in time."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import shutil
import signal
import socket
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from apportion.errors import ApportionError
from apportion.process import return_large
from apportion.serving.config import Serving
from apportion.serving.http.host_names import Hosts
from apportion.serving.http.listener import Listener
from apportion.serving.http.page import pages
from apportion.serving.http.routes import App
from apportion.serving.log import log
from apportion.serving.metrics import Metrics
from apportion.serving.model_preparation import prepared
from apportion.serving.pool.frames import Arena
from apportion.serving.replication.choose import Means, Staffed, replicated
from apportion.serving.replication.matching import matched
from apportion.serving.runtimes.source import Source

PREFIX = "apportion-serve-"
"""The prefix of the folder that holds what was exported; the process's number follows."""
LARGE_BYTES = 4 << 20
"""The size in bytes from which the memory of an answer is given back to the system, and not kept for the next one."""


def answer(members: Mapping[str, str], serving: Serving) -> int:
    """Serve until SIGTERM or Ctrl-C, and return the signal's number. ``members``: places by name. See
    ``apportion.serve``."""
    before = signal.signal(signal.SIGTERM, _end)  # until the loop has its own
    try:
        _sweep()
        with (
            _folder() as folder,
            _listening(serving) as sock,
        ):
            sources = [prepared(name, place, folder, serving, len(members)) for name, place in members.items()]
            sources = matched(sources, serving.rename)
            return asyncio.run(_serve(sources, serving, folder, sock))
    except _Terminated:
        return int(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _exception_text(what: dict[str, Any]) -> str:
    """Return what asyncio says of an exception that was not caught."""
    error = what.get("exception")
    where = "".join(traceback.format_exception(error)) if error is not None else ""
    return f"{what.get('message')}: {where}"[-2000:]


class _Terminated(SystemExit):
    """Raised by SIGTERM before there is an event loop that can be stopped: what exists already is removed on the
    way."""


def _end(number: int, frame: object) -> None:
    raise _Terminated


def _sweep() -> None:
    """Remove the folders of servers that were killed before they could remove them."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:  # another one's, or gone
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its server runs
            pass
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder for what is exported, and remove it at the end. It is locked as long as this server runs, so that
    others that tidy up leave it, those of the system as well."""
    name, descriptor = _locked()
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)
        os.close(descriptor)


def _locked() -> tuple[str, int]:
    while True:
        name = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
        try:
            descriptor = os.open(name, os.O_RDONLY)
        except FileNotFoundError:  # another server, which has just started, took it for one that was left behind
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.exists(name):
            return name, descriptor
        os.close(descriptor)


@contextlib.contextmanager
def _listening(serving: Serving) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in serving.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off, which keeps answers back for 40 ms, only where the protocol is said
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((serving.host, serving.port))
        except OSError as error:
            raise ApportionError(f"{serving.host}:{serving.port} cannot be listened at: {error.strerror}") from error
        yield sock


async def _serve(sources: Sequence[Source], serving: Serving, folder: Path, sock: socket.socket) -> int:
    metrics, inbox = Metrics(), Arena(serving.inbox_bytes)
    means = Means(folder, inbox, log, lambda member: metrics.of(metrics.missed, member).inc())
    staffed = await replicated(sources, serving, means)
    try:
        shown = pages(staffed, serving, inbox, metrics)
        hosts = Hosts(serving.host, sock.getsockname()[0], serving.names)
        version = metadata.version("apportion")
        app = App(staffed.ensemble, serving, inbox, metrics, version=version, pages=shown, hosts=hosts)
        return await _answer(app, staffed, sock)
    finally:
        await staffed.pool.close()
        inbox.close()
        log("closed")


async def _answer(app: App, staffed: Staffed, sock: socket.socket) -> int:
    """Answer requests until a signal; then answer those in flight, for ``drain_seconds`` at most. Returns the signal's
    number."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, int(number))
    loop.set_exception_handler(lambda _, what: log("defect", level="error", why=_exception_text(what)))
    return_large(LARGE_BYTES)
    gc.freeze()  # what is there now stays: to look through it again and again would hold up answers
    listener = Listener(app, sock)
    await listener.start()
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log(f"serving on http://{shown}:{port}", host=host, port=port, pid=os.getpid(), replication=staffed.replication)
    signalled = await signals.get()
    app.draining = True
    log("draining", busy=app.busy)
    await listener.close(app.serving.drain_seconds)
    return signalled
