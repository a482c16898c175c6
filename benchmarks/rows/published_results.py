"""What the planner's model says of steps that others have measured, against what they published.

    python benchmarks/rows/published_results.py --json FILE [--only id,...]

vtrain_error        transformers on up to eight A100s (vtrain.py): relative error of the predicted step, on rows that
                    the machine's five constants were not fitted to; mean of 20 draws of 100 rows to fit to.
vtrain_top3         the same: what is lost by trying the three ways that are predicted to be fastest and taking the best
                    of them, mean over workloads that were measured in more than three ways.
pipedream_vgg16     PipeDream's profile of VGG-16, 16 workers at 10 Gb/s: replicas of the first stage (they: 15-1).
pipedream_resnet50  of ResNet-50: replicas of the only stage (they: data parallel).

Nothing is timed here. The first two have a limit instead of a peer. The files lie in ~/.cache/apportion/data/published
or $APPORTION_DATA/published; where one is missing the row fails, and the exit status is 1.
"""

import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

import pipedream
import vtrain
from parked import SideFailed
from table import main, measured

ERROR_LIMIT, REGRET_LIMIT = 0.095, 0.015
WORKERS, BITS_PER_SECOND = 16, 10e9


class Row(NamedTuple):
    """One of the table."""

    what: str
    unit: str
    measure: Callable[[], tuple[float, float, float]]
    """(ours, peer or limit, ratio)."""


def file(name):
    """One of the files."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(os.environ.get("APPORTION_DATA") or cache_folder / "apportion" / "data") / "published" / name
    if not path.exists():
        raise SideFailed(f"{path} is not there")
    return path


@cache
def draws():
    """Of vTrain's rows."""
    rows = vtrain.read(file("vtrain-single-half.csv"))
    found = [vtrain.draw(rows, seed) for seed in range(vtrain.DRAWS)]
    errors = [one.error for one in found]
    print(f"vtrain: error {mean(errors):.4f}, sd {stdev(errors):.4f}, at most {max(errors):.4f}; constants:")
    for name in vtrain.DATA_SHEET:
        values = [one.constants[name] for one in found]
        print(f"    {name:<18}{mean(values):>10.4g}, sd {stdev(values):.2g}; data sheet {vtrain.DATA_SHEET[name]:.4g}")
    return found


def within(limit, figure):
    """Mean of a figure over the draws, against its limit."""
    ours = mean(figure(one) for one in draws())
    return ours, limit, limit / max(ours, 1e-9)


def stages(name, published):
    """Replicas of the first stage; the ratio is 1 where all stages have as many as published, else 0."""
    from apportion.cost_model.partitioning import replicated

    profile = pipedream.read(file(f"pipedream-{name}-graph.txt"))
    replicas = [stage.replicas for stage in replicated(pipedream.works(profile), WORKERS, BITS_PER_SECOND / 8)[0]]
    return replicas[0], published[0], float(replicas == published)


ROWS = {
    "vtrain_error": Row("relative error of predicted steps", "", partial(within, ERROR_LIMIT, lambda one: one.error)),
    "vtrain_top3": Row(
        "best of the predicted three against the best", "", partial(within, REGRET_LIMIT, lambda one: one.regret)
    ),
    "pipedream_vgg16": Row("stages of VGG-16 on 16 workers: 15-1", "replicas", partial(stages, "vgg16", [15, 1])),
    "pipedream_resnet50": Row("ResNet-50 on 16 workers: data parallel", "replicas", partial(stages, "resnet50", [16])),
}

if __name__ == "__main__":
    raise SystemExit(main(__doc__, ROWS, measured(ROWS)))
