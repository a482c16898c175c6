"""Every strategy x every network of these tests and of the examples x 1 to 4 workers x SGD and Adam: one device's, or
refused by name. All of it is slow; what is proved always is in test_conformance.py.

In pieces: ``scripts/test -m slow tests/test_conformance_grid.py -k "tensor_parallel and examples"``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import example_networks
import networks
import pytest
from ranks import by_value
from torch.optim import SGD, Adam, Optimizer

import apportion
from apportion import Workload
from apportion.values import find, names, parse

STEPS = networks.STEPS
EXACT = 1e-10
BATCH = 13
"""So that no number of workers divides it, and the last batch, of one row, leaves three of four workers without any."""
NETWORKS = {**networks.cases, **example_networks.examples}
EXAMPLES = tuple(example_networks.examples)
STRATEGIES = (
    "conv_parallel", 'conv_parallel(split="width")', 'conv_parallel(split="channel")', "data_parallel",
    "fully_sharded", "hybrid_parallel", 'hybrid_parallel(exchange="rotate")', "layer_placement", "map_reduce",
    "pipeline_parallel", 'pipeline_parallel(schedule="1f1b")', "single_device", "tensor_parallel(min_width=1)",
    "wavefront_parallel",
)  # fmt: skip

# The optimizers


def again(own: Optimizer, kind: Any, **options: Any) -> Optimizer:
    """Another optimizer with the same groups of the same parameters."""
    groups = []
    for group in own.param_groups:
        named = group.get("param_names")
        groups.append({"params": list(zip(named, group["params"], strict=True)) if named else group["params"]})
    return kind(groups, **options)  # type: ignore[no-any-return]


def under(workload: Workload, kind: Any, **options: Any) -> Workload:
    """The same training with other optimizers."""
    make = workload.optimizer

    def optimizer(named: Any) -> Any:
        own = make(named)
        if isinstance(own, Optimizer):
            return again(own, kind, **options)
        return {name: again(one, kind, **options) for name, one in own.items()}

    return replace(workload, optimizer=optimizer)


EPS = 1e-5
"""Of Adam: the gradient of a bias before a normalisation is rounding alone, which 1e-8 would make a step of."""
OPTIMIZERS: dict[str, Callable[[Workload], Workload]] = {
    "own": lambda workload: workload,
    "sgd": lambda workload: under(workload, SGD, lr=0.05, momentum=0.9),
    "adam": lambda workload: under(workload, Adam, lr=0.01, eps=EPS),
}
OWN = ("adam", "adamw", "rmsprop", "adagrad", "sgd_dampened")
"""Where the optimizer is all that is there."""
SPARSE = ("sparse_embeddings", "embedding_bag")
"""torch's Adam takes no sparse gradients, and its momentum makes them whole."""


def optimizers(name: str) -> tuple[str, ...]:
    if name in (*OWN, *SPARSE):
        return ("own",)
    return ("own", "sgd", "adam") if name == "lbfgs" else ("sgd", "adam")


# What is refused, and why

UPDATES = ("two_optimizers", "update_with_a_shard_without_loss_terms", "gan")
CARRIED = ("carried_state", "few_lanes", "char_rnn", "char_lstm")
NORMS = tuple(n for n in networks.cases if n.startswith("batch_norm_") and n != "batch_norm_frozen")
PART = (*NORMS, "counted_tokens", "a_shard_without_loss_terms", "coupled_examples", "resnet20_cifar10")
