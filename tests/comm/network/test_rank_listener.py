"""The place where ranks connect, and what strangers can do there: nothing."""

from __future__ import annotations

import gc
import os
import random
import resource
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from apportion.comm.network import rank_listener as listener_file
from apportion.comm.network import rendezvous
from apportion.comm.network.address import Address
from apportion.comm.network.handshake import CLAIM_BYTES, GREETING_BYTES, HELLO_BYTES, Purpose, claim, hello
from apportion.comm.network.rank_connection import RankConnection
from apportion.comm.network.rank_listener import MOST_PENDING, PendingHandshake, RankListener
from apportion.comm.network.rendezvous import dial_rank
from apportion.errors import PeerLost

SECRET = b"s" * 32
PURPOSE = Purpose("run/world", 1)


@pytest.fixture
def listening() -> Iterator[RankListener]:
    listener = RankListener(Address("127.0.0.1", -1), SECRET)
    yield listener
    listener.close()


def connect(listener: RankListener) -> socket.socket:
    return socket.create_connection((listener.address.host, listener.address.port), 5)


def greeting_of(sock: socket.socket) -> bytes:
    got = b""
    while len(got) < GREETING_BYTES:
        got += sock.recv(GREETING_BYTES - len(got))
    return got


def is_ended(sock: socket.socket) -> bool:
    """Whether the other end hangs up, having said nothing more."""
    sock.settimeout(10)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def assert_lets_a_rank_in(listener: RankListener) -> None:
    with dial_rank(listener.address, SECRET, PURPOSE, 10) as ours, listener.take("run/world", 1, 10) as theirs:
        ours.sendall(b"hello")
        theirs.settimeout(5)
        assert theirs.recv(5) == b"hello"


def test_a_rank_that_knows_the_secret_is_let_in(listening: RankListener) -> None:
    assert_lets_a_rank_in(listening)
    assert listening.address.host == "127.0.0.1", "and listens at no other address"


def test_a_rank_that_dials_again_takes_the_place_of_its_first_connection(listening: RankListener) -> None:
    first, second = (dial_rank(listening.address, SECRET, PURPOSE, 10) for _ in range(2))
    with first, second:
        assert is_ended(first)
        with listening.take("run/world", 1, 5) as theirs:
            theirs.sendall(b"x")
            assert second.recv(1) == b"x"


def test_one_with_another_secret_is_not_let_in_and_both_ends_are_told_why(
    listening: RankListener, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "REFUSED_SECONDS", 0.2)
    with pytest.raises(
        PeerLost, match="did not let this rank in: APPORTION_SECRET_FILE must name a file with the same"
    ):
        dial_rank(listening.address, b"another secret, of 32 characters", PURPOSE, 10)
    with pytest.raises(PeerLost, match="rank 1 is not there: it did not connect in 0 s"):
        listening.take("run/world", 1, 0.1)
    assert listening.refused > 0
    assert capfd.readouterr().err.count("127.0.0.1 was not let in at 127.0.0.1:") == 1, "once"


def test_a_listener_that_does_not_know_the_secret_is_found_out(
    listening: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "REFUSED_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def pretend() -> None:  # says what a rank would, without the secret
            server.settimeout(0.1)
            while not stop.is_set():
                try:
                    sock, _ = server.accept()
                except TimeoutError:
                    continue
                with sock, connect(listening) as real:  # even with a greeting of the real one
                    sock.sendall(greeting_of(real))
                    sock.settimeout(2)
                    try:
                        sock.recv(CLAIM_BYTES)
                        sock.sendall(os.urandom(32))
                    except OSError:
                        pass

        thread = threading.Thread(target=pretend)
        thread.start()
        try:
            with pytest.raises(PeerLost, match="did not let this rank in"):
                dial_rank(Address("127.0.0.1", server.getsockname()[1]), SECRET, PURPOSE, 10)
        finally:
            stop.set()
            thread.join()


def test_a_recorded_claim_lets_nobody_in(listening: RankListener) -> None:
    with connect(listening) as sock:
        recorded = claim(SECRET, greeting_of(sock), PURPOSE.pack())
        sock.sendall(recorded)
        listening.take("run/world", 1, 5).close()
    with connect(listening) as sock:
        greeting_of(sock)
        sock.sendall(recorded)
        assert is_ended(sock)
    assert listening.refused == 1


def test_whoever_says_nothing_is_hung_up_on(listening: RankListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_file, "PENDING_SECONDS", 0.2)
    with connect(listening) as sock:
        greeting_of(sock)
        sock.sendall(b"x")  # and one that says a little
        assert is_ended(sock)
    assert_lets_a_rank_in(listening)


def visit(listener: RankListener, kind: int, draws: random.Random) -> None:
    """Connects as a stranger, and says something or nothing."""
    said = (
        draws.randbytes(draws.randrange(1, 4 * CLAIM_BYTES)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x15apport" + bytes(CLAIM_BYTES),  # a long claim of zeros
        b"",
    )
    with connect(listener) as sock:
        try:
            sock.sendall(said[kind])
            sock.shutdown(socket.SHUT_WR)
        except OSError:  # it was hung up on
            pass


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


@pytest.mark.thorough
def test_ten_thousand_strangers_neither_get_in_nor_keep_a_rank_out(listening: RankListener) -> None:
    draws, before, memory = random.Random(0), descriptors(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end = time.monotonic() + 60
    for number in range(10_000):
        visit(listening, number % 4, draws)
        if number % 1000 == 0:
            assert_lets_a_rank_in(listening)
        assert time.monotonic() < end
    with ExitStack() as held:
        for _ in range(3 * MOST_PENDING):  # who stay
            held.enter_context(connect(listening))
        assert_lets_a_rank_in(listening)
        with pytest.raises(PeerLost):
            listening.take("run/world", 1, 0.1)
    gc.collect()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 << 10  # KiB
    listening.close()
    assert descriptors() <= before


def test_a_wait_for_a_rank_ends_when_the_listener_is_closed(listening: RankListener) -> None:
    threading.Timer(0.2, listening.close).start()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="it was closed here"):
        listening.take("run/world", 1, 30)
    assert time.monotonic() - began < 5


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, who can become another user")
def test_another_user_of_the_host_is_hung_up_on() -> None:
    name = f"test-{os.getpid()}"
    listener = RankListener(Address(name, 0), SECRET)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # a thread listens, which the child does without
                pid = os.fork()
            if pid == 0:  # nothing of this process but the connection, as another user
                os.setuid(65534)
                sock.connect(f"\0apportion/0/{name}")
                os._exit(0 if is_ended(sock) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "it was greeted"
        assert_lets_a_rank_in(listener)
    finally:
        listener.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="Linux lets a connection choose")
def test_a_connection_of_a_local_network_has_a_congestion_control_for_bursts(listening: RankListener) -> None:
    with dial_rank(listening.address, SECRET, PURPOSE, 10) as sock:
        RankConnection(sock, "rank 0")
        chosen = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    assert chosen in (b"cubic", b"reno")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankListener]:
    """A listener that holds few handshakes at once."""
    monkeypatch.setattr(listener_file, "MOST_PENDING", 8)
    listener = RankListener(Address("127.0.0.1", -1), SECRET)
    yield listener
    listener.close()


def test_a_stranger_that_hangs_up_while_it_is_closed_for_another_ends_nothing(small: RankListener) -> None:
    for _ in range(30):
        strangers = [connect(small) for _ in range(8)]
        greeting_of(strangers[-1])  # all of them wait now
        last = connect(small)
        strangers[0].close()
        for stranger in (*strangers, last):
            stranger.close()
    assert_lets_a_rank_in(small)


def test_no_connection_is_closed_while_there_is_room_for_it(small: RankListener) -> None:
    with ExitStack() as held:
        strangers = [held.enter_context(connect(small)) for _ in range(8)]
        for stranger in strangers:
            greeting_of(stranger)
            stranger.settimeout(0.02)
        for stranger in strangers:
            with pytest.raises(TimeoutError):
                stranger.recv(1)


def test_strangers_beyond_the_limit_are_closed_at_once(small: RankListener) -> None:
    began = time.monotonic()
    with ExitStack() as held:
        strangers = [held.enter_context(connect(small)) for _ in range(20)]
        greeting_of(strangers[-1])
        for stranger in strangers[:12]:
            stranger.settimeout(5)
            with suppress(ConnectionResetError):
                while stranger.recv(GREETING_BYTES):  # the greeting comes first
                    pass
    assert time.monotonic() - began < listener_file.PENDING_SECONDS / 2


@pytest.mark.thorough
def test_where_all_that_wait_are_ranks_another_waits_in_the_queue(small: RankListener) -> None:
    with ExitStack() as held:
        ranks = [held.enter_context(connect(small)) for _ in range(8)]
        for rank in ranks:
            rank.sendall(hello(SECRET))
        for rank in ranks:
            greeting_of(rank)
        last = held.enter_context(connect(small))
        last.sendall(hello(SECRET))
        last.settimeout(0.2)
        with suppress(TimeoutError):  # one may be accepted before the hellos are read
            greeting_of(last)
        more = held.enter_context(connect(small))
        for waiting in (more, *ranks):
            waiting.settimeout(0.1)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
        for rank in ranks[:2]:
            rank.close()
        more.settimeout(5.0)
        assert greeting_of(more)


def dial_all(listener: RankListener, count: int, away: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets ``count`` ranks dial at once, each of them ``away`` seconds away, and returns the errors of those that are
    not let in."""
    near, errors = rendezvous.claim, []
    kept: list[socket.socket] = []

    def far(secret: bytes, greeting: bytes, purpose: bytes) -> bytes:
        time.sleep(away)
        return near(secret, greeting, purpose)

    def dial(rank: int) -> None:
        try:
            kept.append(dial_rank(listener.address, SECRET, Purpose("run/world", rank), 30))
        except PeerLost as error:
            errors.append(str(error))

    def reset(pending: PendingHandshake) -> None:
        resets.append(pending.is_rank)
        closing(pending)

    resets: list[bool] = []
    closing = listener._reset
    monkeypatch.setattr(listener, "_reset", reset)
    monkeypatch.setattr(rendezvous, "claim", far)
    ranks = [threading.Thread(target=dial, args=(rank,)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert listener.ready("run/world") == list(range(count)), errors
    assert not any(resets), "no connection is closed that has sent a hello"
    for sock in kept:
        sock.close()
    return errors


def test_two_hundred_ranks_that_dial_at_once_from_afar_are_all_let_in(
    listening: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dial_all(listening, 200, 0.3, monkeypatch) == []


def test_more_ranks_than_a_listener_holds_at_once_wait_for_each_other(
    small: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dial_all(small, 40, 0.05, monkeypatch) == []


def test_strangers_make_room_and_ranks_do_not(small: RankListener, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()

    def crowd() -> None:
        with ExitStack() as held:
            while not stop.wait(0.002):
                held.enter_context(connect(small))

    strangers = threading.Thread(target=crowd)
    strangers.start()
    try:
        assert dial_all(small, 6, 0.3, monkeypatch) == []
    finally:
        stop.set()
        strangers.join()


def test_a_hello_that_was_recorded_makes_no_rank_of_a_stranger(small: RankListener) -> None:
    recorded = hello(SECRET)
    assert len(recorded) == HELLO_BYTES
    with ExitStack() as held:
        first, again = (held.enter_context(connect(small)) for _ in range(2))
        for sock in (first, again):
            sock.sendall(recorded)
            greeting_of(sock)
        time.sleep(0.1)  # until it has been read: nothing answers it
        for _ in range(8):
            greeting_of(held.enter_context(connect(small)))
        assert is_ended(again)
        first.sendall(b"x")
        first.settimeout(0.1)
        with pytest.raises(TimeoutError):  # it still waits, as a rank
            first.recv(1)


def test_a_rank_whose_connection_is_reset_dials_again_and_its_secret_is_not_blamed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()
        server.settimeout(0.1)
        resets = 0

        def reset() -> None:
            nonlocal resets
            while not stop.is_set():
                try:
                    sock, _ = server.accept()
                except TimeoutError:
                    continue
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, listener_file._RESET)
                sock.close()
                resets += 1

        thread = threading.Thread(target=reset)
        thread.start()
        try:
            with pytest.raises(PeerLost, match=r"ended the connection of this rank \d+ times before") as lost:
                dial_rank(Address("127.0.0.1", server.getsockname()[1]), SECRET, PURPOSE, 1.0)
        finally:
            stop.set()
            thread.join()
    assert resets > 2
    assert "APPORTION_SECRET_FILE" not in str(lost.value)


def test_what_goes_wrong_with_one_connection_ends_that_one_alone(
    listening: RankListener, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(rank: int, sock: socket.socket) -> None:
        raise RuntimeError("a defect")

    listening.hand_over("run/defect", fails)
    with dial_rank(listening.address, SECRET, Purpose("run/defect", 1), 10) as sock:
        assert is_ended(sock)
    assert_lets_a_rank_in(listening)
    assert "RuntimeError: a defect" in capfd.readouterr().err
