"""What the planner predicts and chooses, against what is then measured on this machine.

    python benchmarks/rows/planner.py --json FILE [--only id,...]

regret_*      the strategy and the layout that `apportion plan` chooses (with its trial) against the best of all exact
              candidates, in a fresh paired run after it: examples/s. With the interval that holds the median of chosen
              over best with 90 %. Bar: 0.95, or not distinguishable, for 7 of 8; 0.85 for all.
accuracy_*    the median error of the predicted time of an example, before any trial, of every candidate of every
              strategy, against the limit of 12 %. `points` has each pair.
accuracy_all  the same over all workloads, and accuracy_within the share of them within 30 %, against 90 %.
never_2x2     proposals of more threads than cores, of all candidates of all workloads: none.
planning_time seconds of a plan without trials of 200 layers on 64 devices, against 5.
first_measuring  seconds of measuring this machine and the CIFAR-10 network's profile, against 60.
hosts_*       two hosts of one core each (hosts.py; needs root), joined by 100 Mb/s, 1 Gb/s or as fast as the machine
              copies: what is chosen by their ranks (`apportion plan --launcher env`) against the best of all exact
              candidates afterwards: examples/s. Bar: 0.9.
hosts_crossing_*  the bandwidth at which data_parallel becomes faster than one host by itself, predicted, against that
              found by measuring at several rates: Mb/s, and the smaller over the larger. Bar: 0.8.

Candidates are measured in turns, A B A B, the others parked; figures are medians over the rounds. The first measuring
of all is short, on one host a few at a time; whoever is within 30 % of the best is measured again beside the chosen
one, in 21 rounds.
"""

import sys
import time
from functools import cache
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "networks"))

import planned_hosts
from fresh import distinguishable, here, points, regret
from many_layers import CLUSTERS, PROFILE
from parked import SideFailed
from table import main, result

import apportion
from apportion.core.address import load_workload
from apportion.errors import ApportionError
from apportion.planner.search import places_of
from apportion.planner.trials.trial import candidate
from apportion.profiler.measure_cluster import measure
from apportion.profiler.measure_workload import profile

BENCHMARKS = Path(__file__).resolve().parents[1]
EXAMPLES = BENCHMARKS.parent / "examples"
WORKLOADS = {
    "digits": f"{EXAMPLES / 'digits.py'}:workload",
    "mlp10m": f"{BENCHMARKS / 'networks/mlp10m.py'}:workload",
    "cifar10": f"{EXAMPLES / 'cifar10.py'}:workload",
    "resnet20": f"{EXAMPLES / 'resnet20_cifar10.py'}:workload",
    "alexnet": f"{BENCHMARKS / 'networks/alexnet.py'}:workload",
    "lstm_2x256": f"{BENCHMARKS / 'networks/recurrent.py'}:lstm_2x256",
    "lstm_4x512": f"{BENCHMARKS / 'networks/recurrent.py'}:lstm_4x512",
    "gpt": f"{EXAMPLES / 'transformer.py'}:workload",
}
MEDIAN_ERROR, CLOSE_ERROR, CLOSE_SHARE = 0.12, 0.3, 0.9
PLANNING_SECONDS, MEASURING_SECONDS = 5.0, 60.0


@cache
def planned(name):
    """With its trial."""
    return apportion.plan(WORKLOADS[name])


@cache
def measured(name):
    """Every candidate: [(candidate, Point)]."""
    return points(here(planned(name).found), WORKLOADS[name])


def regret_of(name):
    plan = planned(name)
    chosen = candidate(plan.chosen.strategy, plan.chosen.launcher)
    best, own, least, (low, high) = regret(chosen, measured(name), WORKLOADS[name])
    verdict = "distinguishable" if distinguishable(low, high) else "not distinguishable"
    return {
        "what": f"chosen: {chosen}; best: {best}; {verdict} at 90 %",
        "ours": 1 / own,
        "peer": 1 / least,
        "ratio": least / own,
        "interval": [low, high],
        "distinguishable": distinguishable(low, high),
        "candidates": [p.told() for _, p in sorted(measured(name), key=lambda e: e[1].measured)],
    }


def errors(names):
    found = [(name, p) for name in names for _, p in measured(name)]
    if not found:
        raise SideFailed("no candidate could be measured")
    return found


def accuracy_of(*names):
    found = errors(names)
    middle = median(p.error for _, p in found)
    name, worst = max(found, key=lambda e: e[1].error)
    return {
        "what": f"median error of {len(found)} predictions; the worst {worst.error:.0%}: {name}, {worst.name}",
        "ours": middle,
        "peer": MEDIAN_ERROR,
        "ratio": MEDIAN_ERROR / middle,
        "points": [{"workload": name, **p.told()} for name, p in found],
    }


def within():
    found = errors(WORKLOADS)
    share = sum(p.error <= CLOSE_ERROR for _, p in found) / len(found)
    return share, CLOSE_SHARE, share / CLOSE_SHARE


def never():
    """Of every layout of every candidate."""
    layouts = [p.layout for name in WORKLOADS for p in planned(name).found]
    over = [w for w in layouts if any(w.together(r) * w.threads > w.device(r).cores for r in range(w.ranks))]
    return {
        "what": f"of {len(layouts)} candidates, those with more threads than cores",
        "ours": len(over),
        "peer": 0,
        "ratio": float(not over),
    }


def planning():
    """The slower of two kinds of cluster."""
    seconds = []
    for cluster in CLUSTERS:
        began = time.perf_counter()
        apportion.plan(network=PROFILE, cluster=cluster, trial=False)
        seconds.append(time.perf_counter() - began)
    return max(seconds), PLANNING_SECONDS, PLANNING_SECONDS / max(seconds)


def first_measuring():
    began = time.perf_counter()
    cluster = measure(remeasure=True)
    profile(load_workload(WORKLOADS["cifar10"]), cluster, places_of(cluster))
    took = time.perf_counter() - began
    return took, MEASURING_SECONDS, MEASURING_SECONDS / took


def guarded(measure, *arguments):
    """For `result`: what the planner or a worker says is why a row failed."""

    def measured():
        try:
            return measure(*arguments)
        except (ApportionError, ValueError, OSError) as error:
            raise SideFailed(str(error)) from error

    return measured


ROWS = {
    **{f"regret_{name}": ("", "examples/s", guarded(regret_of, name)) for name in WORKLOADS},
    **{f"accuracy_{name}": ("", "of measured", guarded(accuracy_of, name)) for name in WORKLOADS},
    "accuracy_all": ("", "of measured", guarded(accuracy_of, *WORKLOADS)),
    "accuracy_within": ("share of predictions within 30 %", "of all", guarded(within)),
    "never_2x2": ("proposals of more threads than cores", "proposals", guarded(never)),
    "planning_time": ("200 layers on 64 devices, without trials", "s", guarded(planning)),
    "first_measuring": ("this machine and the CIFAR-10 network, for the first time", "s", guarded(first_measuring)),
    **{
        f"hosts_{name}_{label}": ("", "examples/s", guarded(planned_hosts.chosen, WORKLOADS[name], label))
        for name in planned_hosts.NAMES
        for label in planned_hosts.RATES
    },
    **{
        f"hosts_crossing_{name}": ("", "Mb/s", guarded(planned_hosts.crossing, WORKLOADS[name]))
        for name in planned_hosts.NAMES
    },
}


def rows(names):
    """One after the other; of one workload all that needs the same measurements."""
    return (result(name, what, unit, measure) for name, (what, unit, measure) in ROWS.items() if name in names)


if __name__ == "__main__":
    sys.exit(main(__doc__, ROWS, rows))
