"""Distributed PyTorch training that proves it is the same network.

The public names; each is imported when it is first used, so that the command line can start workers before torch is in.
Every strategy, launcher and compression stands here under the name it is written with.
"""

import importlib
from typing import TYPE_CHECKING, Any

from apportion import comm as comm  # apportion.comm.shared_memory_hook; it imports nothing by itself

if TYPE_CHECKING:
    from apportion.api.check import check as check
    from apportion.api.check_script import check_script as check_script
    from apportion.api.compare import compare as compare
    from apportion.api.export import export as export
    from apportion.api.plan import plan as plan
    from apportion.api.predict import evaluate as evaluate
    from apportion.api.predict import predict as predict
    from apportion.api.serve import serve as serve
    from apportion.api.train import run as run
    from apportion.api.train import train as train
    from apportion.comm.world import World as World
    from apportion.core.averages.ema import Ema as ema  # noqa: F401
    from apportion.core.averages.swa import Swa as swa  # noqa: F401
    from apportion.core.data.batch import Batch as Batch
    from apportion.core.event import Event as Event
    from apportion.core.event import Result as Result
    from apportion.core.orders.custom import Custom as custom  # noqa: F401
    from apportion.core.orders.grouped import Grouped as grouped  # noqa: F401
    from apportion.core.orders.weighted import Weighted as weighted  # noqa: F401
    from apportion.core.orders.with_replacement import WithReplacement as with_replacement  # noqa: F401
    from apportion.core.policy import Policy as Policy
    from apportion.core.sampler import DataShard as DataShard
    from apportion.core.sampler import Draws as Draws
    from apportion.core.strategy import State as State
    from apportion.core.strategy import Step as Step
    from apportion.core.strategy import Strategy as Strategy
    from apportion.core.strategy import batches as batches
    from apportion.core.workload import Evaluation as Evaluation
    from apportion.core.workload import Workload as Workload
    from apportion.core.workload import accuracy as accuracy
    from apportion.cost_model.cluster import Cluster as Cluster
    from apportion.cost_model.profile import Profile as Profile
    from apportion.errors import ApportionError as ApportionError
    from apportion.errors import CheckpointError as CheckpointError
    from apportion.errors import Disproved as Disproved
    from apportion.errors import WorkerFailed as WorkerFailed
    from apportion.parallel.compression.methods.bf16 import Bf16 as bf16  # noqa: F401
    from apportion.parallel.compression.methods.fp16 import Fp16 as fp16  # noqa: F401
    from apportion.parallel.compression.methods.int8 import Int8 as int8  # noqa: F401
    from apportion.parallel.compression.methods.power_sgd import PowerSgd as power_sgd  # noqa: F401
    from apportion.parallel.compression.methods.top_k import TopK as top_k  # noqa: F401
    from apportion.parallel.rollouts.actor_critic import actor_critic as actor_critic
    from apportion.planner.plan import Plan as Plan
    from apportion.profiler.measure_cluster import measure as measure
    from apportion.reporting.loggers.csv import Csv as csv  # noqa: F401
    from apportion.reporting.loggers.mlflow import Mlflow as mlflow  # noqa: F401
    from apportion.reporting.loggers.tensorboard import Tensorboard as tensorboard  # noqa: F401
    from apportion.reporting.loggers.trackio import Trackio as trackio  # noqa: F401
    from apportion.reporting.loggers.wandb import Wandb as wandb  # noqa: F401
    from apportion.runtime.checkpoint.load import load as load
    from apportion.runtime.launch.env import Env as env  # noqa: F401
    from apportion.runtime.launch.local import Local as local  # noqa: F401
    from apportion.runtime.launch.ray import Ray as ray  # noqa: F401
    from apportion.runtime.launch.slurm import Slurm as slurm  # noqa: F401
    from apportion.runtime.launch.ssh import Ssh as ssh  # noqa: F401
    from apportion.runtime.proof.proof import Proof as Proof
    from apportion.script_check.findings import Finding as Finding
    from apportion.script_check.findings import ScriptAnswer as ScriptAnswer
    from apportion.serving.config import Serving as Serving
    from apportion.strategies.data_parallel import DataParallel as data_parallel  # noqa: F401
    from apportion.strategies.fully_sharded import FullySharded as fully_sharded  # noqa: F401
    from apportion.strategies.hogwild import Hogwild as hogwild  # noqa: F401
    from apportion.strategies.local_sgd import LocalSgd as local_sgd  # noqa: F401
    from apportion.strategies.map_reduce import MapReduce as map_reduce  # noqa: F401
    from apportion.strategies.parameter_server import ParameterServer as parameter_server  # noqa: F401
    from apportion.strategies.single_device import SingleDevice as single_device  # noqa: F401

__version__ = "0.1.0"

_HOMES = {
    "ScriptAnswer": "script_check.findings",
    "ApportionError": "errors",
    "Batch": "core.data.batch",
    "CheckpointError": "errors",
    "Cluster": "cost_model.cluster",
    "DataShard": "core.sampler",
    "Disproved": "errors",
    "Draws": "core.sampler",
    "Evaluation": "core.workload",
    "Event": "core.event",
    "Finding": "script_check.findings",
    "Plan": "planner.plan",
    "Policy": "core.policy",
    "Profile": "cost_model.profile",
    "Proof": "runtime.proof.proof",
    "Result": "core.event",
    "Serving": "serving.config",
    "State": "core.strategy",
    "Step": "core.strategy",
    "Strategy": "core.strategy",
    "WorkerFailed": "errors",
    "Workload": "core.workload",
    "World": "comm.world",
    "accuracy": "core.workload",
    "actor_critic": "parallel.rollouts.actor_critic",
    "batches": "core.strategy",
    "check": "api.check",
    "check_script": "api.check_script",
    "compare": "api.compare",
    "export": "api.export",
    "load": "runtime.checkpoint.load",
    "measure": "profiler.measure_cluster",
    "plan": "api.plan",
    "evaluate": "api.predict",
    "predict": "api.predict",
    "run": "api.train",
    "serve": "api.serve",
    "train": "api.train",
}
_FOLDERS = (
    "apportion.strategies",
    "apportion.runtime.launch",
    "apportion.core.orders",
    "apportion.core.averages",
    "apportion.reporting.loggers",
    "apportion.parallel.compression.methods",
)

__all__ = sorted(_HOMES)


def _values() -> dict[str, str]:
    from apportion.core.value import own_names

    return {name: folder for folder in _FOLDERS for name in own_names(folder)}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(f"apportion.{_HOMES[name]}"), name)
    elif not name.startswith("_") and name in (values := _values()):
        from apportion.core.value import find

        found = find(name, values[name])
    else:
        raise AttributeError(f"apportion has no {name!r}: its public names are {', '.join(__dir__())}")
    if isinstance(found, type):
        from apportion.core.field_docs import describe_fields

        describe_fields(found)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *_values()])
