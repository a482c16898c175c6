"""Hosts on this machine: a network namespace each, joined by cables of any rate. Needs root.

Two are joined by one cable, more of them by a switch. What runs in one reaches the others over the cables alone:
`command` and `environment` start it there as torchrun would.
"""

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

AT_ONCE = 1 << 14
"""Bytes that are handed to a cable at once, to be cut into packets there, as network cards do."""
BURST_SECONDS, LEAST_BURST = 1e-3, 18_000
"""What may go at once after a pause: so much of the rate, and bytes: AT_ONCE and the packets' headers. tbf cuts in
software what is larger than it lets go at once, and the processor would be busy with what a card does."""
QUEUE_SECONDS = 0.1
END_SECONDS = 10.0
"""For a process that was killed to be gone."""
FIRST_PORT = 29_600
"""Below those that the system gives to whoever asks for any."""


def cannot():
    """Why there can be no two hosts here, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux: network namespaces stand for hosts"
    for name, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(name) is None:
            return f"needs {package}'s {name}: network namespaces stand for hosts"
    if len(os.sched_getaffinity(0)) < 2:
        return "needs two cores: hosts share them in turn"
    probe = f"apportion-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return None


@dataclass(frozen=True)
class Hosts:
    """Where the processes of some hosts are."""

    names: tuple[str, ...]
    """Of the namespaces."""
    cables: tuple[tuple[str, str], ...]
    """The (namespace, device) of every end of a cable."""
    addresses: tuple[str, ...]
    cores: tuple[int, ...]
    ranks: tuple[int, ...]
    """Of each host."""
    secret: str
    """The file that holds the secret of their runs."""
    _ports: itertools.count = field(default_factory=lambda: itertools.count(FIRST_PORT))

    def port(self):
        """One that nobody here was given yet."""
        return next(self._ports)

    def host(self, rank):
        """The (number, local rank) of a rank: those of a host come one after the other."""
        first = 0
        for number, many in enumerate(self.ranks):
            if rank < first + many:
                return number, rank - first
            first += many
        raise ValueError(f"rank {rank} of {first}")

    def command(self, rank, command):
        """The same on the host of a rank, on its core."""
        number, _ = self.host(rank)
        where = ["ip", "netns", "exec", self.names[number], "taskset", "-c", str(self.cores[number])]
        return [*where, *command]

    def environment(self, rank, ranks, port):
        """torchrun's variables; rank 0's host is the first."""
        number, local_rank = self.host(rank)
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "MASTER_PORT": port}
        place |= {"LOCAL_WORLD_SIZE": self.ranks[number]}
        given = {"MASTER_ADDR": self.addresses[0], "APPORTION_SECRET_FILE": self.secret}
        return {**given, "GLOO_SOCKET_IFNAME": "cable", **{name: str(number) for name, number in place.items()}}

    def set_rate(self, bits_per_second):
        """Of the cables from now on, in each direction; None: as fast as the machine copies."""
        for name, end in self.cables:
            if bits_per_second is None:
                _run("tc", "-n", name, "qdisc", "del", "dev", end, "root", may_fail=True)  # there may be none
                continue
            burst = max(LEAST_BURST, round(bits_per_second / 8 * BURST_SECONDS))
            limit = round(bits_per_second / 8 * QUEUE_SECONDS) + burst
            shape = ["tbf", "rate", f"{round(bits_per_second)}bit", "burst", str(burst), "limit", str(limit)]
            _run("tc", "-n", name, "qdisc", "replace", "dev", end, "root", *shape)

    def set_plugged(self, number, plugged):
        """Lets nothing through the cable of a host, neither way, or all again; for three hosts and more, whose cables
        end in a switch."""
        switch, end = self.cables[len(self.names) + number]
        _run("ip", "-n", switch, "link", "set", "dev", end, "up" if plugged else "down")

    def sent(self):
        """The bytes that each host has sent over its cable so far."""
        return [
            int(_run("ip", "netns", "exec", name, "cat", "/sys/class/net/cable/statistics/tx_bytes"))
            for name in self.names
        ]


@contextlib.contextmanager
def two_hosts(bits_per_second=None):
    """Two of them, of one rank each, see `several_hosts`."""
    with several_hosts((1, 1), bits_per_second) as hosts:
        yield hosts


@contextlib.contextmanager
def several_hosts(ranks, bits_per_second=None):
    """Hosts of so many ranks each, joined at that rate; all that was made and all that runs there is gone afterwards,
    also after an error, Ctrl-C or SIGTERM."""
    _sweep()
    prefix, count = f"apportion-{os.getpid()}", len(ranks)
    cores = sorted(os.sched_getaffinity(0))[:2]
    names = tuple(f"{prefix}-{chr(ord('a') + number)}" for number in range(count))
    switch = f"{prefix}-switch"
    ends = [(name, "cable") for name in names]
    ends += [(switch, f"port{number}") for number in range(count)] if count > 2 else []
    secret = _secret_file(os.getpid())
    with _ended_by_a_signal():
        hosts = Hosts(
            names=names,
            cables=tuple(ends),
            addresses=tuple(f"10.123.46.{number + 1}" for number in range(count)),
            cores=tuple(cores[number % 2] for number in range(count)),
            ranks=tuple(ranks),
            secret=str(secret),
        )
        try:
            secret.touch(mode=0o600)
            secret.write_text(secrets.token_hex(32))
            _join(hosts, switch)
            hosts.set_rate(bits_per_second)
            yield hosts
        finally:
            for name in (*names, switch):
                _remove(name)
            secret.unlink(missing_ok=True)


def _join(hosts, switch):
    for name in hosts.names:
        _run("ip", "netns", "add", name)
    if len(hosts.names) > 2:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        others = [(switch, f"port{number}") for number in range(len(hosts.names))]
        pairs = list(zip([(name, "cable") for name in hosts.names], others, strict=True))
    else:
        pairs = [tuple((name, "cable") for name in hosts.names)]
    for (name, end), (other, port) in pairs:
        _run("ip", "-n", name, "link", "add", end, "type", "veth", "peer", "name", port, "netns", other)
        if other == switch:
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
        for where, device in ((name, end), (other, port)):  # connections look at the size once
            _run("ip", "-n", where, "link", "set", device, "up", "gso_max_size", str(AT_ONCE))
    for name, address in zip(hosts.names, hosts.addresses, strict=True):
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
        _run("ip", "-n", name, "link", "set", "lo", "up")


def _remove(name):
    """A namespace, with all that runs in it."""
    if not Path("/run/netns", name).exists():
        return
    end = time.monotonic() + END_SECONDS
    while (pids := _run("ip", "netns", "pids", name, may_fail=True).split()) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
    _run("ip", "netns", "del", name, may_fail=True)


def _sweep():
    """Remove what a process has left that was killed before it could."""
    for path in Path("/run/netns").glob("apportion-*-*"):
        number = path.name.split("-")[1]
        if number.isdigit() and not Path("/proc", number).exists():
            _remove(path.name)
    for path in Path(tempfile.gettempdir()).glob("apportion-*-secret"):
        number = path.name.split("-")[1]
        if number.isdigit() and not Path("/proc", number).exists():
            path.unlink(missing_ok=True)


def _secret_file(number):
    """Of a process that makes hosts."""
    return Path(tempfile.gettempdir(), f"apportion-{number}-secret")


@contextlib.contextmanager
def _ended_by_a_signal():
    """SIGTERM ends this process as Ctrl-C does: what it has made is removed on the way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(*command, may_fail=False):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 and not may_fail:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
