"""The grid of every strategy x every network x 1 to 4 workers x optimizers, and what is refused of it, by name.

``tests/conformance/test_conformance_grid.py`` proves all of it on the CPU, ``benchmarks/rows/gpu.py`` a sample on a
GPU. It needs no pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import example_networks
import networks
from torch.optim import SGD, Adam, Optimizer

from apportion import Workload

STEPS = networks.STEPS
EXACT = 1e-10
BATCH = 13
"""So that no number of workers divides it, and the last batch, of one row, leaves three of four workers without any."""
NETWORKS = {**networks.cases, **example_networks.examples}
EXAMPLES = tuple(example_networks.examples)
OF_SLICES, OF_STAGES = (
    f"data_parallel(of={of}, replicas=2)"
    for of in ("tensor_parallel(min_width=1)", "pipeline_parallel(microbatches=3)")
)
WHOLE = 'pipeline_parallel(microbatches=4, batch_norm="whole")'
STRATEGIES = (
    "conv_parallel", 'conv_parallel(split="width")', 'conv_parallel(split="channel")', "data_parallel",
    OF_SLICES, OF_STAGES, "fully_sharded", "hybrid_parallel", 'hybrid_parallel(exchange="rotate")', "layer_placement",
    "map_reduce", "pipeline_parallel", 'pipeline_parallel(schedule="1f1b")', WHOLE, "single_device",
    "tensor_parallel(min_width=1)", "wavefront_parallel",
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


OPTIMIZERS: dict[str, Callable[[Workload], Workload]] = {
    "own": lambda workload: workload,
    "sgd": lambda workload: under(workload, SGD, lr=0.05, momentum=0.9),
    "adam": lambda workload: under(workload, Adam, lr=0.01, eps=networks.EPS),
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
COUPLED = ("coupled_examples", "contrastive")
NORMS = tuple(name for name in networks.cases if name.startswith("batch_norm_") and name != "batch_norm_frozen")
PART = (*NORMS, "counted_tokens", "a_shard_without_loss_terms", "resnet20_cifar10")
"""With statistics of the batch."""
CHANGING = ("frozen_and_unused_parameters", "buffers")
"""A forward that depends on values, or changes what the module holds."""
CONVOLUTIONS = (
    "cnn", "batch_norm_1d", "batch_norm_2d", "batch_norm_3d", "batch_norm_cumulative", "batch_norm_without_weights",
    "batch_norm_without_running_statistics", "batch_norm_frozen", "batch_norm_channels_last", "cifar10",
    "resnet20_cifar10", "alexnet_cifar10",
)  # fmt: skip
OF_THREE = (
    *OWN, "mlp", "parameters_without_optimizer", "parameter_groups", "loss_of_shape_one", "class_weights", "clipped",
    "one_cycle", "step_schedule", "augmented", "draws_in_the_data", "own_collate", "counted_tokens_without_norm",
)  # fmt: skip
STAGES = {**dict.fromkeys(OF_THREE, 3), "embedding_bag": 2}
"""Into how many stages at most a network can be cut, where those are fewer than four."""
LAYERS = {"carried_state": 2, "few_lanes": 2, "char_rnn": 1, "char_lstm": 4}
"""Of recurrent networks."""
ROWS = {"a_shard_without_loss_terms": 3, "update_with_a_shard_without_loss_terms": 3}
"""Of a batch, where they are fewer than four."""

Refused = dict[str, tuple[str, ...]]
"""What a strategy says of which networks; the first that holds a name is it."""


def besides(accepted: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in NETWORKS if name not in accepted)


def fewer(most: Mapping[str, int], workers: int) -> tuple[str, ...]:
    return tuple(name for name, many in most.items() if many < workers)


def refused(strategy: str, workers: int) -> Refused:
    if strategy in (OF_SLICES, OF_STAGES):
        inner = strategy.partition("of=")[2].removesuffix(", replicas=2)")
        return {"cannot feed": fewer(ROWS, 2), **refused(inner, workers // 2)}
    kind = strategy.partition("(")[0]
    cannot_feed: Refused = {"cannot feed": fewer(ROWS, workers)}
    staged: Refused = {
        "update=": UPDATES, "carried": CARRIED, "cannot be followed|calls other layers": (*CHANGING, "lbfgs"),
        "use workers<=": fewer(STAGES, workers),
    }  # fmt: skip
    found: dict[str, Refused] = {
        "conv_parallel": {
            "update=": UPDATES, "carried": CARRIED, "has no convolution": besides(CONVOLUTIONS),
            "cannot be traced|changes its own": CHANGING,
        },
        "data_parallel": cannot_feed,
        "fully_sharded": {**cannot_feed, "update=": UPDATES, "sparse gradients": SPARSE},
        "hybrid_parallel": {
            **({"couples examples": COUPLED} if "rotate" in strategy else {}), **cannot_feed,
            "update=": UPDATES, "carry=": CARRIED, "has no convolution": besides(CONVOLUTIONS),
            "so hybrid_parallel cannot cut": CHANGING,
        },
        "layer_placement": staged if workers > 1 else {},
        "map_reduce": {
            **cannot_feed, "an update= of your own": UPDATES, "carried along": CARRIED, "couples examples": COUPLED,
            "the statistics of a part": PART,
        },
        "pipeline_parallel": {
            "couples examples": COUPLED, "update=": UPDATES, "carried": CARRIED, "the statistics of a part": PART,
            "change the buffer": ("buffers",), **(staged if workers > 1 else {}),
        },
        "single_device": {},
        "tensor_parallel": {"update=": UPDATES, "no layer that it can slice": ("lbfgs",)},
        "wavefront_parallel": {
            "update=": UPDATES, "use workers<=": fewer(LAYERS, workers), "has no nn.LSTM": besides(LAYERS),
        },
    }  # fmt: skip
    if strategy == WHOLE:  # whoever needs the whole batch computes it at once
        del found[kind]["the statistics of a part"], found[kind]["change the buffer"]
    return found[kind]


def workers_of(strategy: str) -> tuple[int, ...]:
    """That it can run on, up to four."""
    if strategy in (OF_SLICES, OF_STAGES):
        return (2, 4)
    return (1,) if strategy == "single_device" else (1, 2, 3, 4)


SEARCHES = ("single_device", "map_reduce")
"""What evaluates the loss several times an update, as L-BFGS asks."""


def refusal(strategy: str, name: str, workers: int, optimizer: str) -> str | None:
    """What a strategy says; None: it must be exact."""
    reasons = refused(strategy, workers)
    why = next((reason for reason, of in reasons.items() if name in of), None)
    searches = name == "lbfgs" and optimizer == "own"
    return why or ("map_reduce" if searches and strategy not in SEARCHES else None)


# A point of the grid


def at(name: str, optimizer: str) -> Workload:
    """The workload of a network under an optimizer."""
    workload = OPTIMIZERS[optimizer](NETWORKS[name](BATCH))
    if name == "lbfgs":  # a line search on another part of the examples each time runs off, on one device too
        workload = replace(workload, batch_size=len(workload.data()))
    return workload
