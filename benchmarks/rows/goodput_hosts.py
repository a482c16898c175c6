"""Training on two hosts that keeps losing workers, and a cable: what is left of its speed.

    python benchmarks/rows/goodput_hosts.py --json FILE [--only id,...] [--seconds 120] [--rounds 3]
                                                 [--timeouts 5,10,30]

goodput_hosts       useful examples/s of data_parallel under ssh() while a worker on one of two hosts is killed by
                    SIGKILL every 20 s, against DDP over gloo that saves every 20 steps (peers/ddp_saving.py) and is
                    restarted by torchrun (--max-restarts, rendezvous c10d).
goodput_hosts_cut   the same, and half-way the second host's cable is cut for 10 s: the port of the switch is down.

Needs root, sshd and CIFAR-10. `--seconds 40 --rounds 1 --timeouts 10` takes four minutes; one cable cut in ten minutes
of kills is `--seconds 600 --only goodput_hosts_cut`.

What the figure is made of. The CIFAR-10 tutorial network, global batch 128, a rank of one thread on each host; hosts
are network namespaces with a core each and cables of 1 Gb/s, joined by a switch. The ranks note every update
(noted.py). Useful are the examples of the updates that are in the final state: those that the network has behind it,
or for the peer, where it is down at the end, those that are saved. A round is a run of its own of either side, in turn,
and counts from some seconds after its first step; the rank that is killed is chosen by chance of those that are in the
run. The peer has one run a round for each of gloo's timeouts, and the best of them counts. A torchrun that has ended is
started again at once, and the checkpoints of the peer are on a disk that both hosts see: both are more than it has by
itself. So is TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which is set for it: without that the ranks of a restart found the
addresses of those before them in the store (torch 2.13), and most restarts on two hosts hung.

torchrun's restarts may hang all the same. The JSON says of each side how many kills hit a worker, after which median
and worst time they were answered, by a step of the process in the killed one's place, and how many hung: not answered
within 15 s. `ratio` is with them; `ratio without hung` takes each of them to have lasted as long as the median of the
others.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "networks"))

import noted
import torch
from data_parallel import script
from faults import LOOK_SECONDS, Training
from hosts import cannot, several_hosts
from parked import SideFailed, environment
from sshd import cannot as cannot_sshd
from sshd import sshds
from table import main, measured

import apportion

BENCHMARKS = Path(__file__).resolve().parents[1]
KILL_SECONDS, HUNG_SECONDS, OUT_SECONDS = 20.0, 15.0, 5.0
CUT_SECONDS = 10.0
END_SECONDS = 30.0
RATE = 1e9
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
WORK = f"""import sys

sys.path.insert(0, {str(BENCHMARKS / "networks")!r})
from noted import cifar10 as workload
"""


@dataclass
class Kill:
    """One that has hit a living process."""

    rank: int
    pid: int
    at: float
    seconds: float | None = None
    """Until it was answered."""
    last: float = 0.0
    """When it was last looked at."""

    @property
    def has_hung(self):
        return (self.last - self.at if self.seconds is None else self.seconds) > HUNG_SECONDS


@dataclass(frozen=True)
class Round:
    """What one run has made in its time."""

    updates: int
    began: float
    seconds: float
    kills: list[Kill]

    def goodput(self, without_hung=False):
        """Examples/s."""
        seconds = self.seconds
        if without_hung:
            answered = [kill.seconds for kill in self.kills if not kill.has_hung]
            usual = median(answered) if answered else HUNG_SECONDS
            for kill in self.kills:
                if kill.has_hung:
                    seconds -= max(0.0, min(kill.last, self.began + self.seconds) - kill.at - usual)
        return max(0, self.updates) * noted.cifar10.batch_size / seconds


class OnHosts(Training):
    """A run of one side on the first two of three hosts."""

    def __init__(self, hosts):
        super().__init__()
        self.hosts = hosts
        self._log = open(self.folder / "errors", "w+")  # noqa: SIM115 (closed by stop)

    def popen(self, number, command, more=None):
        """On a host, and its core. `more`: of its environment."""
        launched = self.hosts.environment(number, 2, 0)
        kept = {name: launched[name] for name in ("APPORTION_SECRET_FILE", "GLOO_SOCKET_IFNAME")} | (more or {})
        out = {"stdout": self._log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        given = {name: value for name, value in environment().items() if name not in launched}
        return subprocess.Popen(self.hosts.command(number, command), env=given | kept, **out)

    def said(self):
        lines = (self.folder / "errors").read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:]) if lines else "it said nothing"

    def pid(self, rank):
        return int(self._notes[rank, noted.PID])

    def working(self):
        """The ranks that are in the run: one whose host was given up is behind the others."""
        times = self._notes[:, noted.TIME]
        return [rank for rank in range(noted.RANKS) if times[rank] > times.max() - OUT_SECONDS * 1e9]

    def has_answered(self, kill):
        """Has another process made a step in the killed one's place?"""
        later = self._notes[kill.rank, noted.TIME] > kill.at * 1e9
        return self.pid(kill.rank) != kill.pid and bool(later)

    def final(self, kills):
        """The updates in the state that a run would end with now."""
        return self.updates


class OursOnHosts(OnHosts):
    """apportion.run, by ssh."""

    def start(self):
        self._stack = ExitStack()
        folder = self.folder / "ssh"
        folder.mkdir()
        path = Path(apportion.__file__).parents[1]
        names = {"PYTHONPATH": path, noted.NOTES: os.environ[noted.NOTES]}
        self._stack.enter_context(sshds(self.hosts, folder, names))
        (folder / "project").mkdir()
        work = folder / "project" / "work.py"
        work.write_text(WORK)
        command = [
            sys.executable,
            str(BENCHMARKS / "sides/goodput_driver.py"),
            f"{work}:workload",
            str(folder / "config"),
        ]
        self._process = self.popen(0, [*command, str(self.folder / "run"), "a", "b"])

    def lives(self):
        return self._process.poll() is None

    def stop(self):
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stack.close()
        self._log.close()


class TorchrunOnHosts(OnHosts):
    """peers/ddp_saving.py, with one of gloo's timeouts."""

    def __init__(self, hosts, timeout):
        super().__init__(hosts)
        self.saved = self.folder / "saved"
        address, port = hosts.addresses[0], hosts.port()
        self._commands = [
            [
                *(script("torchrun"), "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1000000"),
                *("--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}"),
                *("--rdzv-id=goodput", f"--rdzv-conf=is_host={int(number == 0)}"),
                f"--local-addr={hosts.addresses[number]}",
                *(str(BENCHMARKS / "peers" / "ddp_saving.py"), str(self.saved), str(timeout)),
            ]
            for number in range(2)
        ]

    def start(self):
        self._ended = threading.Event()
        self._processes = [self._launched(number) for number in range(2)]
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def _launched(self, number):
        return self.popen(number, self._commands[number], OWN_STORES)

    def _keep(self):
        """Starts those again that have ended."""
        while not self._ended.wait(0.1):
            for number, process in enumerate(self._processes):
                if process.poll() is not None:
                    self._processes[number] = self._launched(number)

    def lives(self):
        return True

    def final(self, kills):
        """The updates in memory, or on the disk where the last kill is not answered."""
        if not kills or kills[-1].seconds is not None:
            return self.updates
        return torch.load(self.saved, weights_only=False)["done"] if self.saved.exists() else 0

    def stop(self):
        self._ended.set()
        self._keeper.join()
        for process in self._processes:
            process.terminate()  # it ends its workers
        for process in self._processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()


class Kills:
    """The kills of a run: made when they are due, and looked at until they are answered."""

    def __init__(self, training, began, seconds, seed):
        self._training, self._chance, self.made = training, random.Random(seed), []
        self._due = [began + KILL_SECONDS * (n + 0.5) for n in range(int(seconds / KILL_SECONDS + 0.5))]

    def look(self):
        """Kills a worker where that is due, and sees which kills were answered."""
        now = time.monotonic()
        if self._due and now >= self._due[0]:
            self._due.pop(0)
            self._kill(self._chance.choice(self._training.working()))
        for kill in self.made:
            if kill.seconds is None:
                kill.last = now
                if self._training.has_answered(kill):
                    kill.seconds = now - kill.at

    def _kill(self, rank):
        pid = self._training.pid(rank)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # dead still, since the last time
            return
        self.made.append(Kill(rank, pid, time.monotonic()))

    @property
    def are_judged(self):
        """Is each of them answered, or hangs?"""
        return all(kill.seconds is not None or kill.has_hung for kill in self.made)


def useful(make, seconds, seed, is_cut):
    """What a run makes in so many seconds of kills, with a cable that is cut, or not: a Round."""
    with several_hosts((1, 1, 1), RATE) as hosts, make(hosts) as training:
        began, before = time.monotonic(), training.updates
        kills = Kills(training, began, seconds, seed)
        cut = began + KILL_SECONDS * round(seconds / KILL_SECONDS / 2)  # as far as can be from the kills
        cable = [(cut, False), (cut + CUT_SECONDS, True)] if is_cut else []
        while time.monotonic() < began + seconds:
            if cable and time.monotonic() >= cable[0][0]:
                hosts.set_plugged(1, cable.pop(0)[1])
            kills.look()
            time.sleep(LOOK_SECONDS)
            if not training.lives():
                raise SideFailed(training.said())
        made, took = training.final(kills.made) - before, time.monotonic() - began
        while training.lives() and not kills.are_judged:
            kills.look()
            time.sleep(LOOK_SECONDS)
    return Round(made, began, took, kills.made)


def told(rounds):
    """What a side's kills came to."""
    kills = [kill for one in rounds for kill in one.kills]
    answers = [kill.seconds for kill in kills if kill.seconds is not None]
    return {
        "examples/s": [one.goodput() for one in rounds],
        "kills": len(kills),
        "hung": sum(kill.has_hung for kill in kills),
        "median answer": median(answers) if answers else None,
        "worst answer": max(answers, default=None),
    }


@dataclass(frozen=True)
class GoodputOnHosts:
    """Of our run against the peer's at the best of some timeouts."""

    what: str
    is_cut: bool = False
    unit: str = "examples/s"

    def measure(self, seconds, rounds, timeouts):
        """What `table.result` takes: ours, peer and ratio, and what they are made of."""
        if (why := cannot() or cannot_sshd()) is not None:
            raise SideFailed(why)
        own, others = [], {float(timeout): [] for timeout in timeouts.split(",")}
        for seed in range(rounds):
            own.append(useful(OursOnHosts, seconds, seed, self.is_cut))
            for timeout, found in others.items():
                found.append(useful(lambda hosts, t=timeout: TorchrunOnHosts(hosts, t), seconds, seed, self.is_cut))
        ours = median(one.goodput() for one in own)
        peers = {timeout: median(one.goodput() for one in found) for timeout, found in others.items()}
        best = max(peers, key=peers.get)
        without = median(one.goodput(without_hung=True) for one in others[best])
        return {
            "ours": ours,
            "peer": peers[best],
            "ratio": ours / peers[best],
            "ratio without hung": ours / without,
            "timeout": best,
            "of ours": told(own),
            "of the peer": {timeout: told(found) for timeout, found in others.items()},
        }


MEASUREMENTS = {
    "goodput_hosts": GoodputOnHosts("a worker on one of two hosts killed every 20 s, against torchrun's restarts"),
    "goodput_hosts_cut": GoodputOnHosts("the same, and a cable cut for 10 s", is_cut=True),
}


if __name__ == "__main__":
    sys.exit(main(__doc__, MEASUREMENTS, measured(MEASUREMENTS), seconds=120.0, rounds=3, timeouts="5,10,30"))
