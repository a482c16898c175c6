"""Our side of `store.py`: one process, parked. python store_sides.py WHAT BYTES [MODE]

push_pull     one worker, the shards in shared memory: a gradient of its own in, the new weights out.
server        the same of a server in another process: rank 0 is the worker, rank 1 the server.
pushes        a worker of several, which share the weights of 8 shards: pushes of a gradient that lies ready, and pulls.

The rule is plain SGD.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from parked import serve, settle
from torch import nn

from apportion import World
from apportion.parallel.parameter_store.memory.shard_layout import StoreLayout
from apportion.parallel.parameter_store.memory.store_spec import StoreRegions, StoreSpec
from apportion.parallel.parameter_store.protocol import Sessions, StoreServer
from apportion.parallel.parameter_store.store import Contents, Store


def shared_store(nbytes, world, *, shards=None, lock_free=False, servers=0):
    """(the store of this rank, the rule's hyperparameters, its extent and memory)."""
    weights = nn.Parameter(torch.zeros(nbytes // 4))
    optimizer = torch.optim.SGD([weights], lr=0.01)
    layout = StoreLayout({weights: "weights"}, optimizer, shards=shards)
    extent = StoreSpec(layout=layout, workers=world.size, lock_free=lock_free, batches=1 << 12, servers=servers)
    memory = world.shared("store", StoreRegions(extent).nbytes)
    store = Store(extent, memory, worker=world.rank)
    counts = [torch.zeros(len(pieces)).numpy() for pieces in layout.pieces]
    touched = torch.ones(1, dtype=torch.bool).numpy()
    empty = Contents([torch.zeros(layout.total)], counts, touched, torch.zeros(0))
    store.settle(lambda: store.put(empty, done=0), first=world.rank == 0)
    return store, [layout.rule.hyper_of(optimizer.param_groups[0])], extent, memory


def push_pull(nbytes, world):
    store, hyper, _, _ = shared_store(nbytes, world)
    gradient = torch.full_like(store.weights, 1e-3)

    def run(steps):
        for _ in range(steps):
            store.gradient.copy_(gradient)
            store.push(hyper)

    return run


def server(nbytes, world):
    store, hyper, extent, memory = shared_store(nbytes, world, servers=1)
    if world.rank == 1:

        def of_worker(worker):
            torch.set_num_threads(1)
            found = Store(extent, memory, worker=worker, server=0)
            found.settle(lambda: None, first=False)
            return found

        answers = StoreServer(extent, 0, of_worker)
        store.memory.servers[0].place = answers.place
        store.memory.servers[0].word("pid").publish(os.getpid())
        return lambda steps: answers and None
    store.servers = Sessions(store, world, [1])
    gradient = torch.full_like(store.weights, 1e-3)

    def run(steps):
        for _ in range(steps):
            store.gradient.copy_(gradient)
            store.push(hyper)

    return run


def pushes(nbytes, world, mode):
    store, hyper, _, _ = shared_store(nbytes, world, shards=8, lock_free=mode == "hogwild")
    store.gradient.fill_(1e-3)

    def run(steps):
        for _ in range(steps):
            store.push(hyper)

    return run


def main(what, nbytes, *mode):
    settle()
    make = {"push_pull": push_pull, "server": server, "pushes": pushes}[what]
    serve(make(int(nbytes), World.from_env(device="cpu"), *mode))


if __name__ == "__main__":
    main(*sys.argv[1:])
