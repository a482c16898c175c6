"""The meeting of ranks that others have started: where each of them listens, and who may connect.

::

    one host        every rank listens on a socket of this host that only its user can reach: no port, no secret
    several hosts   rank 0 listens at MASTER_ADDR:MASTER_PORT (under torchrun, whose own store holds that port, at a
                    free one that the store tells; under srun at one of some that follow from the number of the job);
                    each rank proves that it knows the secret, tells rank 0 where it listens itself, and learns where
                    the others do

Nothing that torchrun's store says is trusted: the process that answers at the address has to prove itself.

Ranks that come and go (``RankService``) prove the same to rank 0, but none of them waits for any other than rank 0.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, final

from apportion.comm.network.address import Address, dial, is_loopback, is_readable
from apportion.comm.network.handshake import (
    GREETING_BYTES,
    MAKE_SECRET,
    PROOF_BYTES,
    SECRET_ENV,
    Purpose,
    claim,
    hello,
    is_proved,
    key_of_meeting,
    secret_of_run,
)
from apportion.comm.network.launched_ranks import run_name
from apportion.comm.network.meeting_place import GivenPlace, OneHost, SeveralHosts, where
from apportion.comm.network.rank_listener import RankListener
from apportion.errors import ApportionError, PeerLost

DEADLINE_SECONDS = 300.0
"""The seconds that ranks wait for each other in a meeting."""
REPORT_SECONDS = 10.0
"""The seconds that a rank which has proved itself may take to tell where it listens."""
PATIENCE_SECONDS = 10.0
"""The seconds of meeting before a rank says that it waits."""
LOOK_SECONDS = 0.02
"""The seconds between two looks at whether a meeting was called off."""
_MOST_BYTES = 64 << 20
"""The most bytes of a message of a meeting, which only ranks send that have proved themselves."""
_LENGTH = struct.Struct("!Q")
_OPEN = b"anybody may join this run: env(insecure=True), or a socket of one host and one user"
_numbers = itertools.count()
_Place = OneHost | SeveralHosts | GivenPlace


def _never() -> bool:
    return False


@final
class RankDoors:
    """One rank's way to others, and theirs to it, for conversations of two, which no other rank waits for: a rank that
    dies ends its own alone, and the process that takes its place dials anew. ``addresses``: where each rank listens;
    ``describe``: what a rank is called in messages of errors; ``listener``: None where this rank only dials."""

    def __init__(
        self,
        rank: int,
        listener: RankListener | None,
        addresses: Mapping[int, Address],
        secret: bytes,
        name: str,
        describe: Callable[[int], str] = lambda rank: f"rank {rank}",
    ) -> None:
        self.rank, self._listener, self._secret, self._name = rank, listener, secret, name
        self._addresses = dict(addresses)
        self.describe = describe
        self._closed = False

    @property
    def address(self) -> Address:
        """The address at which this rank listens."""
        assert self._listener is not None, "this rank only dials"
        return self._listener.address

    def note(self, rank: int, address: Address) -> None:
        """Notes that a rank listens at this address from now on."""
        self._addresses[rank] = address

    def open(self, taker: Callable[[int, socket.socket], None]) -> None:
        """Gives the connections that other ranks make to a function, as they come. It is called in the listener's
        thread, and must not wait."""
        assert self._listener is not None, "this rank only dials"
        self._listener.hand_over(self._name, taker)

    def dial(self, rank: int, seconds: float) -> socket.socket:
        """Connects to a rank. Raises PeerLost where it does not answer in this many seconds, or after ``close``."""
        purpose = Purpose(self._name, self.rank)
        return dial_rank(self._addresses[rank], self._secret, purpose, seconds, lambda: self._closed)

    def close(self) -> None:
        """Lets no rank in any more, and dials no more. May be called from any thread."""
        self._closed = True
        if self._listener is not None:
            self._listener.hand_over(self._name, None)

    def abandon(self) -> None:
        """Does what ``close`` does: the world that this belongs to was given up."""
        self.close()


@final
class Meeting:
    """Ranks that have met: each can be dialled, and dials."""

    def __init__(self, rank: int, listener: RankListener, secret: bytes, name: str) -> None:
        self.rank, self._listener, self._secret, self._name = rank, listener, secret, name
        self.addresses: list[Address] = []
        """The address at which each rank listens."""
        self.hosts: list[str] = []
        """The name of each rank's host."""

    def dial(self, rank: int, group: str, stopped: Stopped) -> socket.socket:
        """Connects to a rank, for a group of this name. Raises PeerLost where it is not there."""
        purpose = Purpose(f"{self._name}/{group}", self.rank)
        return dial_rank(self.addresses[rank], self._secret, purpose, DEADLINE_SECONDS, stopped)

    def take(self, rank: int, group: str, stopped: Stopped) -> socket.socket:
        """Waits for a rank to connect, for a group of this name. Raises PeerLost where it does not."""
        return self._listener.take(f"{self._name}/{group}", rank, DEADLINE_SECONDS, stopped)

    def poll(self, rank: int, group: str, seconds: float) -> socket.socket | None:
        """Returns a rank's connection, or None where it has not come in this many seconds."""
        return self._listener.poll(f"{self._name}/{group}", rank, seconds)

    def doors(self, group: str) -> RankDoors:
        """Returns the way to the other ranks for conversations of two, for a group of this name."""
        everybody = dict(enumerate(self.addresses))
        return RankDoors(self.rank, self._listener, everybody, self._secret, f"{self._name}/{group}", self.describe)

    def wake(self) -> None:
        """Has those that wait for a rank to connect ask whether they are to stop. May be called from any thread."""
        self._listener.wake()

    def describe(self, rank: int) -> str:
        """Returns what a rank is called in messages of errors."""
        return f"rank {rank} on {self.hosts[rank]} at {self.addresses[rank]}"

    def close(self) -> None:
        """Stops to listen for other ranks."""
        self._listener.close()


def meet(rank: int, size: int, *, one_host: bool, insecure: bool) -> Meeting:
    """Meets the other ranks, and returns once all of them are there.

    ``one_host``: the ranks are processes of this host and this user. ``insecure``: ranks of several hosts need no
    secret, and any process that reaches the port may take one's place.
    """
    name = "/".join((*run_name(os.environ), str(next(_numbers))))
    secret = secret_for(one_host=one_host, insecure=insecure)
    waits = threading.Timer(PATIENCE_SECONDS, _say_waiting, [rank, size])
    waits.daemon = True
    waits.start()
    try:
        place = OneHost(name) if one_host else SeveralHosts(name, DEADLINE_SECONDS)
        if place.has_many:  # at another of its ports there may be another run, or an earlier meeting of this one
            secret = key_of_meeting(secret, name)
        return _gather(place, size, secret, name) if rank == 0 else _report(place, rank, secret, name)
    except (OSError, PeerLost) as error:
        raise ApportionError(
            f"rank {rank} of {size} could not meet the others at {where()}: {error}; check that rank 0 runs there, "
            "that every rank was started, and that the port is open between the hosts"
        ) from error
    finally:
        waits.cancel()


def meet_again(rank: int, size: int, address: Address, generation: int, *, called_off: Stopped) -> Meeting:
    """Meets the other ranks of one generation of a run whose hosts are supervised, at the place that all were given.
    Raises PeerLost where the meeting is called off, since the next generation has begun, or the others do not come."""
    name = "/".join((*run_name(os.environ)[2:], "generation", str(generation)))
    secret = secret_of_run(os.environ)
    assert secret is not None, "the supervisor of ranks on several hosts has made a secret"
    place, secret = GivenPlace(address), key_of_meeting(secret, name)
    try:
        if rank == 0:
            return _gather(place, size, secret, name, called_off)
        return _report(place, rank, secret, name, called_off)
    except OSError as error:
        raise PeerLost(f"rank {rank} of {size} could not meet the others at {address}: {error}") from error


def secret_for(*, one_host: bool, insecure: bool) -> bytes:
    """Returns what the ranks of a run prove to know. Raises ValueError where several hosts have no secret."""
    secret = _OPEN if insecure or one_host else secret_of_run(os.environ)
    if secret is None:
        raise ValueError(
            f"the ranks run on several hosts, and {SECRET_ENV} is not set: any process that reaches a port could take "
            f"a rank. Make a secret with {MAKE_SECRET}, copy it to every host, and set {SECRET_ENV}=~/apportion-secret "
            "there; or say env(insecure=True) where no other user reaches these hosts"
        )
    return secret


def _gather(place: _Place, size: int, secret: bytes, name: str, called_off: Stopped = _never) -> Meeting:
    """Learns, as rank 0, where every rank listens, and tells all of them."""
    meeting = Meeting(0, RankListener.at_first(place.of_rank_0(), secret), secret, name)
    try:
        place.tell(meeting._listener.address)
        reports, waiting = [_own(meeting)], []
        end = time.monotonic() + DEADLINE_SECONDS
        with contextlib.ExitStack() as stack:
            for other in range(1, size):
                sock, report = _reported(meeting, other, end, called_off)
                waiting.append(stack.enter_context(sock))
                reports.append(report)
            for sock in waiting:
                _send(sock, reports)
    except BaseException:
        meeting.close()
        raise
    _learn(meeting, reports)
    return meeting


def _reported(meeting: Meeting, rank: int, end: float, called_off: Stopped) -> tuple[socket.socket, Any]:
    """Waits for a rank to come to the meeting and to report where it listens. A rank whose connection ends before that
    dials again."""
    while True:
        sock = _taken(meeting, rank, end, called_off)
        try:
            sock.settimeout(REPORT_SECONDS)
            return sock, _receive(sock)
        except ConnectionError:
            sock.close()
            if time.monotonic() > end:
                raise
        except BaseException:
            sock.close()
            raise


def _taken(meeting: Meeting, rank: int, end: float, called_off: Stopped) -> socket.socket:
    """Waits for a rank to come to the meeting."""
    if called_off is _never:
        return meeting.take(rank, "meeting", called_off)
    while not called_off() and time.monotonic() < end:
        sock = meeting.poll(rank, "meeting", LOOK_SECONDS)
        if sock is not None:
            return sock
    raise PeerLost(f"rank {rank} is not there: the meeting was called off, or took over {DEADLINE_SECONDS:.0f} s")


def _report(place: _Place, rank: int, secret: bytes, name: str, called_off: Stopped = _never) -> Meeting:
    """Tells rank 0 where this one listens, and learns where the others do."""
    end = time.monotonic() + DEADLINE_SECONDS
    places = place.find_rank_0()
    while True:
        purpose = Purpose(f"{name}/meeting", rank)
        sock, first = dial_first(places, secret, purpose, end - time.monotonic(), called_off)
        with sock:
            meeting = Meeting(rank, RankListener(place.beside(sock, rank), secret), secret, name)
            try:
                sock.settimeout(max(0.1, end - time.monotonic()))
                _send(sock, _own(meeting))
                _await_words(sock, end, called_off)
                _learn(meeting, _receive(sock))
            except BaseException as error:
                meeting.close()
                # The listener of an earlier meeting at the same address lets a rank in as well, until it is closed.
                if not isinstance(error, ConnectionError) or time.monotonic() > end:
                    raise
            else:
                meeting.addresses[0] = first  # the one by which it was reached
                return meeting


def _await_words(sock: socket.socket, end: float, called_off: Stopped) -> None:
    """Waits until rank 0 says something. Raises PeerLost where the meeting is called off before."""
    while called_off is not _never and time.monotonic() < end and not is_readable(sock, LOOK_SECONDS):
        if called_off():
            raise PeerLost("the meeting was called off")


def _own(meeting: Meeting) -> dict[str, Any]:
    """Returns what the others receive about this rank."""
    address = meeting._listener.address
    return {"host": address.host, "port": address.port, "name": socket.gethostname()}


def _learn(meeting: Meeting, reports: Sequence[dict[str, Any]]) -> None:
    """Notes what every rank has reported of itself."""
    meeting.addresses = [Address(str(one["host"]), int(one["port"])) for one in reports]
    meeting.hosts = [str(one["name"]) for one in reports]


def _send(sock: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(read_exactly(sock, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ConnectionError(f"a message of {length} bytes is longer than a meeting's")
    return json.loads(read_exactly(sock, length))


def _say_waiting(rank: int, size: int) -> None:
    sys.stderr.write(
        f"rank {rank} of {size} has waited {PATIENCE_SECONDS:.0f} s for the others at {where()} and goes on waiting: "
        "does rank 0 run there, and was every rank started?\n"
    )
    sys.stderr.flush()


@final
class RankService:
    """The way to rank 0, and its own end of it. ``one_host`` and ``insecure`` as in a meeting."""

    def __init__(self, *, one_host: bool, insecure: bool) -> None:
        one_host = one_host or is_loopback(os.environ["MASTER_ADDR"])
        self.name = "/".join((*run_name(os.environ), "service"))
        """What connections to rank 0 are for."""
        self._place = OneHost(self.name) if one_host else SeveralHosts(self.name, DEADLINE_SECONDS)
        self._secret = key_of_meeting(secret_for(one_host=one_host, insecure=insecure), self.name)

    def listen(self) -> RankListener:
        """Listens, as rank 0, for ranks that come."""
        listener = RankListener.at_first(self._place.of_rank_0(), self._secret)
        self._place.tell(listener.address)
        return listener

    def dial(self, rank: int, seconds: float, stopped: Stopped) -> socket.socket:
        """Connects to rank 0 as this rank. Raises PeerLost where it is not there in this many seconds."""
        places = self._place.find_rank_0()
        return dial_first(places, self._secret, Purpose(self.name, rank), seconds, stopped)[0]


# The way to a rank that listens: trying until it is there, and the handshake as the end that dials makes it.


HANDSHAKE_SECONDS = 10.0
"""The seconds that a handshake may take, seen from the end that dials."""
REFUSED_SECONDS = 5.0
"""The seconds for which a rank tries again whose proof is refused: an earlier meeting may be closing."""
SEARCH_SECONDS = 60.0
"""The same where there are several addresses: another run may listen at one before rank 0 does at the next."""
_RETRY_SECONDS = 0.02, 0.3
"""The first and the longest pause between two tries to connect."""
_jitter = random.Random()
"""What spreads the tries of ranks that began at once; the generator that workloads draw from is left alone."""
Stopped = Callable[[], bool]
"""A function that says whether a wait is to end."""


def dial_rank(
    address: Address, secret: bytes, purpose: Purpose, seconds: float, stopped: Stopped = lambda: False
) -> socket.socket:
    """Connects to a rank that listens at an address, or will in this many seconds, and proves that this one knows the
    secret. Raises PeerLost where no rank answers in time, what answers does not know the secret, or ``stopped()``. A
    connection that the other end resets before the handshake is over is made again until then."""
    return dial_first([address], secret, purpose, seconds, stopped)[0]


class _Answer(Enum):
    """How a handshake ended."""

    PROVED = 1
    REFUSED = 2
    """The other end read the whole claim and hung up, or answered with what is not a proof."""
    INTERRUPTED = 3
    """The connection was reset, or nothing came in time: this says nothing about the secret."""


def dial_first(
    addresses: Sequence[Address],
    secret: bytes,
    purpose: Purpose,
    seconds: float,
    stopped: Stopped = lambda: False,
) -> tuple[socket.socket, Address]:
    """Connects as ``dial_rank`` does, but to a rank that listens at any one of some addresses, and returns that too."""
    end = time.monotonic() + seconds
    patience = REFUSED_SECONDS if len(addresses) == 1 else SEARCH_SECONDS
    pause, longest = _RETRY_SECONDS
    refused_since: float | None = None
    interrupted = 0
    why = ""
    while True:
        for address in addresses:
            if stopped():
                raise PeerLost(f"the connection to {address} was lost: it was closed here")
            left = max(0.1, end - time.monotonic())
            try:
                sock = dial(address, min(HANDSHAKE_SECONDS, left))
            except OSError as error:
                if refused_since is None and not interrupted:
                    why = f"nothing answers at {_written(addresses)} ({error})"
                continue
            answer = _shake_hands(sock, secret, purpose, min(HANDSHAKE_SECONDS, left))
            if answer is _Answer.PROVED:
                return sock, address
            sock.close()
            if answer is _Answer.INTERRUPTED:
                refused_since = None
                interrupted += 1
                why = (
                    f"{address} ended the connection of this rank {interrupted} times before the handshake was over: "
                    "something listens there, and is closing, or has more connections than it can hold"
                )
                continue
            refused_since = time.monotonic() if refused_since is None else refused_since
            why = (
                f"{address} did not let this rank in: {SECRET_ENV} must name a file with the same contents on every "
                "host, and the ranks must be of one run"
            )
            if time.monotonic() - refused_since > patience:
                raise PeerLost(why)
        if time.monotonic() + pause > end:
            raise PeerLost(why)
        time.sleep(pause * _jitter.uniform(0.5, 1.0))
        pause = min(2 * pause, longest)


def _written(addresses: Sequence[Address]) -> str:
    first, *others = addresses
    return f"{first} to {others[-1].port}" if others else str(first)


def _shake_hands(sock: socket.socket, secret: bytes, purpose: Purpose, seconds: float) -> _Answer:
    """Proves to the other end that this one knows the secret, and returns whether the other has proved it too."""
    sock.settimeout(seconds)
    has_claimed = False
    try:
        sock.sendall(hello(secret))
        greeting = read_exactly(sock, GREETING_BYTES)
        claimed = claim(secret, greeting, purpose.pack())
        sock.sendall(claimed)
        has_claimed = True
        proof = read_exactly(sock, PROOF_BYTES)
    except ConnectionEnded:  # not reset: the listener resets what it closes unread
        return _Answer.REFUSED if has_claimed else _Answer.INTERRUPTED
    except OSError:
        return _Answer.INTERRUPTED
    except ValueError:  # something else listens there
        return _Answer.REFUSED
    return _Answer.PROVED if is_proved(secret, greeting, claimed, proof) else _Answer.REFUSED


class ConnectionEnded(ConnectionResetError):
    """The other end has closed the connection in order."""


def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Returns this many bytes of a connection. Raises OSError where it ends before, and ConnectionEnded where it
    was closed in order."""
    data = b""
    while len(data) < count:
        got = sock.recv(count - len(data))
        if not got:
            raise ConnectionEnded("the connection ended")
        data += got
    return data
