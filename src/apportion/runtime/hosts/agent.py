"""The agent of a host: it does there what the driver's supervisor does on its own machine.

::

    driver   ssh HOST (or srun, or an actor of Ray's) python -m apportion.runtime.hosts.agent FOLDER
    agent    here: cores, address, versions                                            ->
             <-  prepare; of the first host: where the others are
    agent    (the first) place: the address and the port where the ranks meet          ->
             <-  (to the others) reach: that place
    agent    reached: whether it does                                                  ->
             <-  start, then the secret, the code and the job as bytes
    agent    started; event, output, raised, finished, exited of each rank; progress    ->
             <-  stop, save; open, kill, table (protocol/leader.py); fetch, more; the end of the stream
    agent    reserved, answered; notice                                                 ->
    both     alive, now and then

The agent kills its ranks and ends when its standard input ends, whatever the reason. Its folder holds the secret and
the code of the run, and is the run's alone; the shell that has started the agent removes it, also where the agent was
killed. Where all ranks have ended and nothing is heard of the driver any more, the agent ends by itself: a connection
that was cut may never say so.

An agent that gets SIGTERM (in a job of Slurm's also SIGUSR1) while it has ranks tells the driver, which saves the run
and ends it, and every agent with it. Where that does not come within NOTICE_SECONDS the agent ends by itself, and so it
does at a second signal.
"""

from __future__ import annotations

import fcntl
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from apportion.comm.membership import HostShare
from apportion.comm.network.address import is_loopback, route_to
from apportion.core.event import Event
from apportion.errors import ApportionError
from apportion.runtime.checkpoint.durable_files import append_events
from apportion.runtime.hosts.code_bundle import unpack
from apportion.runtime.hosts.frames import ALIVE_SECONDS, FrameError, FrameReader, FrameWriter, Message
from apportion.runtime.hosts.host_facts import describe_host, own_address
from apportion.runtime.hosts.host_ranks import HostRanks, RanksStart
from apportion.runtime.hosts.run_copy import send_run
from apportion.runtime.notice import SAME_SECONDS, notice_signals
from apportion.runtime.spawn.template import close_template, template

REACH_SECONDS = 5.0
"""The seconds in which a host has to reach the port where the ranks meet."""
SILENT_SECONDS = 30.0
"""The seconds after the end of the last rank in which the driver has to say something, be it that it is there."""
NOTICE_SECONDS = 8.0
"""The seconds from the notice to end in which the driver has to end this agent: it saves within 5 s."""
PATTERN = "apportion-hosts-*"
"""How the folders of runs are called (``agents/agent_command.py`` makes them)."""
LOCK = "lock"
NEW_SECONDS = 600.0
"""The seconds within which a folder may not have its lock yet."""


@final
class Agent:
    """The agent's part of one run. ``folder``: the run's own folder on this host."""

    def __init__(self, folder: Path, reader: FrameReader, writer: FrameWriter) -> None:
        self._folder, self._reader, self._writer = folder, reader, writer
        self._held: socket.socket | None = None
        """The socket that keeps the port until rank 0 has it."""
        self._address = ""
        """The address by which the other hosts reach this one."""
        self._ranks: HostRanks | None = None
        self._early: list[Message] = []
        """The orders about ranks that came before these had been started, since others were lost by then."""
        self._lock = threading.Lock()
        self._directory = _directory(None)
        self._orders = 0
        self._notices: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._noticed: float | None = None

    def on_notice(self, number: int, frame: Any) -> None:
        """Takes the notice to end: the handler of its signals."""
        now = time.monotonic()
        if self._ranks is None or (self._noticed is not None and now - self._noticed > SAME_SECONDS):
            _exit_by_signal(number, frame)
        elif self._noticed is None:
            self._noticed = now
            # The handler itself sends nothing: the interrupted code may hold the lock of the writer. The `put` of a
            # SimpleQueue is reentrant, so that it may be called here.
            self._notices.put(number)  # this thread may be writing just now

    def serve(self) -> None:
        """Obeys the driver until it is gone. Raises OSError, FrameError or ApportionError for what cannot be done."""
        self._writer.greet()
        self._send({"kind": "here", **describe_host()})
        for call in (self._say_alive, self._pass_on_notice):
            threading.Thread(target=call, daemon=True).start()
        while (order := self._reader.receive()) is not None:
            if isinstance(order, bytes):
                raise FrameError("bytes came where an order is expected")
            self._orders += 1
            self._obey(order)

    def close(self) -> None:
        """Ends the ranks, and the process that they were forked from. One that still imports torch dies with this
        process."""
        if self._ranks is not None:
            self._ranks.close()
            close_template()

    def _obey(self, order: Message) -> None:
        kind = order["kind"]
        if kind == "prepare":
            template()  # it imports torch while the driver and this process go on
            self._address = own_address(os.environ)
            with suppress(ApportionError):  # it does not reach the others, which is found out next
                self._address = meeting_address(order["others"], self._address)
            if order["first"]:
                self._send({"kind": "place", **self._reserve_place()})
        elif kind == "reach":
            self._send({"kind": "reached", "why": why_unreachable(order["address"], order["port"])})
        elif kind == "start":
            given = [
                self._receive_bytes() for _ in range(3)
            ]  # and on to the end of the stream, which may come meanwhile
            # In a thread: starting ranks takes seconds, in which the end of the orders must still end this process. The
            # bytes are read here, before it, since no other thread may read from the stream.
            threading.Thread(target=self._start_or_refuse, args=(order, given), daemon=True).start()
        elif kind == "fetch":
            send_run(self._directory / order["run_dir"], order["known"], self._writer, self._reader, only=order["only"])
        elif kind == "record":
            self._send({"kind": "recorded", "why": self._record(order)})
        elif kind in ("stop", "save", "open", "kill", "table", "stacks", "note"):
            with self._lock:
                if self._ranks is None:
                    self._early.append(order)
                    return
            self._ranks.obey(order)

    def _record(self, order: Message) -> str | None:
        """Appends events to the record of the run, once no rank of this host does. Returns why it could not."""
        try:
            append_events(self._directory / order["run_dir"], [Event(**event) for event in order["events"]])
        except OSError as error:
            return str(error)
        return None

    def _say_alive(self) -> None:
        waits = threading.Event()  # never set
        while not waits.wait(ALIVE_SECONDS):
            self._send({"kind": "alive"})

    def _pass_on_notice(self) -> None:
        """Tells the driver of the notice to end, and ends this process where it does nothing about it."""
        number = self._notices.get()
        self._send({"kind": "notice", "signal": number, "name": signal.Signals(number).name})
        threading.Event().wait(NOTICE_SECONDS)
        os.kill(os.getpid(), number)  # the second one

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._writer.send(message)
        except OSError:
            pass  # the driver is gone: the end of the orders says so
        except ValueError as error:
            sys.stderr.write(f"not sent, a message of kind {message['kind']}: {error}\n")

    def _receive_bytes(self) -> bytes:
        got = self._reader.receive()
        if not isinstance(got, bytes):
            raise FrameError("the driver ended before it had said everything")
        return got

    def _reserve_place(self) -> dict[str, Any]:
        """Returns where the ranks meet: a free port of the address by which the others reach this host."""
        family = socket.getaddrinfo(self._address, 0, type=socket.SOCK_STREAM)[0][0]
        self._held = socket.socket(family, socket.SOCK_STREAM)
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((self._address, 0))
        self._held.listen()  # until the others have tried whether they reach it
        return {"address": self._address, "port": self._held.getsockname()[1]}

    def _start_or_refuse(self, order: Message, given: Sequence[bytes]) -> None:
        try:
            self._start(order, given)
        except (OSError, ApportionError, ValueError) as error:
            self._send({"kind": "refused", "why": str(error)})

    def _start(self, order: Message, given: Sequence[bytes]) -> None:
        secret, code, payload = given
        secret_file = self._folder / "secret"
        try:
            with open(os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secret)
            unpack(code, self._folder / "code")
        except OSError as error:
            raise ApportionError(
                f"the code of the run cannot be written to {self._folder} ({error.strerror}): make room there, or set "
                "TMPDIR to another folder in the environment that agents are started in"
            ) from error
        self._directory = _directory(order["directory"])
        start = RanksStart(
            share=HostShare(order["first"], order["size"], order["address"], order["port"]),
            count=order["count"],
            own_address=self._address,
            replaceable=order["replaceable"],
            several=order["several"],
            joins=order["joins"],
            threads=order["threads"],
            run=order["run"],
            secret_file=str(secret_file),
            environment=order["environment"],
            path=[*(str((self._folder / "code" / part).resolve()) for part in order["path"]), *sys.path],
            directory=str(self._directory),
        )
        # The port is given up only once a rank can be forked at once: until rank 0 has bound it, another process could.
        template().wait_ready()
        if self._held is not None:
            self._held.close()
        ranks = HostRanks(start, payload, self._send)
        self._send({"kind": "started", "directory": str(self._directory)})
        with self._lock:
            self._ranks = ranks
            # Under the lock that `_obey` takes to look whether there are ranks: no order can overtake those that came
            # early.
            for early in self._early:
                ranks.obey(early)
        threading.Thread(target=self._end_when_left, args=(ranks,), daemon=True).start()

    def _end_when_left(self, ranks: HostRanks) -> None:
        """Ends this process where its ranks have ended, and the driver says nothing for too long after that."""
        ranks.all_ended.wait()
        waits = threading.Event()  # never set
        while True:
            before = self._orders
            waits.wait(SILENT_SECONDS)
            if self._orders == before:
                os._exit(1)


def meeting_address(others: Sequence[str], own: str) -> str:
    """Returns the address of this host by which the others reach it. ``others``: where the driver has reached them;
    ``own``: where it has reached this one. An address of the loopback is one of the driver's own host."""
    away = [address for address in others if not is_loopback(address)]
    return route_to(away[0]) if away else own


def why_unreachable(address: str, port: int) -> str | None:
    """Returns why this host cannot connect to a port of the first one; None where it can."""
    try:
        socket.create_connection((address, port), REACH_SECONDS).close()
    except OSError as error:
        return str(error)
    return None


def _directory(name: str | None) -> Path:
    """Returns the folder that ranks work in: the driver's where there is one of that name here, else the user's, or
    this process's where the user has no home."""
    if name is not None and os.path.isdir(name):
        return Path(name)
    try:
        return Path.home()
    except RuntimeError:
        return Path.cwd()


# The folder of a run on one host holds its secret and its code. The shell that has started the agent removes it at the
# end. Where that was killed too, the next agent does: a folder is one that no run needs any longer where its lock is
# free and it is not new.


def lock_folder(folder: Path) -> int:
    """Locks the folder of this run for as long as this process lives. Returns the descriptor of the lock."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_leftovers(folder: Path) -> None:
    """Removes what earlier runs of this user have left beside the folder of this one."""
    for other in folder.parent.glob(PATTERN):
        with suppress(OSError):  # another agent removes it
            about = other.lstat()
            if other == folder or about.st_uid != os.geteuid() or time.time() - about.st_mtime < NEW_SECONDS:
                continue
            if _is_left(other / LOCK):
                shutil.rmtree(other)


def _is_left(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # its agent never began
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def main() -> None:
    """Runs an agent: ``python -m apportion.runtime.hosts.agent FOLDER``."""
    notices = [number for number in notice_signals(os.environ) if number != signal.SIGHUP]  # its driver is gone
    for number in (signal.SIGINT, signal.SIGHUP, *notices):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else _exit_by_signal)
    folder = Path(sys.argv[1])
    orders, answers = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what anything prints is not part of the conversation
    writer = FrameWriter(open(answers, "wb"))  # noqa: SIM115 (for as long as this process lives)
    agent = Agent(folder, FrameReader(open(orders, "rb")), writer)  # noqa: SIM115 (the same)
    for number in notices:
        signal.signal(number, agent.on_notice)
    status = 1
    try:
        lock_folder(folder)
        remove_leftovers(folder)
        agent.serve()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except (OSError, FrameError, ApportionError, ValueError) as error:
        with suppress(OSError):  # the driver may be gone
            writer.send({"kind": "refused", "why": str(error)})
    except BaseException:
        traceback.print_exc()
    finally:
        # From here on a signal would cut short the killing of the ranks, which nothing else ends.
        for number in (signal.SIGHUP, *notices):
            signal.signal(number, signal.SIG_IGN)
        agent.close()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(status)  # threads may be waiting for a driver that is gone


def _exit_by_signal(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
