"""conv_parallel's row of `model_parallel.py`.

    python benchmarks/conv_parallel_rows.py --json FILE [--only id,...]

conv_height  5 convolutions of 3x3 over images of 256x256, batch 2, conv_parallel on 2 ranks, against what two
             independent one-thread copies of the plain loop reach together (half of the twins' step each): steps/s.

Both sides are parked on a pipe and run in turn; medians of the rounds (data_parallel.py says how).
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from data_parallel import ROUND_SECONDS, ROUNDS, warmed_up
from parked import Side
from table import main, measured

HERE = Path(__file__).resolve().parent
WORKLOAD = f"{HERE / 'conv256.py'}:workload"


@dataclass(frozen=True)
class Twins:
    """Steps/s on some ranks, against that of as many plain copies at once, each on its own."""

    what: str
    ours: list[str]
    plain: list[str]
    ranks: int
    unit: str = "steps/s"

    def measure(self):
        """(ours, peer, ratio)."""
        with Side(self.ours, ranks=self.ranks) as ours, Side(self.plain, ranks=self.ranks) as twins:
            ours.wait_until_ready()
            twins.wait_until_ready()
            steps = max(2, round(ROUND_SECONDS / mean([warmed_up(ours), warmed_up(twins)])))
            rounds = [(ours.go(steps), twins.go(steps)) for _ in range(ROUNDS)]
        mine, theirs = (median(seconds) for seconds in zip(*rounds, strict=True))
        ours, peer = steps / mine, self.ranks * steps / theirs
        return ours, peer, ours / peer


MEASUREMENTS = {
    "conv_height": Twins(
        "5 convolutions of 3x3 at 256x256, batch 2, conv_parallel on 2 ranks against two plain copies at once",
        [str(HERE / "ours.py"), WORKLOAD, "conv_parallel", "2", "memory"],
        [str(HERE / "peers" / "twin.py"), WORKLOAD],
        ranks=2,
    )
}

if __name__ == "__main__":
    sys.exit(main(__doc__, MEASUREMENTS, measured(MEASUREMENTS)))
