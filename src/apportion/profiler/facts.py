"""The facts of a profile, beside times: a workload's layers, how they can be cut, what they keep, and what is asked of
a strategy."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from apportion.comm.channel import Message
from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.sampler import DataShard
from apportion.core.torch_private import BatchNormBase
from apportion.parallel.optim.elementwise import rule_of
from apportion.parallel.optim.fused import needs_whole_weights
from apportion.parallel.rollouts.rollouts import Rollouts
from apportion.parallel.tracing import network
from apportion.parallel.tracing.network import Layer
from apportion.profiler.call_timer import TimedCall, kept_bytes
from apportion.profiler.layer_splits import ways, window
from apportion.profiler.profiled_step import TimedStep

LOADED, LOADING_SECONDS = 64, 0.25
"""The largest number of batches that are loaded to measure how long loading takes, and the seconds after which no more
are loaded."""
FEW = 8
"""The number that the batch is divided by for a step that is made only for its traces."""


def facts(own: TimedStep) -> Message:
    """Return what a profile says beside times; the layers as far as they are known, with ``like`` naming the first
    layer that takes as long."""
    workload, replica, model = own.workload, own.replica, own.replica.model
    batch_norm = any(isinstance(m, BatchNormBase) and m.training for m in model.modules())
    own.step(own.rows(min(len(own.batch), max(2, len(own.batch) // FEW))))  # from now on there are slots
    numel = sum(p.numel() for p in replica.trainable())
    slots = sum(t.numel() for _, t in replica.optimizers.slots() if t.dim())
    layers, untraceable = _layers(own)
    dataset = own.step.source.dataset
    played: object = dataset
    rollouts = played if isinstance(played, Rollouts) else None
    return {
        "batch_size": len(own.batch),  # fewer than asked for where there are fewer examples
        "model": type(model).__name__,
        "parameter_bytes": sum(p.nbytes for p in model.parameters()),
        "slots": round(slots / max(1, numel)),
        "buffer_bytes": sum(b.nbytes for b in model.buffers()),
        "examples": len(dataset),  # type: ignore[arg-type]
        "frames": dataset.frames if isinstance(dataset, ActedDataset) else 0,
        "environments": 0 if rollouts is None else rollouts.environments,
        "rollout_steps": 0 if rollouts is None else rollouts.steps,
        "batch_norm": batch_norm,
        "cut_by_rows": workload.count is not None,
        "own_update": workload.update is not None,
        "carries": workload.carry is not None,
        "element_wise": all(rule_of(o, g) is not None for o in replica.optimizers.values() for g in o.param_groups),
        "whole_updates": any(needs_whole_weights(o) for o in replica.optimizers.values()),
        "precision": workload.precision,
        "layers": layers,
        "untraceable": untraceable,
    }


def loading(own: TimedStep) -> Message:
    """Measure the seconds of loading an example, once the data are open: several batches may be gathered at once. Where
    the network makes it by what it does, also those in the environments, and of acting."""
    source, rows = own.step.source, 0
    own.batch.inputs  # noqa: B018 (the first takes longer)
    dataset = source.dataset
    if isinstance(dataset, ActedDataset):
        dataset.rollout_facts()
    before = source.seconds
    for step in range(source.deal.batches, min(source.total, source.deal.batches + LOADED)):
        batch = source.at(step, DataShard())
        batch.inputs  # noqa: B018
        rows += len(batch)
        if source.seconds - before > LOADING_SECONDS:
            break
    times = dataset.rollout_facts() if isinstance(dataset, ActedDataset) else {}
    return {
        "seconds": (source.seconds - before) / max(1, rows),
        "environment": times.get("environment", 0.0),
        "acting": times.get("acting", 0.0),
    }


def _layers(own: TimedStep) -> tuple[list[dict[str, Any]], str | None]:
    """Return (the layers in order of execution, without times, and none where the network is not called by its forward
    alone; the reason why the network cannot be cut between its layers, or None)."""
    model, batch = own.replica.model, own.batch
    if own.workload.loss is None:
        return [], "update= calls the network as it likes"
    inputs = own.inputs(batch)
    with own.replica.autocast():
        traced = network.trace(model, inputs)
    followed = own.followed(len(batch))
    if followed is None:
        return [_described(layer) for layer in traced.layers], traced.untraceable
    with own.replica.autocast():
        kept = kept_bytes(followed.calls, inputs, own.loss(batch))
    calls = {ran.name: ran for ran in followed.calls.ran}
    found, first = [], dict[Any, str]()
    for layer in traced.layers:
        ran = calls[layer.name]
        facts = _described(layer) | _cuts(ran) | {"kept_bytes": kept.get(layer.name, 0)}
        found.append(facts | {"like": first.setdefault(_signature(layer, ran), layer.name)})
    return found, traced.untraceable


def _described(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "inputs": list(layer.inputs),
        "parameter_bytes": layer.parameter_bytes,
        "activation_bytes": layer.activation_bytes,
        "kept_bytes": layer.activation_bytes,
        "flops": float(layer.flops),
        "like": layer.name,
        "ways": [],
    }


def _cuts(ran: TimedCall) -> dict[str, Any]:
    """Describe how a layer can be cut, and what that depends on."""
    found: dict[str, Any] = {"ways": list(ways(ran.call, ran.node, ran.args))}
    first = ran.args[0] if ran.args else None
    if isinstance(ran.call, nn.RNNBase) and isinstance(first, Tensor) and first.dim() == 3:
        found |= {"stack": ran.call.num_layers, "length": first.shape[1 if ran.call.batch_first else 0]}
    if window(ran.call) is None or not isinstance(first, Tensor):
        return found
    sides = [[first.shape[2 + axis], *window(ran.call, axis)] for axis in range(min(2, first.dim() - 2))]  # type: ignore[misc]
    found |= {"image": sides[0], "groups": getattr(ran.call, "groups", 1)}
    return found | {"across": sides[-1]} if sides[-1] != sides[0] else found


def _signature(layer: Layer, ran: TimedCall) -> Any:
    """Return a key that is equal for layers that take the same time: repeated blocks are timed as one."""
    settings = repr(ran.call) if isinstance(ran.call, nn.Module) else repr(ran.node.kwargs)
    wanted = tuple(t.requires_grad for t in tree.tensors((ran.args, ran.kwargs)))
    return layer.kind, settings, layer.input_shapes, layer.output_shapes, wanted
