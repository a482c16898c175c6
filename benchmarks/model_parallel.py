"""Strategies that split a network, against torch's DDP and against all threads of one process.

    python benchmarks/model_parallel.py --json FILE [--only id,...]

slices_*          the step of a wide MLP, tensor_parallel against DDP over gloo at its best setting (peers/ddp.py), 2
                  processes: examples/s.
slices_threads_*  the same step against one process with all threads (peers/threads.py): examples/s.

A step is forward, loss, backward and update, its batch in memory. Processes have one thread each (but for
peers/threads.py) and flush denormals. Both sides of a row are warmed up and then run in turn, A B A B, the other one
parked on a pipe; figures are medians over the rounds, and a ratio above 1 is better than the peer.
"""

import sys

from data_parallel import DDP, MLP10M, OURS, THREADS, Throughput
from table import main, measured

WIDE = "MLP 3072-2048-2048-10"


def slices(batch_size, peer, options=()):
    """tensor_parallel on 2 workers against DDP, or against all threads."""
    against = {DDP: "DDP, 2 processes", THREADS: "one process with all threads"}[peer]
    return Throughput(
        f"step of {WIDE}, batch {batch_size}, tensor_parallel against {against}",
        [OURS, MLP10M, "tensor_parallel", str(batch_size), "memory"],
        [peer, MLP10M, str(batch_size), *options],
        ranks=2,
        peer_ranks=2 if peer == DDP else 1,
        batch_size=batch_size,
    )


BATCHES = (32, 128, 1024)
MEASUREMENTS = {
    **{f"slices_{size}": slices(size, DDP, ["memory"]) for size in BATCHES},
    **{f"slices_threads_{size}": slices(size, THREADS) for size in BATCHES},
}

if __name__ == "__main__":
    sys.exit(main(__doc__, MEASUREMENTS, measured(MEASUREMENTS)))
