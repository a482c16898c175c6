"""Two hosts of one core each, on this machine: a network namespace each, joined by a cable of any rate. Needs root.

What runs in one reaches the other over the cable alone: `command` and `environment` start it there as torchrun would.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
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
        return "needs root on Linux: two network namespaces stand for two hosts"
    for name, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(name) is None:
            return f"needs {package}'s {name}: two network namespaces stand for two hosts"
    if len(os.sched_getaffinity(0)) < 2:
        return "needs two cores: one for each of two hosts"
    probe = f"apportion-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return None


@dataclass(frozen=True)
class Hosts:
    """Where the processes of two hosts are."""

    names: tuple[str, str]
    """Of the namespaces."""
    cable: tuple[str, str]
    """Its end in each."""
    addresses: tuple[str, str]
    cores: tuple[int, int]
    _ports: itertools.count = field(default_factory=lambda: itertools.count(FIRST_PORT))

    def port(self):
        """One that nobody here was given yet."""
        return next(self._ports)

    def command(self, host, command):
        """The same on a host, on its core."""
        where = ["ip", "netns", "exec", self.names[host], "taskset", "-c", str(self.cores[host])]
        return [*where, *command]

    def environment(self, rank, ranks, port):
        """torchrun's variables, one process a host; rank 0's host is the first."""
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        return {"MASTER_ADDR": self.addresses[0], **{name: str(number) for name, number in place.items()}}

    def set_rate(self, bits_per_second):
        """Of the cable from now on, in each direction; None: as fast as the machine copies."""
        for name, end in zip(self.names, self.cable, strict=True):
            if bits_per_second is None:
                _run("tc", "-n", name, "qdisc", "del", "dev", end, "root", may_fail=True)  # there may be none
                continue
            burst = max(LEAST_BURST, round(bits_per_second / 8 * BURST_SECONDS))
            limit = round(bits_per_second / 8 * QUEUE_SECONDS) + burst
            shape = ["tbf", "rate", f"{round(bits_per_second)}bit", "burst", str(burst), "limit", str(limit)]
            _run("tc", "-n", name, "qdisc", "replace", "dev", end, "root", *shape)


@contextlib.contextmanager
def two_hosts(bits_per_second=None):
    """Two of them, joined at that rate; all that was made and all that runs there is gone afterwards, also after an
    error, Ctrl-C or SIGTERM."""
    _sweep()
    number = os.getpid()
    first, second = sorted(os.sched_getaffinity(0))[:2]
    hosts = Hosts(
        names=(f"apportion-{number}-a", f"apportion-{number}-b"),
        cable=(f"ap{number}a", f"ap{number}b"),
        addresses=("10.123.46.1", "10.123.46.2"),
        cores=(first, second),
    )
    with _ended_by_a_signal():
        try:
            _join(hosts)
            hosts.set_rate(bits_per_second)
            yield hosts
        finally:
            for name in hosts.names:
                _remove(name)
            _run("ip", "link", "del", hosts.cable[0], may_fail=True)  # where it never moved


def _join(hosts):
    for name in hosts.names:
        _run("ip", "netns", "add", name)
    _run("ip", "link", "add", hosts.cable[0], "type", "veth", "peer", "name", hosts.cable[1])
    for name, end, address in zip(hosts.names, hosts.cable, hosts.addresses, strict=True):
        _run("ip", "link", "set", end, "netns", name)
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
        _run("ip", "-n", name, "link", "set", end, "up", "gso_max_size", str(AT_ONCE))  # connections look at it once
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
    for path in Path("/run/netns").glob("apportion-*-[ab]"):
        number = path.name.split("-")[1]
        if number.isdigit() and not Path("/proc", number).exists():
            _remove(path.name)


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
