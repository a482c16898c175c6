"""The ranks of one host, as its agent starts, hears and ends them."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, final

from apportion.comm.channel import Lines, Message, SharedMemoryOwner
from apportion.comm.membership import HostShare, Membership
from apportion.errors import ApportionError
from apportion.process import is_stopped
from apportion.runtime.hosts.protocol.follower import Follower
from apportion.runtime.spawn.client import ForkedProcess, NotForked, SpawnTask
from apportion.runtime.spawn.stacks import tell_to_print_stacks
from apportion.runtime.spawn.template import Spare, template
from apportion.runtime.worker import progress
from apportion.runtime.worker.progress import Progress

PROGRAM = "apportion.api.host_rank:main"
"""The function that a rank calls."""
OPENED_PROGRAM = "apportion.api.host_rank:main_opened"
"""The function that a rank calls which is forked from the spare."""
SPARE_PROGRAM = "apportion.api.host_rank:stand_by"
"""The function that the spare calls."""
END_SECONDS = 3.0
"""The seconds that ranks which were killed may take to be gone."""
_OUTPUT_SECONDS = 0.5
"""The seconds that a rank's output may come later than its end: what it has started may hold it open."""
SPARE_SECONDS, SPARES = 0.5, 5
"""The seconds from the first step to the start of a spare, and the number of spares that are started at most."""
STAND_BY_SECONDS = 60.0
"""The seconds that a spare may take to open the workload, before ranks are offered that begin without one."""
PROGRESS_SECONDS = 0.1
"""The seconds between two reports of how far the ranks are."""
_CHUNK = 1 << 16
Send = Callable[[Mapping[str, Any]], None]
"""A function that sends a message to the driver; it may be called from any thread."""


@dataclass(frozen=True, kw_only=True)
class RanksStart:
    """What the ranks of a host are started with."""

    share: HostShare
    """The ranks of this host, and where all meet."""
    count: int
    own_address: str
    """The address by which the other hosts reach this one."""
    replaceable: bool
    """True where other processes may take the places of the ranks."""
    several: bool
    """True where there are other hosts."""
    joins: bool = False
    """True where the run is under way: ranks begin here when a table says so, and the spare stands by for that."""
    threads: int
    run: str
    """A name of the run, which other runs do not have."""
    secret_file: str
    environment: Mapping[str, str]
    """What the driver's environment says that each rank has to know."""
    path: list[str]
    """The folders in which the ranks find modules."""
    directory: str

    def environment_of(self, local_rank: int, own: Mapping[str, str]) -> dict[str, str]:
        """Returns the whole environment of a rank, as under torchrun. ``own``: the agent's."""
        place = {
            "RANK": self.share.first + local_rank,
            "WORLD_SIZE": self.share.size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.count,
            "MASTER_ADDR": self.share.address,
            "MASTER_PORT": self.share.port,
            "OMP_NUM_THREADS": self.threads,
            "MKL_NUM_THREADS": self.threads,
            "TORCHELASTIC_RUN_ID": self.run,
            "APPORTION_SECRET_FILE": self.secret_file,
        }
        return {**self.environment_of_spare(own), **{name: str(value) for name, value in place.items()}}

    def environment_of_spare(self, own: Mapping[str, str]) -> dict[str, str]:
        """Returns the whole environment of the process that replacements are forked from; it has no rank."""
        kept = {name: value for name, value in own.items() if name != "PYTHONSAFEPATH"}
        return {**kept, **self.environment}


class _Rank:
    """A rank's process, with the agent's ends of its channel and of its output."""

    def __init__(self, slot: int, process: ForkedProcess, channel: socket.socket, output: int) -> None:
        self.slot, self.process, self.lines = slot, process, Lines(channel)
        self.output: BinaryIO = open(output, "rb", buffering=0)  # noqa: SIM115 (read until the rank has ended)
        self.printing: threading.Thread | None = None


@final
class HostRanks:
    """The ranks of this host, forked from a process that has torch imported, each in a slot of its
    own."""

    def __init__(self, start: RanksStart, payload: bytes, send: Send) -> None:
        """Starts the ranks. Raises ApportionError where that cannot be done; ``close`` ends those that were started."""
        self._start, self._payload, self._send = start, payload, send
        self.members: HostMembers | None = None
        if start.replaceable:
            share = start.share if start.several else replace(start.share, address="")
            self.members = HostMembers(start.count, None if start.joins else share, start.own_address, send)
        self._ranks: dict[int, _Rank] = {}
        """The rank in each slot, until it has ended."""
        self._lock = threading.Lock()
        self._spare: Spare | None = None
        self._spares_left = SPARES
        self.all_ended = threading.Event()
        """An event that is set while no rank runs."""
        if not start.joins:
            self._begin_ranks(range(start.count))
        if self.members is not None:
            threading.Thread(target=self._report_progress, args=(self.members,), daemon=True).start()

    def _begin_ranks(self, slots: Sequence[int]) -> None:
        """Starts a process in each of these slots."""
        begun = [self._start_rank(slot) for slot in slots]
        with self._lock:
            self._ranks.update({rank.slot: rank for rank in begun})
            if begun:
                self.all_ended.clear()
        for rank in begun:
            rank.printing = threading.Thread(target=self._pass_output, args=(rank,), daemon=True)
            rank.printing.start()
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()

    def _start_rank(self, slot: int) -> _Rank:
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        try:
            socket.send_fds(ours, [b"o"], [write])  # the first that a rank does is to write there what it prints
            process = self._fork_rank(self._start.environment_of(slot, os.environ), theirs)
        except BaseException:
            ours.close()
            os.close(read)
            raise
        finally:
            theirs.close()
            os.close(write)
        return _Rank(slot, process, ours, read)

    def _fork_rank(self, environment: Mapping[str, str], channel: socket.socket) -> ForkedProcess:
        """Forks a rank from the spare, where there is one that stands by, else from the template."""
        spare = self._spare
        if spare is not None and spare.ready:
            with suppress(NotForked):  # it was lost too
                return spare.spawn(self._task(OPENED_PROGRAM, b"", environment), channel)
        return template().spawn(self._task(PROGRAM, self._payload, environment), channel)

    def _task(self, target: str, payload: bytes, environment: Mapping[str, str]) -> SpawnTask:
        start = self._start
        return SpawnTask(
            target=target, payload=payload, environment=environment, path=start.path, directory=start.directory
        )

    def _look_after_spare(self) -> None:
        """Starts the spare that replacements are forked from, and another one where it was lost."""
        if self._spare is not None and self._spare.gone:
            self._spares_left = 0 if self._spare.unfit() else self._spares_left
            self._spare.close()
            self._spare = None
        if self._spare is None and self._spares_left and sys.platform == "linux":
            self._spares_left -= 1
            with suppress(ApportionError):  # no process is left to be had: the run does without
                environment = self._start.environment_of_spare(os.environ)
                self._spare = Spare(self._task(SPARE_PROGRAM, self._payload, environment))

    def _stand_by(self, waits: threading.Event) -> None:
        """Reports that this host is ready: once its spare can fork ranks, or it has no spare, or the time is up."""
        self._look_after_spare()
        end = time.monotonic() + STAND_BY_SECONDS
        while self._spare is not None and not self._spare.ready and time.monotonic() < end:
            waits.wait(PROGRESS_SECONDS)
            if self._spare.gone:
                self._look_after_spare()
        self._send({"kind": "ready"})

    # What the driver orders

    def obey(self, message: Mapping[str, Any]) -> None:
        """Does what the driver orders about the ranks, or passes it on to the first of this host."""
        kind, members = message["kind"], self.members
        if kind == "kill":
            self._kill(message["slots"])
        elif kind == "stacks":
            with self._lock:
                pids = [rank.process.pid for rank in self._ranks.values()]
            tell_to_print_stacks(pids)
        elif kind == "open" and members is not None:
            members.open(message["generation"], self._living())
        elif kind == "table" and members is not None:
            self._kill(members.close(message, self._living(), self._begin_ranks))
        else:
            slots = range(self._start.count) if members is None else members.follower.slots
            with self._lock:
                rank = self._ranks.get(slots[0]) if slots else None
            if rank is not None:
                with suppress(OSError):  # it has ended, which `_listen` reports
                    rank.lines.send(message)

    def _living(self) -> list[int]:
        """Returns the slots whose processes have not ended, as far as the driver knows."""
        with self._lock:
            return list(self._ranks)

    def _kill(self, slots: Collection[int]) -> None:
        with self._lock:
            ranks = [self._ranks[slot] for slot in slots if slot in self._ranks]
        for rank in ranks:
            rank.process.kill()

    # What is sent to the driver

    def _pass_output(self, rank: _Rank) -> None:
        """Sends the driver what a rank prints, line by line."""
        rest = b""
        while data := rank.output.read(_CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _CHUNK:
                lines, rest = [*lines, rest], b""
            if lines:
                self._send_output(rank, lines)
        if rest:
            self._send_output(rank, [rest])

    def _send_output(self, rank: _Rank, lines: list[bytes]) -> None:
        text = [line.decode(errors="replace") for line in lines]
        self._send({"kind": "output", "slot": rank.slot, "lines": text})

    def _listen(self, rank: _Rank) -> None:
        """Passes on what a rank reports, until it has ended, and then how it ended."""
        from apportion.runtime.supervisor.watchdog import memory_kills  # numpy, by now in the ranks' shadow

        kills = memory_kills()
        try:
            while (messages := rank.lines.receive()) is not None:
                for message in messages:
                    self._pass_on(rank, message)
        except json.JSONDecodeError:  # cut short
            pass
        # The channel has ended: all that the rank has reported is sent before the report of its exit.
        status = rank.process.wait(END_SECONDS)
        if status is None:  # it has closed its channel, and lives on
            rank.process.kill()
            status = rank.process.wait(END_SECONDS)
        if rank.printing is not None:
            # Its last lines go before the report of its end, after which the driver may stop listening.
            rank.printing.join(_OUTPUT_SECONDS)
        out_of_memory = memory_kills() > kills
        rank.lines.close()
        with self._lock:
            del self._ranks[rank.slot]
            if not self._ranks:
                self.all_ended.set()
        self._send({"kind": "exited", "slot": rank.slot, "status": status, "out_of_memory": out_of_memory})

    def _pass_on(self, rank: _Rank, message: Message) -> None:
        if message["kind"] == "shared" and self.members is not None:
            reply, descriptors = self.members.hand_out(message)
            with suppress(OSError):  # it has ended
                rank.lines.send(reply, *descriptors)
        else:
            self._send({**message, "slot": rank.slot})

    def _report_progress(self, members: HostMembers) -> None:
        """Sends the driver how far the ranks are, and which processes are stopped; it is a sign of life as well."""
        waits, stepped = threading.Event(), 0.0  # never set
        if self._start.joins:
            self._stand_by(waits)
        while True:
            generation, lines = members.progress()
            stepped = stepped or (time.monotonic() if members.stepped else 0.0)
            if stepped and time.monotonic() - stepped > SPARE_SECONDS:
                self._look_after_spare()
            with self._lock:
                processes = {slot: rank.process.pid for slot, rank in self._ranks.items()}
            stopped = [slot for slot, pid in processes.items() if pid is not None and is_stopped(pid)]
            self._send({"kind": "progress", "generation": generation, "lines": lines, "stopped": stopped})
            waits.wait(PROGRESS_SECONDS)

    def close(self) -> None:
        """Kills the ranks and what they have started, and waits until they are gone."""
        self._spares_left = 0
        if self._spare is not None:
            self._spare.close()
        with self._lock:
            ranks = list(self._ranks.values())
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.wait(END_SECONDS)


# What the workers of one host share, as the agent of that host holds it: memory, their progress, and the page that
# says who is in the run.


LOOK_SECONDS = 0.001
"""The seconds between two looks at which workers have answered a change."""
Begin = Callable[[Sequence[int]], None]


@final
class HostMembers:
    """The memory of the workers of this host, and their membership. ``address``: where the ranks of all hosts meet,
    were rank 0 on this host. Its methods may be called from any thread."""

    def __init__(self, slots: int, share: HostShare | None, address: str, send: Send) -> None:
        self._memory, self._slots, self._address, self._send = SharedMemoryOwner(), slots, address, send
        self._lines = progress.lines(self._memory.map("progress", progress.NBYTES * slots))
        page = memoryview(self._memory.map("members", Membership.nbytes(slots)))
        self.page = Membership(page, slots)
        if share is not None:  # else the first table that comes takes its workers in
            self.page.begin(share)
        self.follower = Follower(slots if share is not None else 0)
        """What this host makes of the driver's orders."""
        self._held: socket.socket | None = None
        self._lock = threading.Lock()

    def hand_out(self, asked: Message) -> tuple[Message, list[int]]:
        """Returns the answer to a worker that asks for memory, and the descriptors that go with it."""
        reply = {"kind": "shared", "name": asked["name"]}
        try:
            with self._lock:
                return reply, [self._memory.fd(asked["name"], asked["nbytes"])]
        except OSError as error:
            return {**reply, "refused": error.strerror or str(error)}, []

    def progress(self) -> tuple[int, list[list[int]]]:
        """Returns the generation and the numbers of every slot in it, and lets the workers know that this process
        runs."""
        self.page.tick()
        with self._lock:
            lines: list[list[int]] = self._lines.tolist()
            return self.follower.generation, lines

    @property
    def stepped(self) -> bool:
        """True once a worker of this host has made a step."""
        return bool(self._lines[:, Progress.step.index].any())

    # A change

    def open(self, generation: int, living: Collection[int]) -> None:
        """Begins a change, unless the driver's order is an old one, and has each answer to it sent to the driver.
        ``living``: the slots whose processes may still live."""
        with self._lock:
            begins = self.follower.open(generation, living)
        if begins:
            self.page.open_change(generation)
            host, port = self._reserve_port()
            self._send({"kind": "reserved", "generation": generation, "address": host, "port": port})
            threading.Thread(target=self._hear_answers, args=(generation,), daemon=True).start()

    def _hear_answers(self, generation: int) -> None:
        waits = threading.Event()  # never set
        while asked := self._asked(generation):
            for slot in filter(self.page.acknowledged, asked):
                with self._lock:
                    is_new = self.follower.note_answer(slot, generation)
                if is_new:
                    self._send({"kind": "answered", "slot": slot, "generation": generation})
            waits.wait(LOOK_SECONDS)

    def _asked(self, generation: int) -> list[int]:
        """Returns the slots whose workers have not answered this change yet; none where it is over."""
        with self._lock:
            return self.follower.asked if self.follower.generation == generation else []

    def close(self, order: Mapping[str, Any], living: Collection[int], begin: Begin) -> Sequence[int]:
        """Ends the open change by its table; returns the slots whose processes it leaves out, which are to end.
        ``begin``: starts new processes in these slots. A table of another change is left alone."""
        with self._lock:
            taken = self.follower.close(order, living)
            if taken is None:
                return ()
            if order["began"] == order["generation"]:  # with memory of their own
                self._memory.keep("progress", "members")
                self._lines[:] = 0
            for slot in taken.fresh:
                self._lines[slot, [Progress.waiting.index, Progress.begun.index]] = 0
        self._release_port()
        share = HostShare(order["first"], order["size"], order["address"], order["port"])
        # Started before the page is even again: from then on the other ranks wait for these processes.
        begin(taken.fresh)
        self.page.close_change(
            order["slots"], ending=order["ending"], share=share, began=order["began"], saved=order["saved"]
        )
        return taken.left_out

    def _reserve_port(self) -> tuple[str, int]:
        """Keeps a free port until the next table, and returns the address and it."""
        with self._lock:
            self._release_port()
            family = socket.getaddrinfo(self._address, 0, type=socket.SOCK_STREAM)[0][0]
            self._held = socket.socket(family, socket.SOCK_STREAM)
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind((self._address, 0))
            port: int = self._held.getsockname()[1]
            return self._address, port

    def _release_port(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            with suppress(OSError):
                held.close()
