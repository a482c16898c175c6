"""single_device against a plain loop, data_parallel against torch's DDP, and the start against torchrun's.

    python benchmarks/rows/data_parallel.py --json FILE [--only id,...]

plain_*   single_device against the loop of the paired example, one process: examples/s.
sync_*    the synchronous step alone, its batches in memory, data_parallel against DDP over gloo at its best setting
          (peers/ddp.py), 2 processes: examples/s.
threads_* the same steps against one process with all threads: examples/s.
chosen_*  what a trial as `apportion train` makes it chooses for these workloads, against the best of what it tried,
          both as a trial of 20 s measures them afterwards: examples/s.
ddp_*     data_parallel against DDP over gloo at its best setting (peers/ddp.py), global batch 128, 2 processes:
          examples/s.
hook_*    DDP with our all-reduce as its communication hook against DDP without: examples/s.
shares    data_parallel(shares="measured") against equal shares, where one of 2 workers computes three times as long.
versions  the step with two versions of the weights in the shared pages against one, which no death survives.
allreduce_*  one all-reduce of float32 against gloo's, 2 processes without a supervisor: MB/s.
startup   seconds from the command to the first finished step of the digits, 2 workers: `apportion train` against the
          same in DDP under torchrun.

A step is the whole of it on both sides: rows gathered and augmented (but for sync_*, threads_* and versions), forward,
loss, backward, update, schedule. Processes have one thread each and flush denormals. Both sides of a row are warmed up
and then run in turn, A B A B, the other one parked on a pipe: many short rounds, so that whatever else the machine
does falls on both. Figures are medians over the rounds; a ratio above 1 is better than the peer. The peers are torch
itself, in the environment that apportion is installed in. A side that fails makes a failed row, and exit status 1.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from first_step import FOLDER
from parked import DEADLINE, Side, SideFailed
from table import main, measured

import apportion
from apportion.planner.predict import offered
from apportion.planner.trials import trial
from apportion.planner.trials.tune import refine

BENCHMARKS = Path(__file__).resolve().parents[1]
DIGITS, CIFAR10 = (str(BENCHMARKS.parent / "examples" / f"{name}.py:workload") for name in ("digits", "cifar10"))
MLP10M, ADAM = (f"{BENCHMARKS / 'networks/mlp10m.py'}:{name}" for name in ("workload", "adam"))
MLP200K = f"{BENCHMARKS / 'networks/mlp200k.py'}:workload"
OURS, PLAIN, DDP, THREADS = (
    str(BENCHMARKS / name) for name in ("sides/ours.py", "peers/plain.py", "peers/ddp.py", "peers/threads.py")
)
ALL_REDUCE = str(BENCHMARKS / "peers" / "allreduce.py")
ROUNDS, ROUND_SECONDS, WARM_UP_SECONDS = 41, 0.4, 1.0
STARTS, CHOICE_SECONDS = 5, 20.0


@dataclass(frozen=True)
class Throughput:
    """Examples/s of two sides that train the same."""

    what: str
    ours: list[str]
    peer: list[str]
    ranks: int
    batch_size: int
    unit: str = "examples/s"
    peer_ranks: int | None = None
    """Where the peer has another number of processes."""

    def measure(self):
        """(ours, peer, ratio)."""
        with Side(self.ours, ranks=self.ranks) as ours, Side(self.peer, ranks=self.peer_ranks or self.ranks) as peer:
            ours.wait_until_ready()
            peer.wait_until_ready()
            steps = max(2, round(ROUND_SECONDS / mean([warmed_up(ours), warmed_up(peer)])))
            rounds = [(ours.go(steps), peer.go(steps)) for _ in range(ROUNDS)]
        ours, peer = (steps * self.batch_size / median(seconds) for seconds in zip(*rounds, strict=True))
        return ours, peer, ours / peer


@dataclass(frozen=True)
class Startup:
    """Seconds to the first finished step of two commands."""

    what: str
    ours: list[str]
    peer: list[str]
    unit: str = "s"

    def measure(self):
        """(ours, peer, ratio)."""
        sides = self.ours, self.peer
        # One folder for all rounds: the proof of the first is reused only where the environment has not changed.
        with tempfile.TemporaryDirectory() as folder:
            rounds = [[first_step(side, Path(folder, "notes")) for side in sides] for _ in range(1 + STARTS)]
        ours, peer = (median(seconds) for seconds in zip(*rounds[1:], strict=True))
        return ours, peer, peer / ours


def script(name):
    """A command of this environment."""
    return str(Path(sys.executable).with_name(name))


def all_reduce(size, nbytes):
    """Ours against gloo's."""
    return Throughput(
        f"all-reduce of {size}, shared memory against gloo, 2 processes",
        [ALL_REDUCE, "ours", str(nbytes)],
        [ALL_REDUCE, "gloo", str(nbytes)],
        ranks=2,
        batch_size=nbytes / 1e6,
        unit="MB/s",
    )


@dataclass(frozen=True)
class Choice:
    """A short trial's, held against a long one."""

    what: str
    workload: str
    batch_size: int
    unit: str = "examples/s"

    def measure(self):
        """(chosen, best, ratio)."""
        offers, changes = offered(apportion.local()), {"batch_size": self.batch_size, "evaluation": None}
        chosen = refine(offers, self.workload, changes).chosen.measured.candidate
        candidates = [trial.candidate(offer.strategy, offer.launcher) for offer in offers]
        with trial.parked(candidates, self.workload, changes, []) as groups:
            end = time.monotonic() + CHOICE_SECONDS
            while time.monotonic() < end:
                trial.take_turns(groups, CHOICE_SECONDS / 5)
            speeds = {group.measured.candidate: group.measured.examples_per_second for group in groups}
        ours, best = speeds[chosen], max(speeds.values())
        print(f"chosen: {chosen.strategy} {chosen.launcher}", flush=True)
        return ours, best, ours / best


STEPS = {
    "mlp200k": ("MLP 3072-64-10, batch 128", MLP200K, 128),
    "cnn": ("CIFAR-10 tutorial network, batch 128", CIFAR10, 128),
    "mlp10m": ("MLP 3072-2048-2048-10, batch 128", MLP10M, 128),
    "mlp10m_1024": ("MLP 3072-2048-2048-10, batch 1024", MLP10M, 1024),
    "adam": ("MLP 3072-2048-2048-10 with Adam, batch 128", ADAM, 128),
}
"""The steps that are measured alone: what, workload, batch size."""


def step_alone(name, peer, options=()):
    """data_parallel on 2 workers against DDP, or against all threads."""
    what, workload, batch_size = STEPS[name]
    against = {DDP: "DDP, 2 processes", THREADS: "one process with all threads"}[peer]
    return Throughput(
        f"step of {what}, data_parallel against {against}",
        [OURS, workload, "data_parallel", str(batch_size), "memory"],
        [peer, workload, str(batch_size), *options],
        ranks=2,
        peer_ranks=2 if peer == DDP else 1,
        batch_size=batch_size,
    )


APPORTION_TRAIN = [script("apportion"), "train", f"{BENCHMARKS / 'networks/digits_first_step.py'}:workload"]

MEASUREMENTS = {
    "plain_digits": Throughput(
        "digits MLP, single_device against the plain loop, batch 64",
        [OURS, DIGITS, "single_device"],
        [PLAIN, "digits"],
        ranks=1,
        batch_size=64,
    ),
    "plain_cifar": Throughput(
        "CIFAR-10 tutorial network, single_device against the plain loop, batch 128",
        [OURS, CIFAR10, "single_device"],
        [PLAIN, "cifar10"],
        ranks=1,
        batch_size=128,
    ),
    "ddp_digits": Throughput(
        "digits MLP, data_parallel against DDP, 2 processes, batch 128",
        [OURS, DIGITS, "data_parallel", "128"],
        [DDP, DIGITS, "128"],
        ranks=2,
        batch_size=128,
    ),
    "ddp_cifar": Throughput(
        "CIFAR-10 tutorial network, data_parallel against DDP, 2 processes, batch 128",
        [OURS, CIFAR10, "data_parallel"],
        [DDP, CIFAR10],
        ranks=2,
        batch_size=128,
    ),
    "ddp_mlp10m": Throughput(
        "MLP 3072-2048-2048-10, data_parallel against DDP, 2 processes, batch 128",
        [OURS, MLP10M, "data_parallel"],
        [DDP, MLP10M],
        ranks=2,
        batch_size=128,
    ),
    **{f"sync_{name}": step_alone(name, DDP, ["memory"]) for name in STEPS},
    **{f"threads_{name}": step_alone(name, THREADS) for name in STEPS},
    **{f"chosen_{name}": Choice(f"what a trial chooses for {what}", *of) for name, (what, *of) in STEPS.items()},
    "shares": Throughput(
        "CIFAR-10 tutorial network, rank 1 of 2 slowed 3 times, shares=measured against equal, batch 128",
        [OURS, CIFAR10, 'data_parallel(shares="measured")', "128", "slowed"],
        [OURS, CIFAR10, "data_parallel", "128", "slowed"],
        ranks=2,
        batch_size=128,
    ),
    "versions": Throughput(
        "MLP 3072-2048-2048-10, two versions of the weights against one, 2 processes, batch 128",
        [OURS, MLP10M, "data_parallel", "128", "memory"],
        [OURS, MLP10M, "data_parallel", "128", "memory", "one_version"],
        ranks=2,
        batch_size=128,
    ),
    "hook_mlp10m": Throughput(
        "MLP 3072-2048-2048-10, DDP with shared_memory_hook against DDP, 2 processes, batch 128",
        [DDP, MLP10M, "128", "hook"],
        [DDP, MLP10M, "128"],
        ranks=2,
        batch_size=128,
    ),
    "allreduce_1k": all_reduce("1 KiB", 1 << 10),
    "allreduce_1m": all_reduce("1 MiB", 1 << 20),
    "allreduce_25m": all_reduce("25 MiB", 25 << 20),
    "allreduce_100m": all_reduce("100 MiB", 100 << 20),
    "startup": Startup(
        "command to first finished step, digits, 2 workers, apportion train against torchrun",
        [*APPORTION_TRAIN, "--strategy", "data_parallel", "--workers", "2", "--run-dir", "{folder}/run"],
        [script("torchrun"), "--nproc_per_node=2", str(BENCHMARKS / "peers" / "ddp_first_step.py")],
    ),
}


def warmed_up(side):
    """Seconds a step, after running for a while."""
    steps, end = 1, time.monotonic() + WARM_UP_SECONDS
    while True:
        seconds = side.go(steps)
        if time.monotonic() > end:
            return seconds / steps
        steps *= 2


def first_step(command, folder):
    """Seconds from the command until every rank has finished its first step; the folder is removed afterwards."""
    folder.mkdir()
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        start = time.monotonic()
        done = subprocess.run(
            [part.format(folder=folder) for part in command],
            env=os.environ | threads | {FOLDER: str(folder)},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        notes = [float(note.read_text()) for note in folder.glob("rank*")]
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SideFailed(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode or len(notes) != 2:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise SideFailed(f"{Path(command[0]).name} exited {done.returncode}: {said[-1] if said else 'it said nothing'}")
    return max(notes) - start


if __name__ == "__main__":
    sys.exit(main(__doc__, MEASUREMENTS, measured(MEASUREMENTS)))
