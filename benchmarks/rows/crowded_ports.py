"""Ranks that join while strangers take their ports, and hundreds of ranks at one port at once, on loopback.

    python benchmarks/rows/crowded_ports.py    # 300 strangers a second for 60 s, 64 ranks; then 600 ranks
    python benchmarks/rows/crowded_ports.py --seconds 5 --at-once 200

Strangers connect to every port at which this process listens, and say nothing, a little, HTTP, a claim of random bytes,
or what a rank has sent before; three of four stay until they are hung up on. Meanwhile ranks meet, again and again, and
each exchanges a sum with all others over connections of its own. The end has status 1 where a rank was not let in.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch

from apportion.comm.network import rendezvous
from apportion.comm.network.address import Address
from apportion.comm.network.handshake import CLAIM_BYTES, SECRET_ENV, Purpose, claim, hello
from apportion.comm.network.network_group import NetworkGroup
from apportion.comm.network.rank_listener import RankListener
from apportion.comm.network.rendezvous import meet_again

KINDS = ("silent", "a little", "http", "random claim", "recorded hello", "recorded claim")
HELD_SECONDS = 8.0
LOOK_SECONDS = 1.0
_LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def listening_ports(pid):
    """The ports at which a process listens."""
    own = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS and f"socket:[{row[9]}]" in own]


def visit(port, kind, recorded):
    """Connects as a stranger, and returns the connection, or None where the port is gone."""
    words = {
        "silent": b"",
        "a little": b"apportion/",
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "random claim": os.urandom(CLAIM_BYTES),
        "recorded hello": recorded[0],
        "recorded claim": recorded[0] + recorded[1],
    }
    try:
        sock = socket.create_connection(("127.0.0.1", port), 1)
        sock.sendall(words[kind])
    except OSError:
        return None
    return sock


def strangers(pid, rate, recorded, stop, made):
    """Connects ``rate`` times a second, until ``stop`` is set."""
    draws, held, began, count = random.Random(0), [], time.monotonic(), 0
    ports, looked = [], 0.0
    while not stop.is_set():
        if time.monotonic() > looked + LOOK_SECONDS:
            ports, looked = listening_ports(pid), time.monotonic()
        if not ports:
            began, count = time.monotonic(), 0
            time.sleep(0.01)
            continue
        for _ in range(max(0, min(rate // 10, int((time.monotonic() - began) * rate) - count))):
            sock = visit(draws.choice(ports), KINDS[count % len(KINDS)], recorded)
            count += 1
            if sock is None:
                continue
            made.value += 1
            if count % 4:
                held.append((time.monotonic(), sock))
            else:
                sock.close()
        while held and held[0][0] < time.monotonic() - HELD_SECONDS:
            held.pop(0)[1].close()
        time.sleep(0.01)


def joined(size, address, generation):
    """Lets ``size`` ranks meet and exchange a sum, and returns what went wrong, by rank."""
    wrong = {}

    def rank(number):
        try:
            meeting = meet_again(number, size, address, generation, called_off=lambda: False)
            group = NetworkGroup(meeting, range(size))
            total = torch.tensor([1.0])
            group.all_reduce(total).wait()
            group.barrier()
            group.close()
            meeting.close()
            if total.item() != size:
                wrong[number] = f"the sum is {total.item()}"
        except Exception as error:
            wrong[number] = f"{type(error).__name__}: {error}"

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    return wrong


def join_among_strangers(seconds, rate, size):
    """Lets ranks meet again and again among strangers, and prints how that went. Returns whether all were let in."""
    context = multiprocessing.get_context("spawn")
    secret = bytes(Path(os.environ[SECRET_ENV]).read_bytes()).strip()
    stop, made = context.Event(), context.Value("q", 0)
    recorded = hello(secret), claim(secret, b"apportion/1\n" + bytes(32), Purpose("run", 1).pack())
    crowd = context.Process(target=strangers, args=(os.getpid(), rate, recorded, stop, made), daemon=True)
    crowd.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = Address("127.0.0.1", free.getsockname()[1])
    # One listener is there all the time, as that of a rank which waits for one more
    waiting = RankListener(Address("127.0.0.1", -1), secret)
    while made.value == 0:
        time.sleep(0.01)
    began, first, joins, slowest, wrong = time.monotonic(), made.value, 0, 0.0, Counter()
    while time.monotonic() < began + seconds:
        since = time.monotonic()
        wrong.update(joined(size, address, 2 * joins + 2).values())
        late = threading.Thread(target=rendezvous.dial_rank, args=(waiting.address, secret, Purpose("late", joins), 30))
        late.start()
        waiting.take("late", joins, 30).close()
        late.join()
        slowest = max(slowest, time.monotonic() - since)
        joins += 1
    took = time.monotonic() - began
    print(
        f"{joins} meetings of {size} ranks in {took:.0f} s among {(made.value - first) / took:.0f} strangers a second: "
        f"the slowest took {slowest:.2f} s, {sum(wrong.values())} ranks were not let in, the listener's thread is "
        f"{'alive' if waiting._thread.is_alive() else 'gone'}"
    )
    for why, count in wrong.most_common(3):
        print(f"    {count} times: {why}")
    stop.set()
    crowd.join(10)
    fine = not wrong and waiting._thread.is_alive()
    waiting.close()
    return fine


def join_at_once(size, away):
    """Lets ``size`` ranks dial one listener at once, each of them ``away`` seconds away. Returns whether all were let
    in."""
    secret, wrong, kept = b"s" * 32, Counter(), []
    listener = RankListener(Address("127.0.0.1", -1), secret)
    near = rendezvous.claim

    def far(*given):
        time.sleep(away)
        return near(*given)

    def rank(number):
        try:
            kept.append(rendezvous.dial_rank(listener.address, secret, Purpose("group", number), 60))
        except Exception as error:
            wrong[str(error)] += 1

    rendezvous.claim = far
    began = time.monotonic()
    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    rendezvous.claim = near
    print(
        f"{len(listener.ready('group'))} of {size} ranks at once, {away:g} s away, are in after "
        f"{time.monotonic() - began:.2f} s"
    )
    for why, count in wrong.most_common(3):
        print(f"    {count} times: {why}")
    fine = len(listener.ready("group")) == size and listener._thread.is_alive()
    for sock in kept:
        sock.close()
    listener.close()
    return fine


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--rate", type=int, default=300, help="strangers a second")
    arguments.add_argument("--ranks", type=int, default=64)
    arguments.add_argument("--at-once", type=int, default=600)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as file:  # of mode 600
        file.write(secrets.token_hex(32).encode())
        file.flush()
        os.environ[SECRET_ENV] = file.name
        with contextlib.redirect_stderr(io.StringIO()):  # where each listener names the first stranger that it refuses
            fine = [join_among_strangers(given.seconds, given.rate, given.ranks)]
        fine += [join_at_once(given.at_once, away) for away in (0.0, 0.3)]
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
