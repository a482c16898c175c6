"""The all-reduce of so many bytes of float32, over and over: one rank, parked. python allreduce.py ours|gloo BYTES

Ours: the group that a script under torchrun gets, `apportion.World.from_env().group()`. The peer: gloo.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from parked import serve, settle


def ours(tensor):
    from apportion import World

    group = World.from_env(device="cpu").group()
    return lambda: group.all_reduce(tensor).wait()


def gloo(tensor):
    dist.init_process_group("gloo")
    return lambda: dist.all_reduce(tensor)


def main(side, nbytes):
    settle()
    all_reduce = {"ours": ours, "gloo": gloo}[side](torch.zeros(int(nbytes) // 4))

    def run(steps):
        for _ in range(steps):
            all_reduce()

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
