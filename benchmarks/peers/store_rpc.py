"""A parameter server by torch.distributed.rpc: one process, parked. python store_rpc.py BYTES [CHANNEL]

CHANNEL: what carries tensors between hosts, `basic` or `mpt_uv`; without it tensorpipe chooses, as on one host.

Rank 0 is the worker: it sends its gradient and gets the new weights, in one call. Rank 1 has the weights and takes a
step of plain SGD under a lock, as in PyTorch's own tutorial of a parameter server by rpc; it answers by the weights
themselves, without a copy.
"""

import sys
import threading
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore")  # rpc is deprecated
from torch.distributed import rpc  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from parked import serve, settle  # noqa: E402

weights, lock = torch.zeros(0), threading.Lock()


def push_pull(gradient):
    with lock:
        weights.add_(gradient, alpha=-0.01)
        return weights


def main(nbytes, channel=None):
    import os

    global weights
    settle()
    rank = int(os.environ["RANK"])
    weights = torch.zeros(int(nbytes) // 4)
    options = {} if channel is None else {"_transports": ["uv"], "_channels": list(dict.fromkeys([channel, "basic"]))}
    how = rpc.TensorPipeRpcBackendOptions(rpc_timeout=180, **options)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=how)
    gradient = torch.full_like(weights, 1e-3)

    def run(steps):
        for _ in range(steps if rank == 0 else 0):
            rpc.rpc_sync("rank1", push_pull, args=(gradient,))

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
