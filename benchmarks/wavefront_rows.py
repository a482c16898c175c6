"""wavefront_parallel against twins: two processes of one thread, each with a whole copy of the network and batches of
its own. What they reach together is the most that two cores have to give, since neither ever waits.

    python benchmarks/wavefront_rows.py --json FILE [--only id,...]

wave_2x256, wave_4x512, wave_8x256, wave_4x1024   2 workers against the twins: examples/s.
wave_threads   2x256 on 2 workers against one process with 2 threads: examples/s.

An LSTM language model of characters (recurrent.py), layers x hidden; a step is forward, loss, backward and update, its
batch in memory already, on both sides.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from data_parallel import ROUND_SECONDS, warmed_up
from parked import Side
from table import main, measured

HERE = Path(__file__).resolve().parent
OURS, TWIN, THREADS = (str(HERE / name) for name in ("ours.py", "peers/twin.py", "peers/threads.py"))
ROUND_SECONDS_IN_ALL, ROUNDS = 60.0, 15
"""Of slow steps fewer rounds."""


@dataclass(frozen=True)
class AgainstTwins:
    """Examples/s of one network on two workers, and of two networks on one each (or one on two threads)."""

    what: str
    workload: str
    batch_size: int
    threads: bool = False
    strategy: str = "wavefront_parallel"
    unit: str = "examples/s"

    def measure(self):
        """(ours, peer, ratio)."""
        address = f"{HERE / 'recurrent.py'}:{self.workload}"
        command = [THREADS, address, str(self.batch_size)] if self.threads else [TWIN, address]
        copies = 1 if self.threads else 2
        with (
            Side([OURS, address, self.strategy, str(self.batch_size), "memory"], ranks=2) as ours,
            Side(command, ranks=copies) as peer,
        ):
            ours.wait_until_ready()
            peer.wait_until_ready()
            seconds = mean([warmed_up(ours), warmed_up(peer)])
            steps = max(1, round(ROUND_SECONDS / seconds))
            many = max(3, min(ROUNDS, round(ROUND_SECONDS_IN_ALL / (2 * steps * seconds))))
            rounds = [(ours.go(steps), peer.go(steps)) for _ in range(many)]
        own, other = (median(seconds) for seconds in zip(*rounds, strict=True))
        ours, peer = steps * self.batch_size / own, copies * steps * self.batch_size / other
        return ours, peer, ours / peer


def against_twins(layers, hidden, length, rows):
    return AgainstTwins(
        f"LSTM {layers}x{hidden}, T {length}, batch {rows}, wavefront on 2 workers against 2 copies on one each",
        f"lstm_{layers}x{hidden}",
        rows,
    )


MEASUREMENTS = {
    "wave_2x256": against_twins(2, 256, 128, 32),
    "wave_4x512": against_twins(4, 512, 128, 32),
    "wave_8x256": against_twins(8, 256, 128, 16),
    "wave_4x1024": against_twins(4, 1024, 64, 64),
    "wave_threads": AgainstTwins(
        "LSTM 2x256, T 128, batch 32, wavefront on 2 workers against nn.LSTM with 2 threads",
        "lstm_2x256",
        32,
        threads=True,
    ),
}


if __name__ == "__main__":
    sys.exit(main(__doc__, MEASUREMENTS, measured(MEASUREMENTS)))
