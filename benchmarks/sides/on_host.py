"""One rank of a launch, parked, which does what it is told with one workload. python on_host.py FILE:NAME

Each line of standard input is an order as JSON, and gets one line of JSON back:

[STRATEGY, STEPS]      so many steps of it, {"seconds"}: built once and kept; single_device is rank 0's alone
["plan", FILE]         what the ranks plan; rank 0 writes it to the file
["crossing", A, B]     {"bits"} a second of the cable from which on B is faster than A, as predicted; None: from none

An order that the workload or the place does not allow is answered with {"refused": why}.
"""

import json
import os
import sys
import time
from dataclasses import replace
from math import exp, log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from endless import endless
from parked import settle

from apportion import World
from apportion.core.address import load_workload
from apportion.core.value import parse
from apportion.errors import ApportionError
from apportion.process import keep_what_is_freed

SLOWEST, FASTEST = 1e5, 1e10
"""Bytes/s of the cables that are looked at."""
HALVINGS = 40


class Rank:
    """Its steps, by strategy; and what it has planned."""

    def __init__(self, address):
        self.address, self.world, self.built = address, World.from_env(device="cpu"), {}

    def answer(self, what, *how):
        try:
            if what == "plan":
                return self.plan(*how)
            if what == "crossing":
                return {"bits": self.crossing(*how)}
            return {"seconds": self.seconds(what, *how)}
        except (ValueError, ApportionError) as error:
            return {"refused": str(error)}

    def seconds(self, strategy, steps):
        if strategy not in self.built:
            value = parse(strategy, "apportion.strategies")
            if value.one_process and self.world.rank:
                return 0.0
            self.built[strategy] = value.build(endless(self.address), World() if value.one_process else self.world)
        step = self.built[strategy]
        start = time.perf_counter()
        for _ in range(steps):
            step(step.take())
        return time.perf_counter() - start

    def planned(self, *, trial):
        from apportion.planner.launched_choice import plan_launched  # what only makes steps needs no planner

        return plan_launched(load_workload(self.address), self.world, trial=trial)

    def plan(self, path):
        began = time.perf_counter()
        plan = self.planned(trial=True)
        if plan is not None:
            able = [p for p in plan.found if p.cost is not None]
            exact = [p for p in able if p.strategy.exact]
            told = {
                "strategy": plan.strategy,
                "predicted": str(min(exact, key=lambda p: p.cost.seconds_per_example).strategy),
                "batch_size": plan.profile.batch_size,
                "found": [
                    {"strategy": str(p.strategy), "exact": p.strategy.exact, "predicted": p.cost.step_seconds}
                    for p in able
                ],
            }
            Path(path).write_text(json.dumps(told))
        return {"seconds": time.perf_counter() - began}

    def crossing(self, alone, parallel):
        """By halving, on the cluster as it was measured with its cable as fast as is said."""
        plan = self.planned(trial=False)
        if plan is None:
            return None
        one, many = (able(plan, name) for name in (alone, parallel))

        def faster(rate):
            layout = replace(many.layout, cluster=with_cable(plan.cluster, rate))
            return many.strategy.cost(plan.profile, layout).seconds_per_example < one.cost.seconds_per_example

        low, high = SLOWEST, FASTEST
        if not faster(high):
            return None
        for _ in range(HALVINGS):
            middle = exp((log(low) + log(high)) / 2)
            low, high = (low, middle) if faster(middle) else (middle, high)
        return 8 * high


def able(plan, name):
    """What was priced under that name. ValueError where it has no price, with the reason."""
    found = [p for p in plan.found if str(p.strategy) == name]
    for p in found:
        if p.cost is not None:
            return p
    raise ValueError(f"{name}: {found[0].refusal if found else 'it was no candidate'}")


def with_cable(cluster, rate):
    """Of so many bytes a second, where the machine copies no slower: each message takes as long as it was measured,
    or as the cable takes, whichever is longer."""
    across = [link for link in cluster.links if len({cluster.device(name).host for name in link.devices}) > 1]
    slower = {
        link: replace(
            link,
            bandwidth=min(link.bandwidth, rate),
            measured=tuple(replace(m, seconds=max(m.seconds, link.latency + m.nbytes / rate)) for m in link.measured),
        )
        for link in across
    }
    return replace(cluster, links=tuple(slower.get(link, link) for link in cluster.links))


def main(address):
    settle()
    keep_what_is_freed()  # as apportion's workers do
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is no answer
    rank = Rank(address)
    rank.world.group()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(rank.answer(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
