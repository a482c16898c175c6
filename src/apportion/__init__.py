"""Distributed PyTorch training that proves it is the same network.

The public names; each is imported when it is first used, so that the command line can start workers before torch is in.
Every strategy and launcher stands here under the name it is written with.
"""

import importlib
from typing import TYPE_CHECKING, Any

from apportion import comm as comm  # apportion.comm.shared_memory_hook; it imports nothing by itself

if TYPE_CHECKING:
    from apportion.batch import Batch as Batch
    from apportion.cluster import Cluster as Cluster
    from apportion.deal import DataShard as DataShard
    from apportion.deal import Draws as Draws
    from apportion.errors import ApportionError as ApportionError
    from apportion.errors import CheckpointError as CheckpointError
    from apportion.errors import Disproved as Disproved
    from apportion.errors import WorkerFailed as WorkerFailed
    from apportion.event import Event as Event
    from apportion.launch.env import Env as env  # noqa: F401
    from apportion.launch.local import Local as local  # noqa: F401
    from apportion.planner.measure import measure as measure
    from apportion.planner.plan import Plan as Plan
    from apportion.policy import Policy as Policy
    from apportion.profile import Profile as Profile
    from apportion.proof import Proof as Proof
    from apportion.serving.serving import Serving as Serving
    from apportion.strategies.data_parallel import DataParallel as data_parallel  # noqa: F401
    from apportion.strategies.fully_sharded import FullySharded as fully_sharded  # noqa: F401
    from apportion.strategies.hogwild import Hogwild as hogwild  # noqa: F401
    from apportion.strategies.local_sgd import LocalSgd as local_sgd  # noqa: F401
    from apportion.strategies.map_reduce import MapReduce as map_reduce  # noqa: F401
    from apportion.strategies.parameter_server import ParameterServer as parameter_server  # noqa: F401
    from apportion.strategies.single_device import SingleDevice as single_device  # noqa: F401
    from apportion.strategy import State as State
    from apportion.strategy import Step as Step
    from apportion.strategy import Strategy as Strategy
    from apportion.strategy import batches as batches
    from apportion.trained import load as load
    from apportion.verbs.check import check as check
    from apportion.verbs.compare import compare as compare
    from apportion.verbs.export import export as export
    from apportion.verbs.plan import plan as plan
    from apportion.verbs.serve import serve as serve
    from apportion.verbs.train import run as run
    from apportion.verbs.train import train as train
    from apportion.workload import Evaluation as Evaluation
    from apportion.workload import Workload as Workload
    from apportion.workload import accuracy as accuracy
    from apportion.world import World as World

__version__ = "0.1.0"

_HOMES = {
    "ApportionError": "errors",
    "Batch": "batch",
    "CheckpointError": "errors",
    "Cluster": "cluster",
    "DataShard": "deal",
    "Disproved": "errors",
    "Draws": "deal",
    "Evaluation": "workload",
    "Event": "event",
    "Plan": "planner.plan",
    "Policy": "policy",
    "Profile": "profile",
    "Proof": "proof",
    "Serving": "serving.serving",
    "State": "strategy",
    "Step": "strategy",
    "Strategy": "strategy",
    "WorkerFailed": "errors",
    "Workload": "workload",
    "World": "world",
    "accuracy": "workload",
    "batches": "strategy",
    "check": "verbs.check",
    "compare": "verbs.compare",
    "export": "verbs.export",
    "load": "trained",
    "measure": "planner.measure",
    "plan": "verbs.plan",
    "run": "verbs.train",
    "serve": "verbs.serve",
    "train": "verbs.train",
}
_FOLDERS = ("apportion.strategies", "apportion.launch")

__all__ = sorted(_HOMES)


def _values() -> dict[str, str]:
    from apportion.values import names

    return {name: folder for folder in _FOLDERS for name in names(folder)}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(f"apportion.{_HOMES[name]}"), name)
    elif not name.startswith("_") and name in (values := _values()):
        from apportion.values import find

        found = find(name, values[name])
    else:
        raise AttributeError(f"apportion has no {name!r}: its public names are {', '.join(__dir__())}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *_values()])
