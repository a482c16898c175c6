"""What the planner says of actor-critics before any trial, and what is measured then: a row of `reinforcement.py`."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from fresh import here, points
from parked import SideFailed

import apportion
from apportion.core.address import load_workload
from apportion.core.value import parse
from apportion.errors import ApportionError
from apportion.planner.trials.trial import candidate

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALLOWED = 0.2
OTHERS = 2
"""The sizes of rollouts that are measured beside the example's own."""


@dataclass(frozen=True)
class Planned:
    """An example of an actor-critic."""

    name: str
    unit: str = "of measured"

    @property
    def what(self):
        return f"a3c_{self.name}.py: what is predicted against what is measured"

    def measure(self):
        """What `table.result` takes."""
        try:
            return self._measured()
        except (ApportionError, ValueError, OSError) as error:
            raise SideFailed(str(error)) from error

    def _measured(self):
        address = f"{EXAMPLES / f'a3c_{self.name}.py'}:workload"
        workload = load_workload(address)
        own = workload.open_data()
        plan = apportion.plan(address, trial=False)
        found = [
            _told(point, own.environments, own.steps)
            for _, point in points(here(plan.found), replace(workload, evaluation=None))
        ]
        for size in others(plan.rollouts, (own.environments, own.steps)):
            found += _of_size(plan.rollouts, size, workload)
        if not found:
            raise SideFailed("no candidate could be measured")
        error, worst = median(p["error"] for p in found), max(found, key=lambda p: p["error"])
        pairs = ", ".join(
            f"{p['size']} {p['candidate']} {p['planned']:.0f} planned, {p['measured frames/s']:.0f}" for p in found
        )
        return {
            "what": f"{self.what}: {pairs} frames/s; the worst is {worst['error']:.0%} off",
            "ours": error,
            "peer": ALLOWED,
            "ratio": ALLOWED / max(error, 1e-9),
            "points": found,
        }


def others(rates, own):
    """The sizes (environments, steps) that are furthest from the example's own: the most environments for its steps,
    and the fewest for the most steps."""
    sizes = list(dict.fromkeys((r.environments, r.steps) for r in rates))
    by_width = [size for size in sizes if size[1] == own[1]]
    by_length = [size for size in sizes if size[0] < own[0]]
    chosen = [max(by_width, default=own), max(by_length, key=lambda size: (size[1], size[0]), default=own)]
    return [size for size in dict.fromkeys(chosen) if size != own][:OTHERS]


def _of_size(rates, size, workload):
    """What was planned and what is measured of every strategy with rollouts of this size."""
    found = []
    there = [r for r in rates if (r.environments, r.steps) == size and r.kind == "cpu"]
    for actors in sorted({_actors(r) for r in there}):
        priced = [
            (_candidate(r), SimpleNamespace(seconds_per_example=size[0] * size[1] / r.frames_per_second))
            for r in there
            if _actors(r) == actors
        ]
        found += [_told(point, *size) for _, point in points(priced, resized(workload, *size, actors))]
    return found


def _actors(rate):
    """A batch has a rollout of each actor, which data_parallel deals to its workers."""
    return rate.workers if rate.strategy == "data_parallel" else 1


def _candidate(rate):
    strategy = parse(rate.strategy, "apportion.strategies")
    return candidate(strategy, apportion.local(workers=rate.workers, threads=1, device="cpu"))


def resized(workload, environments, steps, actors):
    """The workload with rollouts of another size."""

    def of_size(data):
        return data.resized(environments, steps=steps, actors=actors)

    return replace(workload.with_data(of_size), batch_size=actors, evaluation=None)


def _told(point, environments, steps):
    frames = environments * steps
    return point.told() | {
        "size": f"{environments} x {steps}",
        "error": point.error,
        "planned": frames / point.predicted,
        "measured frames/s": frames / point.measured,
    }
