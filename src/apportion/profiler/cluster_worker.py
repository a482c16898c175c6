"""Measurements of what a machine reaches, as its own ranks time it: matrix products, memory, small operations,
collectives, messages.

Whatever is timed is done by all ranks of a world at once, since that is how they will compute: a core that shares its
memory and its caches with others is slower than one that has them to itself. Time that other programs take is left out:
the system tells how long a process wanted a core and had none.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from apportion.comm.channel import Channel
from apportion.comm.group import broadcast_message
from apportion.comm.world import World
from apportion.parallel.pipeline.transfer import StageReceiver, StageSender
from apportion.runtime.worker.cpu_wait import without_core
from apportion.runtime.worker.entry import run_program

PRODUCT_SECONDS = 0.003
"""The least seconds of one matrix product: smaller products do not reach the best rate."""
PRODUCTS = 256, 512, 1024, 2048, 4096, 8192
"""The rows and columns of the matrix products."""
MEMORY_BYTES = 32 << 20
"""The bytes of each of three tensors that a sum goes through: more than a core's own cache holds, and about a
layer's."""
GPU_BYTES = 512 << 20
LEAST = 3
"""The least number of samples of anything."""
MOST = 60
DISTURBED = 0.02
"""The share of a sample's time without a core, above which something else was running there."""
SAMPLE_SECONDS = 0.001
"""The seconds below which work is repeated within a sample: starting a clock takes time, and so does meeting."""
SIZES = (*(1 << power for power in range(10, 25, 2)), 100 << 20)
"""The sizes that are sent, in bytes: 1 KiB, 4 KiB, ... 16 MiB, and 100 MiB."""
OVERLAP_BYTES, OVERLAP_SECONDS = 4 << 20, (0.005, 0.05)
"""The most that is sent while a rank computes: its bytes, and the seconds that it takes. These are the second number,
less where less time is given, but never less than the first."""
OVERLAP_SUMS = 20
"""The number of sums that ``overlap`` takes as long as: some to find out how much may be sent, and five for each of
three samples."""

Pairs = Sequence[Sequence[int]]
"""The pairs of ranks that send messages to each other."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkJob:
    """The job of a worker process that only measures."""

    threads: int
    device: str
    replaceable: Literal[False] = False


def main(sock: socket.socket, payload: bytes) -> int:
    """Measure what the machine reaches, as one of the ranks that do."""
    return run_program(sock, payload, serve_gauges)


def serve_gauges(job: BenchmarkJob, world: World, channel: Channel) -> None:
    """Measure what orders ask for, until ``close``. An order names a method of ``HardwareBenchmark``, and has its
    arguments."""
    gauge = HardwareBenchmark(world)
    channel.send({"kind": "ready"})
    while (order := channel.commands.get()) is not None and order["kind"] != "close":
        channel.send({"kind": "gauged", "found": getattr(gauge, order["what"])(**order["how"])})
    world.close()


@final
class HardwareBenchmark:
    """A benchmark that all ranks of a world call in the same way. It returns samples of this rank: seconds, or a
    rate."""

    def __init__(self, world: World) -> None:
        self.group, self.device = world.group(), world.device
        self._product: tuple[Tensor, Tensor, Tensor] | None = None
        self._overlapped: tuple[Tensor, float] | None = None

    # What each rank computes

    def products(self, seconds: float, active: Sequence[int] | None = None) -> list[float]:
        """Measure the FLOP/s of float32 matrix products, while these ranks (None: all) compute. The others sleep."""
        a, b, out = self._product = self._product or self._best_product()
        flops = 2.0 * a.shape[0] ** 3
        return [flops / taken for taken in self._together(lambda: torch.mm(a, b, out=out), seconds, active)]

    def memory(self, seconds: float, active: Sequence[int] | None = None) -> list[float]:
        """Measure the bytes/s of memory, read and written, while these ranks (None: all) use it. The others sleep."""
        n = (MEMORY_BYTES if self.device.type == "cpu" else GPU_BYTES) // 4
        a, b, out = (torch.zeros(n, device=self.device) for _ in range(3))
        return [12.0 * n / taken for taken in self._together(lambda: torch.add(a, b, out=out), seconds, active)]

    def calls(self, seconds: float) -> list[float]:
        """Measure the seconds to begin an operation: with layers so small that nothing else counts, forward and
        backward, of which a backward pass has two."""
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))).to(self.device)
        x = torch.zeros(2, 8, device=self.device)
        total = x.new_ones(2, 8)
        return [t / 60 for t in self._together(lambda: layers(x).backward(total), seconds, None)]

    def _best_product(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors of the smallest product that takes long enough to reach its best rate."""
        for n in PRODUCTS:
            a, b = (torch.full((n, n), value, device=self.device) for value in (0.5, 0.25))
            made = a, b, torch.empty_like(a)
            if min(self._seconds(partial(torch.mm, a, b, out=made[2])) for _ in range(2 * LEAST)) >= PRODUCT_SECONDS:
                break
        return made

    def _seconds(self, work: Callable[[], Any]) -> float:
        began = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter() - began

    def _watched(self, work: Callable[[], Any]) -> tuple[float, float]:
        """Time the work: (seconds, share of them without a core)."""
        before = without_core()
        took = self._seconds(work)
        return took, (without_core() - before) / max(took, 1e-9)

    def _together(self, work: Callable[[], Any], seconds: float, active: Sequence[int] | None) -> list[float]:
        """Time the work for ``seconds``, on all active ranks at once. The last sample does not count: the others may
        have stopped before its end."""
        taken: list[tuple[float, float]] = []
        self.group.barrier()
        if active is None or self.group.rank in active:
            self._seconds(work)  # touches its memory for the first time
            end = time.perf_counter() + seconds
            while len(taken) <= LEAST or time.perf_counter() < end:
                taken.append(self._watched(work))
        self.group.barrier()
        return undisturbed(taken[:-1])

    # What ranks tell each other

    def all_reduces(self, seconds: float) -> list[tuple[int, list[float]]]:
        """Measure the seconds of sums over all ranks, by their bytes: from small ones to the last of ``SIZES``, or to
        what this much time allows. Every rank returns equally many samples."""
        return self._growing(self.all_reduce, seconds)

    def all_messages(self, seconds: float, pairs: Pairs) -> list[tuple[int, list[float]]]:
        """Measure the seconds of a message one way, by its bytes: from small ones to the last of ``SIZES``, or to what
        this much time allows. Every rank returns equally many samples."""
        return self._growing(lambda nbytes, each: self.messages(nbytes, each, pairs), seconds)

    def all_reduce(self, nbytes: int, seconds: float) -> list[float]:
        """Measure the seconds of a sum over all ranks."""
        tensor = torch.zeros(nbytes // 4, device=self.device)
        return self._in_step(lambda: self.group.all_reduce(tensor).wait(), seconds)

    def messages(self, nbytes: int, seconds: float, pairs: Pairs, *, both: bool = False) -> list[float]:
        """Measure the seconds of a message one way: from one of a pair to the other and back, halved; all pairs at
        once. ``both``: each rank of a pair sends before it receives, so that messages go both ways at once."""
        other = next((b if a == self.group.rank else a for a, b in pairs if self.group.rank in (a, b)), None)
        if other is None:
            return self._in_step(lambda: None, seconds)
        begins = both or self.group.rank in [a for a, _ in pairs]
        tensor = torch.zeros(nbytes // 4, device=self.device)
        outlet, inlet = StageSender(self.group, other), StageReceiver(self.group, other, self.device)

        def there_and_back() -> None:
            if begins:
                outlet.send([tensor])
            received = inlet.receive()
            if not begins:
                outlet.send(received)
            outlet.finish()

        return [taken if both else taken / 2 for taken in self._in_step(there_and_back, seconds)]

    def overlap(self, seconds: float) -> list[list[float]]:
        """Measure a sum over all ranks while each of them computes: seconds of [the sum alone, the computing alone, the
        sum begun, the computing, the sum waited for]. The sum is as large as this much time allows, and equally large
        each time."""
        least, most = OVERLAP_SECONDS
        if self._overlapped is None:
            self._overlapped = self._largest_sum(min(most, max(least, seconds / OVERLAP_SUMS)))
        tensor, alone = self._overlapped
        a, b, out = self._product = self._product or self._best_product()
        product = min(self._in_step(lambda: torch.mm(a, b, out=out), 0.0))
        many = self._said(max(1, round(1.5 * alone / product)))

        def compute() -> None:
            _times(lambda: torch.mm(a, b, out=out), many)

        found = []
        for _ in range(LEAST):
            self.group.barrier()
            reduced = self._seconds(lambda: self.group.all_reduce(tensor).wait())
            computed = self._seconds(compute)
            self.group.barrier()
            began = time.perf_counter()
            work = self.group.all_reduce(tensor)
            begun = time.perf_counter() - began
            found.append([reduced, computed, begun, self._seconds(compute), self._seconds(work.wait)])
        return found

    def _largest_sum(self, seconds: float) -> tuple[Tensor, float]:
        """Find what is summed over all ranks in about ``seconds`` at most, and how long that takes. It begins
        small: over a slow link a single large sum may take longer than all the time there is."""
        nbytes = SIZES[2]
        alone = min(self.all_reduce(nbytes, 0.0))
        while self._said(int(4 * nbytes <= OVERLAP_BYTES and 4 * alone <= seconds)):
            nbytes *= 4
            alone = min(self.all_reduce(nbytes, 0.0))
        return torch.zeros(nbytes // 4, device=self.device), alone

    def _growing(self, timed: Callable[[int, float], list[float]], seconds: float) -> list[tuple[int, list[float]]]:
        end = time.perf_counter() + seconds
        found: list[tuple[int, list[float]]] = []
        for at, nbytes in enumerate(SIZES):
            left = end - time.perf_counter()
            if found:
                # By the median: one sample that something else has held up says nothing about the link.
                longer = nbytes / SIZES[at - 1] * median(found[-1][1]) * (LEAST + 2)
                if not self._said(int(at < LEAST or longer < left)):
                    break
            # Half of an equal share: a slow link then comes to messages large enough to tell its bandwidth.
            found.append((nbytes, timed(nbytes, left / (len(SIZES) - at) / 2)))
        return found

    def _in_step(self, work: Callable[[], Any], seconds: float) -> list[float]:
        """Time the work for ``seconds``, or ``LEAST`` times; equally often on every rank."""
        self.group.barrier()
        self._seconds(work)
        self.group.barrier()
        one = torch.tensor([self._seconds(work)], dtype=torch.float64, device=self.device)
        longest = float(self.group.all_gather(one).max())
        each = max(1, int(SAMPLE_SECONDS / longest))
        # Each has its own clock, and its own ``seconds`` where it counts what is left of them.
        many = self._said(min(MOST, max(LEAST, int(seconds / (longest * each)))))
        taken = []
        for _ in range(many):
            self.group.barrier()
            taken.append(self._watched(lambda: _times(work, each)))
        # Who had no core has kept the others waiting: all leave out the same samples.
        shares = torch.tensor([share for _, share in taken], dtype=torch.float64, device=self.device)
        worst = self.group.all_gather(shares).max(0).values.tolist()
        return [took / each for took in undisturbed(list(zip((took for took, _ in taken), worst, strict=True)))]

    def _said(self, number: int) -> int:
        """Broadcast the first rank's number to all ranks."""
        return int(broadcast_message(number, self.group, device=self.device))


def undisturbed(samples: Sequence[tuple[float, float]]) -> list[float]:
    """Return the seconds of those samples (seconds, share of them without a core) that had a core nearly all the time;
    the ``LEAST`` samples that come nearest to it where there are fewer."""
    free = [took for took, share in samples if share <= DISTURBED]
    if len(free) >= LEAST:
        return free
    return [took for took, _ in sorted(samples, key=lambda sample: sample[1])[:LEAST]]


def _times(work: Callable[[], Any], many: int) -> None:
    for _ in range(many):
        work()
