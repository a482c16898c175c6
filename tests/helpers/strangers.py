"""Strangers: a program that finds every port at which some processes listen, as ``ss`` lists them, and connects to them
again and again, as somebody who was not asked.

It is started before what it attacks, so that it also sees ports that are open for a moment, and records the beginnings
of the connections that it sees, to replay them. It ends once it is told to.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OTHERS = ("torchrun", "torch.distributed.run", "sshd")
"""Words in the command of a process whose ports are not ours."""
HELD_SECONDS = 1.0
"""For connections that are held and say little, or nothing."""
HUGE = 8 << 20
AT_ONCE = 8
"""Visitors of each place."""
_ETH_IPV4 = 0x0800
_LISTED = re.compile(r"LISTEN\s+\d+\s+\d+\s+(\S+):(\d+)\s+\S+(?:\s+users:\(\((.*)\)\))?")


@dataclass(frozen=True)
class Told:
    """What the strangers of one place have found and done."""

    ports: dict[str, str]
    """Every port of ours that was seen, as ADDRESS:PORT, with the command of the process that listens there."""
    made: dict[str, int]
    """The connections that were made to each."""
    kinds: dict[str, int]
    """The same by kind."""
    answered: dict[str, str]
    """Where a connection was answered with more than a greeting, the kind, and the beginning of what came."""

    @property
    def connections(self) -> int:
        return sum(self.made.values())

    def everywhere(self) -> list[str]:
        """The ports at all addresses of the host."""
        return [port for port in self.ports if port.rpartition(":")[0] in ("0.0.0.0", "*", "[::]", "::")]


@dataclass
class Strangers:
    """Strangers that are under way."""

    process: subprocess.Popen[str]
    told: Path
    stop: Path

    def enough(self) -> bool:
        """Have they made as many connections as they were to?"""
        return self.told.with_suffix(".enough").exists()

    def end(self) -> Told:
        """Ends them, and returns what they have done."""
        self.stop.touch()
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, out + err
        return Told(**json.loads(self.told.read_text()))


@contextmanager
def strangers(folder: Path, *, count: int, root: int | None = None, within: Sequence[str] = ()) -> Any:
    """Starts strangers, who make at least so many connections where there is a port of ours at all. ``root``: only
    ports of this process and of those below it are ours; None: all of their network but those of OTHERS. ``within``:
    the words by which they are started in another network."""
    name = f"strangers-{len(list(folder.glob('strangers-*.json')))}-{random.randrange(1 << 30)}"
    told, stop = folder / f"{name}.json", folder / f"{name}.stop"
    command = [*within, sys.executable, __file__, str(count), str(root or 0), str(told), str(stop)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Strangers(process, told, stop)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


# The program


def listening(root: int) -> dict[tuple[str, int], str]:
    """The (address, port) of every port of ours, with the command of the process."""
    listed = subprocess.run(["ss", "-H", "-ltnp"], capture_output=True, text=True, check=True).stdout
    below = descendants(root) if root else None
    found = {}
    for address, port, users in _LISTED.findall(listed):
        pids = [int(pid) for pid in re.findall(r"pid=(\d+)", users)]
        words = {pid: command_of(pid) for pid in pids}
        # Whoever was just forked by one of OTHERS has its port too, until it runs a program of its own.
        if any(other in said for said in words.values() for other in OTHERS):
            continue
        own = [said for pid, said in words.items() if said and (below is None or pid in below)]
        if own:
            found[address, int(port)] = own[0]
    return found


def descendants(root: int) -> set[int]:
    """A process and all below it."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int(Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    return ""


class Eavesdropper:
    """Keeps the first bytes that were sent to each port by whoever has connected to it."""

    def __init__(self) -> None:
        self.heard: dict[int, list[bytes]] = {}
        self._seen: set[tuple[bytes, bytes]] = set()
        self._sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_IPV4))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            packet = self._sock.recv(1 << 16)
            ip = (packet[0] & 15) * 4
            if packet[9] != socket.IPPROTO_TCP:
                continue
            source, to = struct.unpack("!HH", packet[ip : ip + 4])
            said = packet[ip + (packet[ip + 12] >> 4) * 4 : struct.unpack("!H", packet[2:4])[0]]
            flow = packet[12:20], packet[ip : ip + 4]
            if said and flow not in self._seen and len(self._seen) < 10_000:
                self._seen.add(flow)
                self.heard.setdefault(to, []).append(said[:4096])
                self.heard.setdefault(source, [])


class Visitor:
    """One who connects. ``heard``: what others have said to the same port."""

    def __init__(self, heard: dict[int, list[bytes]], number: int) -> None:
        self._heard, self._draws = heard, random.Random(number)
        self._held: list[tuple[float, socket.socket]] = []
        self.made: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.answered: dict[str, str] = {}
        self._number = 0

    def visit(self, address: str, port: int) -> None:
        """Connects once, in one way or another."""
        self._number += 1
        kinds = ("nothing", "random", "http", "zeros", "replayed", "not asked", "held", "trickle")
        kind = kinds[self._number % len(kinds)]
        if self._number % 500 == 0:
            kind = "huge"
        if self._number % 1000 == 1:
            kind = "torch's store client"
        self._release()
        host = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(address, address.strip("[]"))
        host = host.partition("%")[0]
        with suppress(OSError, RuntimeError, ValueError):
            if kind == "torch's store client":
                # What answers nothing that it knows holds torch's client for minutes.
                threading.Thread(target=self._store, args=(host, port), daemon=True).start()
            else:
                self._say(kind, socket.create_connection((host, port), 5), port)
            self.made[f"{address}:{port}"] += 1
            self.kinds[kind] += 1

    def _say(self, kind: str, sock: socket.socket, port: int) -> None:
        sock.settimeout(5)
        recorded = self._heard.get(port) or [b""]
        said = {
            "random": self._draws.randbytes(self._draws.randrange(1, 600)),
            "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            "zeros": bytes(132),
            "replayed": self._draws.choice(recorded),
            "not asked": b"",
            "huge": bytes(HUGE),
        }.get(kind, b"")
        if kind in ("held", "trickle"):
            if kind == "trickle":
                sock.sendall(b"\x16")
            self._held.append((time.monotonic() + HELD_SECONDS, sock))
            return
        with sock:
            if kind == "not asked":
                from apportion.comm.network.handshake import GREETING_BYTES, Purpose, claim

                sock.settimeout(0.5)
                greeting = sock.recv(GREETING_BYTES)
                said = claim(b"another secret, of 32 characters", greeting, Purpose("world/0", 1).pack())
            sock.sendall(said)
            if kind in ("replayed", "not asked"):
                sock.settimeout(0.2)
                got = sock.recv(1024)
                while got and len(got) <= 44 and (more := sock.recv(1024)):
                    got += more
                if len(got) > 44:  # more than the greeting
                    self.answered[f"{kind} at {port}"] = got[:60].hex()

    def _store(self, host: str, port: int) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        client: Any = dist
        wait = timedelta(seconds=0.2)
        with suppress(OSError, RuntimeError, ValueError):
            store = client.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False)
            store.set("anything", b"x" * 1000)
            self.answered[f"torch's store client at {port}"] = "a store"

    def _release(self) -> None:
        now = time.monotonic()
        while self._held and self._held[0][0] < now:
            self._held.pop(0)[1].close()


def main() -> None:
    """Attacks until it is told to stop."""
    count, root, told, stop = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    ear = Eavesdropper()
    visitors = [Visitor(ear.heard, number) for number in range(AT_ONCE)]
    now: dict[tuple[str, int], str] = {}
    ports: dict[tuple[str, int], str] = {}

    def visit(visitor: Visitor) -> None:
        while not stop.exists():
            for address, port in list(now) * 10:
                visitor.visit(address, port)
            time.sleep(0.01 if now else 0.05)

    threads = [threading.Thread(target=visit, args=(visitor,)) for visitor in visitors]
    for thread in threads:
        thread.start()
    while not stop.exists():
        now = listening(root)
        ports.update(now)
        if sum(visitor.made.total() for visitor in visitors) >= count:
            told.with_suffix(".enough").touch()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    found = {
        "ports": {f"{address}:{port}": words for (address, port), words in ports.items()},
        "made": sum((visitor.made for visitor in visitors), Counter()),
        "kinds": sum((visitor.kinds for visitor in visitors), Counter()),
        "answered": {where: what for visitor in visitors for where, what in visitor.answered.items()},
    }
    told.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # torch's clients may still wait


if __name__ == "__main__":
    main()
