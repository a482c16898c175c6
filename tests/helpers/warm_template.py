"""The template that the workers of the tests are forked from: every strategy is imported in it already.

A run imports its one strategy in each of its workers. The tests start thousands of workers, and to compile and run
the same modules again in each of them took a third of their time.
"""

from __future__ import annotations

import importlib

from apportion.core.value import own_names
from apportion.runtime.spawn import template

MORE = (
    "apportion.profiler.workload_worker",
    "apportion.runtime.proof.proof_workload",
    "pytest",  # for functions of the tests themselves
    "ranks",
    "torch.utils.serialization",
    "warm_ranks",
)


def main() -> None:
    """``python warm_template.py FD DRIVER_PID``, as ``apportion.runtime.spawn.template`` is called."""
    for name in own_names("apportion.strategies"):
        importlib.import_module(f"apportion.strategies.{name}")
    for name in MORE:
        importlib.import_module(name)
    template.main()


if __name__ == "__main__":
    main()
