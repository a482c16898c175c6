"""Strategies that split a network, against what else the same two cores could do with it.

    python benchmarks/rows/model_parallel.py --json FILE [--only id,...]

slices_*          the step of a wide MLP, tensor_parallel against DDP over gloo at its best setting (peers/ddp.py), 2
                  processes: examples/s.
slices_threads_*  the same step against one process with all threads (peers/threads.py): examples/s.
slices_dtensor_*  the same step against torch's own tensor parallelism, parallelize_module and loss_parallel over gloo
                  (peers/dtensor.py), 2 processes: examples/s.
wave_2x256, ...   LSTM language models (recurrent.py), layers x hidden, wavefront_parallel on 2 workers against twins:
                  examples/s.
wave_threads      2x256 against one process with all threads: examples/s.
conv_height       5 convolutions of 3x3 over images of 256x256, batch 2, conv_parallel on 2 workers against twins:
                  examples/s.
hybrid_ddp        an AlexNet, batch 128, hybrid_parallel against DDP, 2 processes: examples/s.
hybrid_best       the same against the better of one process with all threads and data_parallel: examples/s.
*_kept            the same, the others keeping the memory that they free, as apportion's workers do of themselves
                  (process.py): by default the largest blocks are given back to the system, and asked for again.
pipe              8 equal layers, 2 stages, 8 micro-batches, pipeline_parallel against torch.distributed.pipelining over
                  gloo (peers/pipelining.py), the faster of gpipe and 1f1b on each side: examples/s.
pipe_bubble       (S - 1) / (M + S - 1), against the share of a step in which a stage waits, on average over the stages,
                  of the better schedule.
pipe_memory, ...  4 blocks of a transformer (four_blocks.py), batch 16, and 64 of mostly activations, pipeline_parallel
                  on 4 workers, 8 micro-batches: the most bytes of tensors that a worker has while it trains, above what
                  it had when all was imported, of what single_device has (tensor_bytes.py). Limit: 40 %.

Twins are two processes of one thread, each with a whole copy of the network and batches of its own (peers/threads.py):
what they reach together is the most that two cores have to give, since neither ever waits.

A step is forward, loss, backward and update, its batch in memory. Processes have one thread each (but for
peers/threads.py) and flush denormals. The sides of a row are warmed up and then run in turn, A B A B, the others parked
on a pipe; figures are medians over the rounds, and a ratio above 1 is better than the peer.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from data_parallel import DDP, MLP10M, OURS, ROUND_SECONDS, THREADS, warmed_up
from parked import KEPT, Side
from table import main, measured

BENCHMARKS = Path(__file__).resolve().parents[1]
PIPELINING = str(BENCHMARKS / "peers" / "pipelining.py")
DTENSOR = str(BENCHMARKS / "peers" / "dtensor.py")
ALEXNET, CONV256, DEEP = (
    f"{BENCHMARKS / 'networks' / name}.py:workload" for name in ("alexnet", "conv256", "deep_mlp")
)
WIDE = "MLP 3072-2048-2048-10"
ROUNDS, SECONDS = 21, 60.0
"""Of slow steps fewer rounds: no row is measured for much longer than this."""
STAGES, MICROBATCHES = 2, 8
TENSOR_BYTES, FOUR = str(BENCHMARKS / "sides/tensor_bytes.py"), f"{BENCHMARKS / 'networks/four_blocks.py'}:workload"
LIMIT, UPDATES = 0.4, 4


@dataclass(frozen=True)
class Other:
    """One side: its command, its processes, and how many batches they make together in a step."""

    command: tuple[str, ...]
    ranks: int
    batches: int = 1
    kept: bool = False
    """Does it keep the memory that it frees?"""

    def parked(self):
        return Side(list(self.command), ranks=self.ranks, more=KEPT if self.kept else None)


@dataclass(frozen=True)
class Best:
    """Examples/s of the best of ours against the best of the others, all in turn."""

    what: str
    ours: tuple[Other, ...]
    others: tuple[Other, ...]
    batch_size: int
    unit: str = "examples/s"

    def measure(self):
        """(ours, peer, ratio)."""
        speeds = self.speeds()
        ours, peer = (max(speeds[side] for side in sides) for sides in (self.ours, self.others))
        return ours, peer, ours / peer

    def speeds(self):
        """Examples/s of every side."""
        sides = (*self.ours, *self.others)
        with ExitStack() as stack:
            parked = [stack.enter_context(side.parked()) for side in sides]
            for side in parked:
                side.wait_until_ready()
            steps = [max(1, round(ROUND_SECONDS / warmed_up(side))) for side in parked]
            spent = sum(side.go(n) for side, n in zip(parked, steps, strict=True))
            rounds = max(3, min(ROUNDS, round(SECONDS / spent)))
            seconds = [[side.go(n) for side, n in zip(parked, steps, strict=True)] for _ in range(rounds)]
        return {
            side: n * side.batches * self.batch_size / median(own)
            for side, n, own in zip(sides, steps, zip(*seconds, strict=True), strict=True)
        }


def ours(workload, strategy, batch_size):
    """A strategy of apportion's, on 2 workers."""
    return Other((OURS, workload, strategy, str(batch_size), "memory"), ranks=2)


def ddp(workload, batch_size):
    return Other((DDP, workload, str(batch_size), "memory"), ranks=2)


def dtensor(workload, batch_size):
    return Other((DTENSOR, workload, str(batch_size), "memory"), ranks=2)


def threads(workload, batch_size):
    return Other((THREADS, workload, str(batch_size)), ranks=1)


def twins(workload, batch_size):
    return Other((THREADS, workload, str(batch_size), "1"), ranks=2, batches=2)


def kept(other):
    return replace(other, kept=True)


def slices(batch_size, against, other):
    what = f"step of {WIDE}, batch {batch_size}, tensor_parallel against {against}"
    return Best(what, (ours(MLP10M, "tensor_parallel", batch_size),), (other(MLP10M, batch_size),), batch_size)


def wave(layers, hidden, length, rows, *, against=None):
    workload = f"{BENCHMARKS / 'networks/recurrent.py'}:lstm_{layers}x{hidden}"
    what = f"LSTM {layers}x{hidden}, T {length}, batch {rows}, wavefront_parallel against "
    what += "twins" if against is None else "one process with all threads"
    other = twins(workload, rows) if against is None else against(workload, rows)
    return Best(what, (ours(workload, "wavefront_parallel", rows),), (other,), rows)


def pipe(schedules=("gpipe", "1f1b")):
    return Best(
        f"8 equal layers, {STAGES} stages, {MICROBATCHES} micro-batches, against torch.distributed.pipelining",
        tuple(
            ours(DEEP, f'pipeline_parallel(microbatches={MICROBATCHES}, schedule="{schedule}")', 256)
            for schedule in schedules
        ),
        tuple(Other((PIPELINING, DEEP, schedule), ranks=STAGES) for schedule in schedules),
        256,
    )


@dataclass(frozen=True)
class Bubble:
    """The share of a step in which a stage waits, on average over the stages, against what its schedule says."""

    what: str
    unit: str = "of a stage"

    def measure(self):
        """(ours, promised, ratio)."""
        promised = (STAGES - 1) / (MICROBATCHES + STAGES - 1)
        found = min(self.shares())
        return found, promised, promised / found

    def shares(self):
        """By schedule."""
        for side in pipe().ours:
            with Side([*side.command, "waiting"], ranks=STAGES) as parked:
                parked.wait_until_ready()
                parked.each(MICROBATCHES)
                yield median(sum(parked.each(MICROBATCHES)) / STAGES for _ in range(ROUNDS))


def hybrid(against, *others):
    what = f"AlexNet, batch 128, hybrid_parallel against {against}"
    return Best(what, (ours(ALEXNET, "hybrid_parallel", 128),), others, 128)


DATA = ours(ALEXNET, "data_parallel", 128)


@dataclass(frozen=True)
class Peak:
    """The largest worker's bytes of tensors while it trains, of what one device has, against a limit."""

    what: str
    batch_size: int
    schedule: str
    unit: str = "of a device"

    def measure(self):
        """(ours, limit, ratio)."""
        _, pipeline = self.bytes(f'pipeline_parallel(microbatches=8, schedule="{self.schedule}")', 4)
        _, device = self.bytes("single_device", 1)
        found = max(pipeline) / max(device)
        return found, LIMIT, LIMIT / found

    def bytes(self, strategy, ranks):
        """By rank: of the build, and of training."""
        with Side([TENSOR_BYTES, FOUR, strategy, str(self.batch_size)], ranks=ranks) as side:
            side.wait_until_ready()
            return side.each(0), side.each(UPDATES)


BATCHES = (32, 128, 1024)
MEASUREMENTS = {
    **{f"slices_{size}": slices(size, "DDP", ddp) for size in BATCHES},
    **{f"slices_dtensor_{size}": slices(size, "torch's DTensor", dtensor) for size in BATCHES},
    **{f"slices_threads_{size}": slices(size, "one process with all threads", threads) for size in BATCHES},
    "wave_2x256": wave(2, 256, 128, 32),
    "wave_4x512": wave(4, 512, 128, 32),
    "wave_8x256": wave(8, 256, 128, 16),
    "wave_4x1024": wave(4, 1024, 64, 64),
    "wave_threads": wave(2, 256, 128, 32, against=threads),
    "conv_height": Best(
        "5 convolutions of 3x3 at 256x256, batch 2, conv_parallel against twins",
        (ours(CONV256, "conv_parallel", 2),),
        (twins(CONV256, 2),),
        2,
    ),
    "hybrid_ddp": hybrid("DDP", ddp(ALEXNET, 128)),
    "hybrid_ddp_kept": hybrid("DDP", kept(ddp(ALEXNET, 128))),
    "hybrid_best": hybrid("the better of data_parallel and all threads", DATA, threads(ALEXNET, 128)),
    "hybrid_best_kept": hybrid("the better of data_parallel and all threads", DATA, kept(threads(ALEXNET, 128))),
    "pipe": pipe(),
    "pipe_bubble": Bubble(f"bubble of {STAGES} stages and {MICROBATCHES} micro-batches, against what is promised"),
    **{
        f"pipe_memory{suffix}": Peak(f"4 blocks, 4 stages, {schedule}, batch {size}, bytes of tensors", size, schedule)
        for suffix, schedule, size in (("", "1f1b", 16), ("_64", "1f1b", 64), ("_gpipe", "gpipe", 64))
    },
}

if __name__ == "__main__":
    sys.exit(main(__doc__, MEASUREMENTS, measured(MEASUREMENTS)))
