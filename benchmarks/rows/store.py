"""The parameter store against torch.distributed.rpc, Ray, its own lock-free mode, and synchronous steps.

    python benchmarks/rows/store.py --json FILE [--only id,...]

store_rpc        push a gradient of 100 MiB and pull the new weights, one worker, shards in shared memory (servers=0),
                 against a parameter server by rpc (peers/store_rpc.py): MB/s, both ways counted.
store_ray        the same against a Ray actor (peers/store_ray.py).
server_rpc       the same with the shards in another process (servers=1) against rpc.
sharded_hogwild  pushes of 100,000 floats into 8 shards by 2 workers, with a lock for each shard against none: pushes/s.
straggler        seconds until MNIST's test accuracy is 0.97, 2 workers of which one is four times slower: synchronous
                 data_parallel (the peer) against parameter_server, Adagrad. The slow one sleeps for three times its
                 processor time (mnist.py).

The rule is plain SGD, float32; a gradient begins in the worker's own memory and the weights end there (sharded_hogwild:
in place on both sides). Processes have one thread each and flush denormals. The sides of a row are warmed up and run in
turn, the others parked on a pipe; store_rpc, store_ray and server_rpc are measured in one run, all sides in turn.
Figures are medians over the rounds; a ratio above 1 is better than the peer. Ray has an environment of its own, made
with pip at the first use (peers/ray.txt) below ~/.cache/apportion/peers. A side that fails makes a failed row, and exit
status 1.
"""

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from own_environment import environment_of
from parked import Side, SideFailed
from table import main, result

BENCHMARKS = Path(__file__).resolve().parents[1]
SIDES, RPC, RAY = (
    str(BENCHMARKS / name) for name in ("sides/store_sides.py", "peers/store_rpc.py", "peers/store_ray.py")
)
NBYTES = 100 << 20
PUSHED = 400_000
ROUNDS, ROUND_SECONDS, WARM_UP_SECONDS = 15, 0.5, 1.0
STRAGGLER_ROUNDS = 3
ENDING_SECONDS = 30
ACCURACY = 0.97
WHAT = {
    "store_rpc": "push + pull of 100 MiB, shards in shared memory, against torch.distributed.rpc",
    "store_ray": "push + pull of 100 MiB, shards in shared memory, against a Ray actor",
    "server_rpc": "push + pull of 100 MiB, one server process, against torch.distributed.rpc",
    "sharded_hogwild": "pushes of 100,000 floats, 8 shards, 2 workers, a lock a shard against none",
    "straggler": "MNIST to 0.97, 2 workers, one 4x slower, parameter_server against data_parallel",
}
UNITS = {"sharded_hogwild": "pushes/s", "straggler": "s"}
MOVED = {"store_rpc": ("ours", "rpc"), "store_ray": ("ours", "ray"), "server_rpc": ("server", "rpc")}


class EndsByItself(Side):
    """A side that starts processes of its own, and has to end them."""

    def __exit__(self, *error):
        for process in self._processes:
            process.stdin.close()
            try:
                process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        super().__exit__(*error)


def side(name):
    """One of those that move 100 MiB."""
    if name == "ray":
        return EndsByItself([RAY, str(NBYTES)], ranks=1, python=environment_of("ray"))
    command, ranks = {
        "ours": ([SIDES, "push_pull", str(NBYTES)], 1),
        "server": ([SIDES, "server", str(NBYTES)], 2),
        "rpc": ([RPC, str(NBYTES)], 2),
    }[name]
    return Side(command, ranks=ranks)


def warmed_up(side):
    """Seconds a step, after running for a while."""
    steps, end = 1, time.monotonic() + WARM_UP_SECONDS
    while True:
        seconds = side.go(steps)
        if time.monotonic() > end:
            return seconds / steps
        steps *= 2


def move(names):
    """MB/s of each side, all of them in turn; the reason where one failed."""
    sides, steps, failed = {}, {}, {}
    with ExitStack() as stack:
        for name in names:
            try:
                sides[name] = stack.enter_context(side(name))
                sides[name].wait_until_ready()
                steps[name] = max(1, round(ROUND_SECONDS / warmed_up(sides[name])))
            except SideFailed as failure:
                sides.pop(name, None)
                failed[name] = str(failure)
        seconds = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name in list(sides):
                try:
                    seconds[name].append(sides[name].go(steps[name]) / steps[name])
                except SideFailed as failure:
                    del sides[name]
                    failed[name] = str(failure)
    return {name: 2 * NBYTES / 1e6 / median(seconds[name]) for name in sides}, failed


def pushes():
    """(ours, peer, ratio)."""
    with (
        Side([SIDES, "pushes", str(PUSHED), "sharded"], ranks=2) as ours,
        Side([SIDES, "pushes", str(PUSHED), "hogwild"], ranks=2) as peer,
    ):
        ours.wait_until_ready()
        peer.wait_until_ready()
        steps = max(2, round(ROUND_SECONDS / min(warmed_up(ours), warmed_up(peer))))
        rounds = [(ours.go(steps), peer.go(steps)) for _ in range(2 * ROUNDS + 1)]
    ours, peer = (2 * steps / median(seconds) for seconds in zip(*rounds, strict=True))
    return ours, peer, ours / peer


def straggler():
    """(ours, peer, ratio)."""
    rounds = [(until_accurate("parameter_server"), until_accurate("data_parallel")) for _ in range(STRAGGLER_ROUNDS)]
    ours, peer = (median(seconds) for seconds in zip(*rounds, strict=True))
    return ours, peer, peer / ours


def until_accurate(strategy):
    """Seconds of training, evaluations among them."""
    import apportion

    launcher, began = apportion.local(workers=2, threads=1), None
    for event in apportion.run(f"{BENCHMARKS / 'networks/mnist.py'}:uneven", strategy, launcher=launcher):
        if event.kind == "step" and began is None:
            began = event.seconds
        if event.kind == "evaluation" and event.data["metrics"]["accuracy"] >= ACCURACY:
            return event.seconds - (began or 0.0)
    raise SideFailed(f"{strategy} did not come to {ACCURACY}")


def results(names):
    """Row after row."""
    moved = [name for name in names if name in MOVED]
    if moved:
        figures, failed = move(list(dict.fromkeys(side for name in moved for side in MOVED[name])))
        for name in moved:
            yield result(name, WHAT[name], "MB/s", lambda sides=MOVED[name]: against(sides, figures, failed))
    for name, measure in (("sharded_hogwild", pushes), ("straggler", straggler)):
        if name in names:
            yield result(name, WHAT[name], UNITS[name], measure)


def against(sides, figures, failed):
    """(ours, peer, ratio) of two sides that were measured in one run."""
    if reasons := [f"{side}: {failed[side]}" for side in sides if side in failed]:
        raise SideFailed("; ".join(reasons))
    ours, peer = (figures[side] for side in sides)
    return ours, peer, ours / peer


if __name__ == "__main__":
    sys.exit(main(__doc__, WHAT, results))
