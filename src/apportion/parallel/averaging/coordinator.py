"""The thread of rank 0 that makes the averages of replicas which come and go.

It admits each replica that has proved to know the secret and was given the same run, assigns batches, receives the
contributions of the replicas, and closes a round when all of them have arrived, or at its deadline. It never waits for
one replica: what a slow one has not received yet lies in memory until it does. The average is computed in rank order,
from the contributions that have arrived, so that the same contributions give the same bits.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from apportion.comm.network.rank_connection import RankConnection
from apportion.comm.network.rank_listener import RankListener
from apportion.errors import PeerLost
from apportion.parallel.averaging.contribution import (
    Contribution,
    ContributionBytes,
    ReplicaTensors,
    average,
    copy_parts,
)
from apportion.parallel.averaging.messages import MessageKind, MessageReader, RoundMessage, send_message
from apportion.parallel.averaging.round_log import LoggedPart, LoggedRound, RoundLog
from apportion.parallel.averaging.round_state import OpenedRound, RoundState

FAREWELL_SECONDS = 5.0
"""The seconds that replicas have at the end to read that the run is over."""
_BROKEN = (PeerLost, ConnectionError, AssertionError, ValueError, KeyError, TypeError)
"""The exceptions of a connection that has ended, or whose other end sends what is not a message of this run."""


@dataclass(frozen=True, kw_only=True)
class OpenRounds:
    """What is given of rounds that close at their deadline."""

    every: int
    """The most batches of a replica in a round."""
    total: int
    """The batches of the training."""
    deadline: float
    """The seconds that a round takes at most."""
    averages_slots: bool = False
    """True where replicas go on with the mean of their optimizers' slots."""
    size: int = 1
    """The number of ranks that the first round waits for, and the most that there may be at once."""


Refuse = Callable[[Mapping[str, Any], Mapping[str, Any], int], str | None]
"""A function that compares what rank 0 was given with what another rank was, whose number follows, and returns why that
one may not take part; None where it may."""


@dataclass
class _AdmittedReplica:
    """A replica that is connected."""

    rank: int
    connection: RankConnection
    reader: MessageReader
    process: str = ""
    """The identifier of its process; empty until it has said hello."""
    incarnation: int = 0
    fresh: bool = True
    """True until it has the state of an optimizer to begin with."""


@dataclass(frozen=True)
class _ReceivedPart:
    """A contribution to the round that is open, and its entry in the log."""

    part: LoggedPart
    changes: Contribution


@dataclass
class _SinceLastRound:
    """What the log records of the time since the last round was closed, besides the parts of the open one."""

    late: list[LoggedPart] = field(default_factory=list)
    """The parts that came too late for their round."""
    joined: list[tuple[int, int]] = field(default_factory=list)
    """The rank and the incarnation of each replica that has joined."""


@final
class RoundCoordinator:
    """Makes the averages, in a thread of its own, until ``close``. ``own``: the connection of this process's replica,
    which is rank 0."""

    def __init__(
        self,
        rounds: OpenRounds,
        frame: ReplicaTensors,
        listener: RankListener,
        name: str,
        own: socket.socket,
        introduction: tuple[Mapping[str, Any], Refuse] | None = None,
    ) -> None:
        self._rounds, self._frame, self._listener, self._name = rounds, frame, listener, name
        self._introduction = introduction
        self._averages = [frame.new(), frame.new()]
        """The last average, and room for the next one."""
        self._full = ContributionBytes(self._averages[0], slots=True)
        self._whole = ContributionBytes(self._averages[0], slots=True, momentum=True)
        """What rank 0 takes, which saves it."""
        self._bare = self._full if rounds.averages_slots else ContributionBytes(self._averages[0], slots=False)
        self._state = RoundState(every=rounds.every, total=rounds.total, deadline=rounds.deadline, size=rounds.size)
        self._log: tuple[int, list[LoggedRound]] = (0, [])
        self._admitted: list[_AdmittedReplica] = []
        self._received: dict[int, _ReceivedPart] = {}
        self._since = _SinceLastRound()
        self._opened: OpenedRound | None = None
        self._displaced: set[str] = set()
        """The processes whose rank another one has taken since."""
        self._bell = socket.socketpair()
        self._ending: float | None = None
        """The time by which it ends; None while it goes on."""
        self.failed: BaseException | None = None
        """What has ended the thread, where that was an error."""
        listener.on_ready = self.wake
        self._accept(0, own)
        self._thread = threading.Thread(target=self._run, name="averages", daemon=True)

    def start(self, first: Contribution, done: int, unpushed: Sequence[int]) -> None:
        """Begin the rounds from an average that holds ``done`` batches, and lacks these of the ones before its last."""
        copy_parts(first, self._averages[0])
        self._state.start(done, unpushed, time.monotonic())
        self._log = (done, [])
        self._thread.start()

    def log(self) -> RoundLog:
        """Return what has been made so far."""
        first, rounds = self._log
        return RoundLog(first, tuple(rounds))

    def wake(self) -> None:
        """Have the thread read the messages that have arrived. May be called from any thread."""
        with contextlib.suppress(OSError):
            self._bell[1].send(b"\0")

    def close(self) -> None:
        """End the rounds: announce the end to the replicas that are connected, and end the thread."""
        self._ending = time.monotonic() + FAREWELL_SECONDS
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        for sock in self._bell:
            sock.close()

    # In the thread

    def _run(self) -> None:
        try:
            while self._ending is None:
                self._run_once()
            self._announce_end()
        except BaseException as error:
            self.failed = error
        finally:
            for admitted in self._admitted:
                admitted.connection.release()

    def _run_once(self) -> None:
        """Do everything that is possible without waiting, and sleep until there is more to do."""
        for rank in self._listener.ready(self._name):
            sock = self._listener.poll(self._name, rank, 0.0)
            if sock is not None:
                self._accept(rank, sock)
        for admitted in list(self._admitted):
            self._handle_messages(admitted)
        now = time.monotonic()
        self._send_notice(self._state.ranks_to_ask(now), MessageKind.ASKED)
        if self._state.is_over(now):
            self._close_round(now)
        self._open_round()
        self._sleep(self._state.seconds_until_due(time.monotonic()))

    def _sleep(self, seconds: float | None) -> None:
        """Sleep until something comes, or ``seconds`` have passed; not at all where something has come already."""
        # A message that was received while something was sent makes its socket readable no more: poll() would sleep on
        # it.
        if any(admitted.reader.has_come for admitted in self._admitted):
            return
        poller = select.poll()
        poller.register(self._bell[0], select.POLLIN)
        for admitted in self._admitted:
            poller.register(admitted.connection, admitted.connection.events)
        poller.poll(None if seconds is None else seconds * 1000 + 1)
        # The bell is emptied before the messages are read: one that rings meanwhile ends the next poll() at once.
        self._bell[0].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self._bell[0].recv(4096):
                pass

    # Ranks that join and leave

    def _accept(self, rank: int, sock: socket.socket) -> None:
        most = self._full if rank == 0 else self._bare
        connection = RankConnection(sock, f"rank {rank}")
        kinds = {MessageKind.HELLO: 0, MessageKind.PART: most.nbytes, MessageKind.LEFT: 0}
        self._admitted.append(_AdmittedReplica(rank, connection, MessageReader(connection, kinds)))

    def _handle_messages(self, admitted: _AdmittedReplica) -> None:
        """Read the messages of a replica, and do what they ask. A replica that is gone, or that sends what is not a
        message of this run, is disconnected."""
        try:
            while (message := admitted.reader.next()) is not None:
                self._handle_message(admitted, message)
        except _BROKEN:
            self._drop_replica(admitted)

    def _drop_replica(self, admitted: _AdmittedReplica) -> None:
        if admitted not in self._admitted:
            return
        self._admitted.remove(admitted)
        admitted.connection.release()
        # The rank may have connected again meanwhile: the end of an older connection takes nothing from it.
        slot = self._state.slots.get(admitted.rank)
        if slot is not None and slot.incarnation == admitted.incarnation:
            self._state.remove_replica(admitted.rank)
            self._report(
                f"rank {admitted.rank} is gone: the batches that it was assigned in round {self._state.number} are "
                "assigned again"
            )

    def _report(self, what: str) -> None:
        """Report a rank that joins or leaves to the user; the end of the run is reported elsewhere."""
        if self._ending is None and not self._state.is_finished:
            sys.stderr.write(f"{what}\n")
            sys.stderr.flush()

    def _handle_message(self, admitted: _AdmittedReplica, message: RoundMessage) -> None:
        if message.kind is MessageKind.HELLO:
            self._admit_replica(admitted, message.fields)
            return
        if not admitted.incarnation:
            raise ConnectionError(f"{admitted.connection.name} has not said hello")
        number, made = int(message.fields["round"]), int(message.fields["made"])
        assigned = self._state.slots[admitted.rank].batches
        batches = assigned[:made]
        examples = float(message.fields.get("examples", 0.0))
        wire = self._full if admitted.rank == 0 else self._bare
        # Before it counts as arrived: a round is closed with every part that has.
        has_part = message.kind is MessageKind.PART
        if has_part and (len(message.data) != wire.nbytes or not examples >= 0):
            raise ConnectionError(f"{admitted.connection.name} sent {len(message.data)} bytes and {examples} examples")
        counts = self._state.record_part(admitted.rank, number, made if has_part else 0, time.monotonic())
        part = LoggedPart(
            rank=admitted.rank,
            life=admitted.incarnation,
            begun=number,
            batches=batches,
            dealt=len(assigned),
            examples=examples if counts else 0.0,
        )
        if not counts:
            self._since.late.append(part)
            return
        self._received[admitted.rank] = _ReceivedPart(part, wire.contribution_in(message.data))

    def _admit_replica(self, admitted: _AdmittedReplica, fields: Mapping[str, Any]) -> None:
        """Let a replica take part, or send it the reason why it may not."""
        why = self._refusal(admitted, fields)
        if why is not None:
            send_message(admitted.connection, MessageKind.REFUSED, {"why": why})
            return  # it goes by itself
        for other in [o for o in self._admitted if o is not admitted and o.rank == admitted.rank and o.incarnation]:
            if other.process != fields["process"]:
                self._displaced.add(other.process)
            self._drop_replica(other)
        admitted.process, admitted.incarnation = str(fields["process"]), self._state.add_replica(admitted.rank)
        self._since.joined.append((admitted.rank, admitted.incarnation))
        if self._state.number:
            self._report(f"rank {admitted.rank} has come during round {self._state.number}, and is in the next one")

    def _refusal(self, admitted: _AdmittedReplica, fields: Mapping[str, Any]) -> str | None:
        if fields["process"] in self._displaced:
            return f"another process has taken the place of rank {admitted.rank} meanwhile: end this one"
        if not 0 <= admitted.rank < self._rounds.size:
            return f"RANK={admitted.rank} must be in 0..{self._rounds.size - 1} (WORLD_SIZE={self._rounds.size})"
        if fields["nbytes"] != self._full.nbytes:
            return (
                f"rank {admitted.rank} averages {fields['nbytes']} bytes where rank 0 averages {self._full.nbytes}: "
                "start all ranks with the same network, optimizer and strategy"
            )
        if self._introduction is None or admitted.rank == 0:
            return None
        own, refuse = self._introduction
        return refuse(own, fields["given"], admitted.rank)

    # Rounds

    def _open_round(self) -> None:
        opened = self._state.open_round(time.monotonic())
        if opened is None:
            return
        self._opened = opened
        live = self._averages[0]
        memory: dict[ContributionBytes, bytearray] = {}
        for admitted in self._admitted:
            assignment = opened.assignments.get(admitted.rank)
            if assignment is None or assignment.incarnation != admitted.incarnation:
                continue
            wire = self._wire(admitted)
            if wire not in memory:
                # A copy, which all replicas of this layout are sent: a slow one still reads it when the next average is
                # written.
                memory[wire] = wire.write(live)
            self._send_round(admitted, opened, assignment.batches, memory[wire])

    def _wire(self, admitted: _AdmittedReplica) -> ContributionBytes:
        """Return the layout of an average that a replica is sent."""
        return self._whole if admitted.rank == 0 else self._full if admitted.fresh else self._bare

    def _send_round(
        self,
        admitted: _AdmittedReplica,
        opened: OpenedRound,
        batches: Sequence[int],
        memory: bytearray,
        *,
        ended: bool = False,
    ) -> None:
        fields: dict[str, Any] = {
            "round": opened.number,
            "done": opened.done,
            "present": opened.present,
            "batches": batches,
            "fresh": admitted.fresh,
            "ended": ended,
        }
        if admitted.rank == 0:  # which saves
            fields["unpushed"] = opened.unpushed
        send_message(admitted.connection, MessageKind.ROUND, fields, memory)
        admitted.fresh = False
        self._send_at_once(admitted)

    def _send_notice(self, ranks: Sequence[int], kind: MessageKind) -> None:
        """Send a message of the round that is open, or was until now, to some ranks."""
        for admitted in self._admitted:
            if admitted.rank in ranks and admitted.incarnation == self._state.slots[admitted.rank].incarnation:
                assert self._opened is not None, "a round that is announced was opened"
                send_message(admitted.connection, kind, {"round": self._opened.number})
                self._send_at_once(admitted)

    def _send_at_once(self, admitted: _AdmittedReplica) -> None:
        """Send what goes out without waiting; the rest goes when the socket has room."""
        try:
            admitted.connection.move()
        except _BROKEN:  # the next look at it finds the same
            pass

    def _close_round(self, now: float) -> None:
        """Make the average of the parts that have arrived, and record them in the log."""
        opened, state = self._opened, self._state
        assert opened is not None, "a round that is over was opened"
        arrived, late, waited = state.close_round(now)
        self._send_notice(late, MessageKind.CLOSED)
        received = [self._received.pop(rank) for rank in arrived]
        self._received.clear()
        old, new = self._averages
        weights = [(each.part.examples, each.changes) for each in received]
        average(self._frame, old, new, weights, sum(weight for weight, _ in weights))
        self._averages = [new, old]
        state.add_batches(sum(len(each.part.batches) for each in received))
        since, self._since = self._since, _SinceLastRound()
        parts, joined = (*(each.part for each in received), *since.late), tuple(since.joined)
        seconds = waited + time.monotonic() - now
        self._log[1].append(LoggedRound(opened.number, opened.done, opened.present, seconds, waited, parts, joined))
        self._send_last()

    def _send_last(self) -> None:
        """Send the last average to the replicas that are connected: no batch is left for them."""
        if not self._state.is_finished:
            return
        last = OpenedRound(self._state.number, self._state.done, 1, ())
        for admitted in self._admitted:
            slot = self._state.slots.get(admitted.rank)
            if slot is not None and slot.incarnation == admitted.incarnation:
                self._send_round(admitted, last, (), self._wire(admitted).write(self._averages[0]), ended=True)

    def _announce_end(self) -> None:
        """Announce the end to every replica, and wait until it has been read, or the time is over."""
        assert self._ending is not None
        for admitted in self._admitted:
            send_message(admitted.connection, MessageKind.ENDED, {})
        while self._admitted and (left := self._ending - time.monotonic()) > 0:
            for admitted in list(self._admitted):
                try:
                    while admitted.reader.next() is not None:
                        pass
                except _BROKEN:
                    self._admitted.remove(admitted)
                    admitted.connection.release()
            if self._admitted:
                self._sleep(left)
