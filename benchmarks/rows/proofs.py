"""The time that the proof of a run takes: the first one, and one that is reused.

    python benchmarks/rows/proofs.py --json FILE [--other CHECKOUT] [--only id,...] [--turns 5]

first_*   seconds of the proof of data_parallel on 2 workers, as its `start` event gives them, against the same in
          another checkout (`--other`; without it against this one): the digits, ResNet-20, a GPT-2 of 4 layers.
reused_*  seconds by which a run that reuses that proof starts later than one without a proof.
fsdp_*    seconds of the proof of fully_sharded against those of data_parallel.

Each turn is a process of its own, in an empty folder of caches. Both sides of a row are measured in turn, and figures
are medians over the turns. A ratio is the peer's seconds over ours: above 1 ours is faster. ResNet-20 needs CIFAR-10.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from table import main, result

BENCHMARKS = Path(__file__).resolve().parents[1]
WORKLOADS = {
    "digits": "examples/digits.py:workload",
    "resnet20": "examples/resnet20_cifar10.py:workload",
    "gpt2": str(BENCHMARKS / "networks/gpt2_4_layers.py:workload"),
}
SIDE = '''
import json, sys, tempfile, time
import apportion

def seconds(strategy, **options):
    """Seconds to the start, and those of the proof."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        events = apportion.run(
            sys.argv[1], strategy, launcher=apportion.local(workers=2), run_dir=folder + "/run", **options
        )
        for event in events:
            if event.kind == "start":
                taken = time.perf_counter() - began
                events.close()
                return taken, event.proof
    raise SystemExit("the run never started")

if __name__ == "__main__":
    if sys.argv[2] == "first":
        proof = seconds(sys.argv[3])[1]
        assert proof["verdict"] == "equal" and not proof["remembered"], proof
        print(json.dumps(proof["seconds"]))
    else:
        seconds(sys.argv[3])
        pairs = []
        for turn in range(5):
            started, proof = seconds(sys.argv[3])
            assert proof["remembered"], proof
            pairs.append(started - seconds(sys.argv[3], check=False)[0])
        print(json.dumps(sorted(pairs)[2]))
'''


def taken(checkout, workload, what, strategy):
    """The seconds that one process of a checkout prints."""
    with tempfile.TemporaryDirectory() as caches:
        data = os.environ.get("APPORTION_DATA") or str(Path.home() / ".cache" / "apportion" / "data")
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(checkout, "src")),
            "XDG_CACHE_HOME": caches,
            "APPORTION_DATA": data,
        }
        found = subprocess.run(
            [sys.executable, "-c", SIDE, WORKLOADS[workload], what, strategy],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if found.returncode != 0:
            raise SystemExit(f"{workload}, {what}, {strategy} failed in {checkout}:\n{found.stderr[-2000:]}")
        return json.loads(found.stdout.splitlines()[-1])


def in_turn(sides, turns):
    """(ours, peer, ratio) of two sides, each a function that measures once."""
    found = [[side() for side in sides] for _ in range(turns)]
    ours, peer = (median(seconds) for seconds in zip(*found, strict=True))
    return ours, peer, peer / ours


def results(names, other=str(BENCHMARKS.parent), turns=5):
    here = str(BENCHMARKS.parent)
    for name in names:
        row, workload = name.split("_")
        if row == "first":
            sides = [partial(taken, tree, workload, "first", "data_parallel") for tree in (here, other)]
            what = f"first proof, {workload}: here against {'itself' if other == here else 'the other checkout'}"
        elif row == "reused":
            sides = [partial(taken, tree, workload, "reused", "data_parallel") for tree in (here, other)]
            what = f"reused proof, {workload}: what it adds to the start"
        else:
            sides = [partial(taken, here, workload, "first", name) for name in ("fully_sharded", "data_parallel")]
            what = f"first proof, {workload}: fully_sharded against data_parallel"
        yield result(name, what, "s", partial(in_turn, sides, turns))


KNOWN = [f"{row}_{workload}" for row in ("first", "reused") for workload in WORKLOADS] + ["fsdp_digits", "fsdp_gpt2"]

if __name__ == "__main__":
    main(__doc__, KNOWN, results, other=str(BENCHMARKS.parent), turns=5)
