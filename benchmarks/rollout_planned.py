"""What the planner says of actor-critics before any trial, and what is measured then: a row of `reinforcement.py`."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fresh import here, points
from parked import SideFailed

import apportion
from apportion.core.address import load_workload
from apportion.errors import ApportionError

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ALLOWED = 0.2


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
        frames = load_workload(address).open_data().frames
        found = [point for _, point in points(here(apportion.plan(address, trial=False).found), address)]
        if not found:
            raise SideFailed("no candidate could be measured")
        error, worst = median(p.error for p in found), max(found, key=lambda p: p.error)
        told = [p.told() | {"planned": frames / p.predicted, "measured frames/s": frames / p.measured} for p in found]
        pairs = ", ".join(f"{p.name} {frames / p.predicted:.0f} planned, {frames / p.measured:.0f}" for p in found)
        return {
            "what": f"{self.what}: {pairs} frames/s; the worst is {worst.error:.0%} off",
            "ours": error,
            "peer": ALLOWED,
            "ratio": ALLOWED / max(error, 1e-9),
            "points": told,
        }
