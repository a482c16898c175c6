"""A replica's side of rounds that close at their deadline: it joins, receives its batches and the average, sends its
contribution, and may leave and join again.

::

    rank 0   coordinator   round 4 opens -------- deadline   round 5 opens
    rank 0   replica       step step step . give /           \\ step step step
    rank 1   replica       step step . give     /  average of \\ step step
    rank 2   replica       step (frozen) ..... x   0 and 1     (wakes) leave, take
    rank 3   (killed)               (comes again) hello        \\ step step step

The ranks have not met: each finds rank 0 where ranks that others have started meet, and waits for no other rank.
"""

from __future__ import annotations

import math
import secrets
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, final

from apportion.comm.network.rank_connection import RankConnection, move_until
from apportion.comm.network.rendezvous import RankService
from apportion.comm.world import World
from apportion.errors import ApportionError, PeerLost
from apportion.parallel.averaging.contribution import Contribution, ContributionBytes, ReplicaTensors
from apportion.parallel.averaging.coordinator import OpenRounds, Refuse, RoundCoordinator
from apportion.parallel.averaging.messages import MessageKind, MessageReader, RoundMessage, send_message
from apportion.parallel.averaging.round_log import RoundLog
from apportion.parallel.averaging.rounds import AveragingRound, Exchange, Write

FIRST_SECONDS, RETURN_SECONDS = 300.0, 60.0
"""The seconds that a replica waits for rank 0 to be there at first, and to be there again after it was lost."""


@final
class OpenExchange(Exchange):
    """An exchange that no replica can hold up, and that replicas may leave and join."""

    def __init__(self, frame: ReplicaTensors, world: World, rounds: OpenRounds) -> None:
        self._frame, self._world, self._rounds = frame, world, rounds
        whole = world.unmet
        assert whole is not None, "ranks that come and go have not met"
        self._service = RankService(one_host=whole.local_size == whole.size, insecure=whole.insecure)
        self._listener = self._service.listen() if world.rank == 0 else None
        self._own = frame.new()
        """This replica's contribution."""
        self._full = ContributionBytes(self._own, slots=True)
        self._whole = ContributionBytes(self._own, slots=True, momentum=True)
        slots = rounds.averages_slots or world.rank == 0
        self._wire = self._full if slots else ContributionBytes(self._own, slots=False)
        self._coordinator: RoundCoordinator | None = None
        self._reader: MessageReader | None = None
        """The reader of the connection to rank 0, where there is one."""
        self._pending: deque[RoundMessage] = deque()
        """The messages that have arrived and were not handled yet."""
        self._process = secrets.token_hex(16)
        """What tells this process from another one with the same rank."""
        self._introduction: tuple[Mapping[str, Any], Refuse] | None = None
        self._round, self._batch_count, self._done = -1, 0, 0
        """The number of the round that this replica is in, of the batches that it was assigned, and of those in the
        average."""
        self._has_contributed = self._ended = self._closed = False
        """Has this replica sent its part of that round, or left it; has the run ended; is this exchange closed?"""

    def introduce(self, given: Mapping[str, Any], refuse: Refuse) -> None:
        """Say what this rank was given to train, before the first round; ``refuse`` says on rank 0 why another rank may
        not take part."""
        self._introduction = given, refuse

    # Joining and leaving

    def start(self, first: Contribution, done: int, unpushed: Sequence[int] = ()) -> None:
        if self._world.rank != 0:
            return
        if self._coordinator is not None:
            self._coordinator.close()
            self._listener = None
        listener = self._listener or self._service.listen()
        own_socket, coordinator_socket = socket.socketpair()
        self._coordinator = RoundCoordinator(
            self._rounds, self._frame, listener, self._service.name, coordinator_socket, self._introduction
        )
        self._coordinator.start(first, done, unpushed)
        self._say_hello(own_socket)

    def _connect(self, seconds: float) -> None:
        assert self._world.rank != 0, "begin() comes first on rank 0"
        try:
            self._say_hello(self._service.dial(self._world.rank, seconds, lambda: self._closed))
        except PeerLost as error:
            raise PeerLost(
                f"rank {self._world.rank} has waited {seconds:.0f} s for rank 0, which makes the averages: {error}. "
                'Start rank 0 again with resume="auto", and then this one'
            ) from error

    def _say_hello(self, sock: socket.socket) -> None:
        connection = RankConnection(sock, "rank 0")
        most = {
            MessageKind.REFUSED: 0,
            MessageKind.ROUND: self._whole.nbytes,
            MessageKind.ASKED: 0,
            MessageKind.CLOSED: 0,
            MessageKind.ENDED: 0,
        }
        self._reader = MessageReader(connection, most)
        given = {} if self._introduction is None else self._introduction[0]
        fields = {"process": self._process, "nbytes": self._full.nbytes, "given": given}
        send_message(connection, MessageKind.HELLO, fields)

    def _drop_connection(self, error: PeerLost) -> None:
        """Close a connection that has ended. Batches whose part was not sent are made again, by the replicas that they
        are assigned to."""
        if self._reader is not None:
            self._reader.connection.release()
        self._reader = None
        self._pending.clear()
        if self._closed:
            raise error
        if self._coordinator is not None:
            raise self._coordinator.failed or error
        sys.stderr.write(
            f"rank {self._world.rank} has lost rank 0 ({error}): it waits for rank 0 to be started again, "
            f"{RETURN_SECONDS:.0f} s at most\n"
        )
        sys.stderr.flush()

    # A round

    def next_round(self, into: Contribution) -> AveragingRound:
        seconds = FIRST_SECONDS if self._round < 0 else RETURN_SECONDS
        while not self._ended:
            if self._reader is None:
                self._connect(seconds)
            try:
                message = self._next_message()
            except PeerLost as error:
                self._drop_connection(error)
                continue
            if message.kind is MessageKind.ROUND:
                return self._begin_round(message, into)
            self._handle_notice(message)
        return AveragingRound(self._done, self._done, 1, 0, ended=True)

    def _begin_round(self, message: RoundMessage, into: Contribution) -> AveragingRound:
        fields, fresh = message.fields, bool(message.fields["fresh"])
        wire = self._whole if self._world.rank == 0 else self._full if fresh else self._wire
        if len(message.data) != wire.nbytes:
            raise AssertionError(f"rank 0 sent an average of {len(message.data)} bytes, and it has {wire.nbytes}")
        wire.read(message.data, into)
        batches = tuple(int(batch) for batch in fields["batches"])
        self._round, self._batch_count, self._has_contributed = int(fields["round"]), len(batches), False
        self._ended = bool(fields["ended"])
        self._done = int(fields["done"])
        return AveragingRound(
            self._done,
            self._done,
            int(fields["present"]),
            len(batches),
            given=batches,
            fresh=fresh,
            ended=self._ended,
            unpushed=tuple(fields.get("unpushed", ())),
            limit=self._rounds.total,
        )

    def _handle_notice(self, message: RoundMessage) -> None:
        """Handle a message that does not begin a round. Messages about a round that this replica has ended are
        ignored."""
        if message.kind is MessageKind.REFUSED:
            raise ValueError(str(message.fields["why"]))
        if message.kind is MessageKind.ENDED:
            self._ended = True

    def contribute(self, write: Write) -> None:
        self._send_part(self._batch_count, write)

    def _send_part(self, made: int, write: Write) -> None:
        """Send what this replica has learnt from the first ``made`` of its batches."""
        if self._has_contributed or self._reader is None:
            return
        examples = write(self._own)
        self._has_contributed = True
        fields = {"round": self._round, "made": made, "examples": examples}
        send_message(self._reader.connection, MessageKind.PART, fields, self._wire.write(self._own))

    def is_over(self, made: int, write: Write) -> bool:
        if self._ended:
            return False
        if self._reader is None or self._has_contributed:
            return True
        try:
            while (message := self._reader.next()) is not None:
                self._pending.append(message)
        except PeerLost as error:
            self._drop_connection(error)
            return True
        kinds = {message.kind for message in self._pending if message.fields.get("round", self._round) == self._round}
        if MessageKind.CLOSED in kinds:
            self._has_contributed = True
            send_message(self._reader.connection, MessageKind.LEFT, {"round": self._round, "made": made})
        elif MessageKind.ASKED in kinds and made:
            self._send_part(made, write)
        return self._has_contributed or MessageKind.ENDED in kinds

    def _next_message(self) -> RoundMessage:
        """Wait for the next message."""
        reader = self._reader
        connection = None if reader is None else reader.connection
        assert connection is not None
        assert reader is not None

        def receive_messages() -> None:
            self._world.check()
            while (message := reader.next()) is not None:
                self._pending.append(message)

        if not self._pending:
            clock = self._world.all_waits
            move_until([connection], lambda: bool(self._pending), clock=clock, seconds=math.inf, moved=receive_messages)
        return self._pending.popleft()

    # Besides

    def log(self) -> RoundLog | None:
        """Return the log of the rounds, on rank 0 once they have begun."""
        return None if self._coordinator is None else self._coordinator.log()

    @property
    def waited(self) -> float:
        return self._world.all_waits.seconds

    def close(self) -> None:
        self._closed = True
        if self._reader is not None:
            self._reader.connection.release()
            self._reader = None
        if self._coordinator is not None:
            self._coordinator.close()
            if self._coordinator.failed is not None and not self._ended:
                raise ApportionError("the averages could not be made") from self._coordinator.failed
        elif self._listener is not None:
            self._listener.close()
