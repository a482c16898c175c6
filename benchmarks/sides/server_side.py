"""Our side of `server_rpc` between hosts: one rank, parked. python server_side.py BYTES

Rank 0 is the worker, whose gradient and weights lie in its own memory; rank 1 has the shards. The rule is plain SGD.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from parked import serve, settle
from torch import nn

from apportion import World
from apportion.parallel.parameter_store.memory.shard_layout import StoreLayout
from apportion.parallel.parameter_store.memory.store_spec import StoreSpec
from apportion.parallel.parameter_store.network.network_step import NetworkPlaces, build_servers, doors_of
from apportion.parallel.parameter_store.network.network_store import NetworkStore
from apportion.parallel.parameter_store.network.views import Arbiter, ViewSource
from apportion.parallel.parameter_store.store import Contents
from apportion.process import keep_what_is_freed


def main(nbytes):
    settle()
    keep_what_is_freed()
    world = World.from_env(device="cpu")
    weights = nn.Parameter(torch.zeros(int(nbytes) // 4))
    optimizer = torch.optim.SGD([weights], lr=0.01)
    layout = StoreLayout({weights: "weights"}, optimizer)
    spec = StoreSpec(layout=layout, workers=1, batches=1 << 12, servers=1)
    places, doors = NetworkPlaces(tuple(world.hosts()), (1,), ()), doors_of(world)
    if world.rank == 1:
        counts = [torch.zeros(len(pieces)).numpy() for pieces in layout.pieces]
        touched = torch.ones(1, dtype=torch.bool).numpy()
        empty = Contents([torch.zeros(layout.total)], counts, touched, torch.zeros(0))
        answers = build_servers(doors, spec, places, lambda: empty)
        answers.start()
        serve(lambda steps: answers and None)
        return
    store = NetworkStore(spec, torch.zeros(layout.total), doors, ViewSource(doors, Arbiter(doors, (1,))), 0)
    store.gradient.fill_(1e-3)
    store.join()
    hyper = [layout.rule.hyper_of(optimizer.param_groups[0])]

    def run(steps):
        for batch in range(steps):
            store.record_taken(batch)
            store.record_versions(store.pulled)
            store.push(hyper)

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
