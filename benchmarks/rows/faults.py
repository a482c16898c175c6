"""Training that keeps losing workers: what is left of its speed, and how soon it goes on.

    python benchmarks/rows/faults.py --json FILE [--only id,...]

goodput         useful examples/s while a worker is killed every 15 s, against DDP that saves every 20 steps and is
                restarted by `torchrun --max-restarts` (peers/ddp_saving.py).
undisturbed     the same against our own run that nothing happens to.
latency         seconds from a SIGKILL to the next step that the killed worker's replacement has completed, median.
latency_worst   the longest of them. Both rows have a limit instead of a peer.

The CIFAR-10 tutorial network on its real data, global batch 128, 2 workers with one thread each, who note every update
(noted.py). A worker is chosen by chance and killed by SIGKILL. Useful are the examples of the updates that the network
has behind it at the end: what is made again counts once. Each round is a run of its own of either side, in turn, and
counts from some seconds after its first step; figures of goodput are medians over the rounds. A ratio above 1 is
better than the peer, or than the limit. The peers are torch itself, in the environment that apportion is installed in.
A side that fails makes a failed row, and exit status 1.
"""

import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "networks"))

import noted
from data_parallel import script
from parked import DEADLINE, SideFailed
from table import main, measured

import apportion

BENCHMARKS = Path(__file__).resolve().parents[1]
ROUNDS, ROUND_SECONDS, KILL_SECONDS, SETTLE_SECONDS = 3, 60.0, 15.0, 5.0
KILLS, PAUSE_SECONDS = 100, 0.5
MEDIAN_LIMIT, WORST_LIMIT = 0.25, 1.0
LOOK_SECONDS = 0.001
TORCHRUN = ("--standalone", f"--nproc_per_node={noted.RANKS}", "--max-restarts=1000000", "--monitor-interval=0.1")


class Training:
    """A run of one side, as its workers' notes show it."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self._notes = noted.create(self.folder / "notes")
        os.environ[noted.NOTES] = str(self.folder / "notes")

    def __enter__(self):
        try:
            self.start()
            self.wait(lambda: (self._notes[:, noted.UPDATES] > 0).all(), "its first step")
            time.sleep(SETTLE_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.stop()
        self._folder.cleanup()

    @property
    def updates(self):
        """That the network has behind it: by the rank that made the last one."""
        return int(self._notes[self._notes[:, noted.TIME].argmax(), noted.UPDATES])

    def kill(self, rank):
        """By SIGKILL; not where it is dead still, since the last time."""
        with suppress(ProcessLookupError):
            os.kill(int(self._notes[rank, noted.PID]), signal.SIGKILL)

    def has_passed(self, rank, updates):
        """Has this rank made more updates than so many?"""
        return int(self._notes[rank, noted.UPDATES]) > updates

    def wait(self, condition, what):
        deadline = time.monotonic() + DEADLINE
        while not condition():
            if time.monotonic() > deadline or not self.lives():
                raise SideFailed(f"{type(self).__name__} did not come to {what}: {self.said()}")
            time.sleep(LOOK_SECONDS)


class Ours(Training):
    """apportion.run, in a thread."""

    def start(self):
        self._ended, self._error = False, None
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self):
        policy = apportion.Policy(max_restarts=10**6)
        events = apportion.run(
            f"{BENCHMARKS / 'networks/noted.py'}:cifar10",
            "data_parallel",
            launcher=apportion.local(workers=noted.RANKS, threads=1),
            run_dir=self.folder / "run",
            policy=policy,
        )
        try:
            for _ in events:
                if self._ended:
                    break
            events.close()
        except apportion.ApportionError as error:
            self._error = error

    def lives(self):
        return self._thread.is_alive()

    def said(self):
        return str(self._error)

    def stop(self):
        self._ended = True
        self._thread.join(DEADLINE)


class Torchrun(Training):
    """peers/ddp_saving.py."""

    def start(self):
        self._errors = open(self.folder / "errors", "w+")  # noqa: SIM115 (closed by stop)
        peer = str(BENCHMARKS / "peers" / "ddp_saving.py")
        self._process = subprocess.Popen(
            [script("torchrun"), *TORCHRUN, peer, str(self.folder / "saved")],
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdout=self._errors,
            stderr=subprocess.STDOUT,
        )

    def lives(self):
        return self._process.poll() is None

    def said(self):
        lines = (self.folder / "errors").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def stop(self):
        self._process.terminate()  # it ends its workers
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._errors.close()


def useful(kind, kill_seconds=None, seed=0):
    """Examples/s of the updates made in a round, a worker killed every so many seconds."""
    chance = random.Random(seed)
    with kind() as training:
        began, before = time.monotonic(), training.updates
        kills = [] if kill_seconds is None else [began + kill_seconds * (0.5 + n) for n in range(100)]
        while (now := time.monotonic()) < began + ROUND_SECONDS:
            if kills and now >= kills[0]:
                kills.pop(0)
                training.kill(chance.randrange(noted.RANKS))
            time.sleep(LOOK_SECONDS)
            if not training.lives():
                raise SideFailed(training.said())
        return (training.updates - before) * noted.cifar10.batch_size / (time.monotonic() - began)


@dataclass(frozen=True)
class Goodput:
    """Of our run with kills, against another."""

    what: str
    peer: object
    unit: str = "examples/s"

    def measure(self):
        """(ours, peer, ratio)."""
        rounds = [(useful(Ours, KILL_SECONDS, seed), self.peer(seed=seed)) for seed in range(ROUNDS)]
        ours, peer = (median(side) for side in zip(*rounds, strict=True))
        return ours, peer, ours / peer


@functools.cache
def latencies():
    """Seconds from each kill to the next step that its replacement has completed."""
    chance, found = random.Random(0), []
    with Ours() as training:
        for _ in range(KILLS):
            rank, updates, killed = chance.randrange(noted.RANKS), training.updates, time.monotonic()
            training.kill(rank)
            training.wait(functools.partial(training.has_passed, rank, updates), "the next step")
            found.append(time.monotonic() - killed)
            time.sleep(chance.random() * PAUSE_SECONDS)
    return found


@dataclass(frozen=True)
class Latency:
    """A figure of the latencies, against its limit."""

    what: str
    of: object
    limit: float
    unit: str = "s"

    def measure(self):
        """(ours, limit, ratio)."""
        ours = self.of(latencies())
        return ours, self.limit, self.limit / ours


MEASUREMENTS = {
    "goodput": Goodput(
        "CIFAR-10 network, a worker killed every 15 s, against torchrun's restarts of DDP that saves every 20 steps",
        functools.partial(useful, Torchrun, KILL_SECONDS),
    ),
    "undisturbed": Goodput(
        "CIFAR-10 network, a worker killed every 15 s, against none", functools.partial(useful, Ours)
    ),
    "latency": Latency(
        f"SIGKILL to the next completed step, median of {KILLS}, against the limit", median, MEDIAN_LIMIT
    ),
    "latency_worst": Latency(f"the same, worst of {KILLS}", max, WORST_LIMIT),
}


if __name__ == "__main__":
    sys.exit(main(__doc__, MEASUREMENTS, measured(MEASUREMENTS)))
