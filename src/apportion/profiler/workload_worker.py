"""A worker that times a workload's step in parts, on command, while other workers of the same host time the same: how
profiles are measured. Between commands the process sleeps."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from apportion.comm.channel import Channel, Message
from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.data.batch import Batch
from apportion.core.sampler import DataShard
from apportion.core.torch_private import BatchNormBase, step_hooked
from apportion.core.workload import Workload
from apportion.parallel.optim.elementwise import rule_of
from apportion.parallel.optim.fused import needs_whole_weights, with_fused_updates
from apportion.parallel.rollouts.rollouts import Rollouts
from apportion.parallel.tracing import network
from apportion.parallel.tracing.network import Layer
from apportion.profiler.layer_splits import PartCalls, TimedPart, part_of, ways, window
from apportion.profiler.profiled_step import TimedCall, TimedStep, clock, kept_bytes
from apportion.profiler.rollouts.timer import RolloutTimer
from apportion.runtime.worker.cpu_wait import Waited
from apportion.runtime.worker.entry import run_program
from apportion.runtime.worker.job import Job


class Runs(NamedTuple):
    """The least numbers of runs of whatever is timed, beside the first; they are made even where the time is up
    before."""

    quick: int
    slow: int
    """The least number of runs of what takes longer than ``SLOW_SECONDS``: a momentary disturbance is short beside
    it."""


STEPS = Runs(quick=6, slow=2)
"""The least numbers of runs of whole steps: one in two has the workload's own update, the other a fused one."""
CALLS = Runs(quick=3, slow=1)
"""The least numbers of runs of layers and parts of them, of which the fastest run counts, the first included."""
MOST = 400
SLOW_SECONDS = 0.1


def main(sock: socket.socket, payload: bytes) -> int:
    """Time a step and its parts when asked to, as one of the ranks that do."""
    return run_program(sock, payload, serve_timings)


def serve_timings(job: Job, world: World, channel: Channel) -> None:
    """Make the workload's step (``ready``); then obey orders: ``facts``, ``loading``, ``pass``, ``layers``, ``part``,
    ``play``, ``learn``, ``close``. Rank 0 finds out for all what the workload is.

    Every rank begins to time when all are there, and goes on for the same number of seconds.
    """
    timed = StepProfiler(job.open(), world)
    channel.send({"kind": "ready"})
    while (order := channel.commands.get()) is not None and order["kind"] != "close":
        channel.send({"kind": order["kind"], **timed.obey(order)})
    world.close()


@final
class StepProfiler:
    """A step of one device, and its parts, that are timed."""

    def __init__(self, workload: Workload, world: World) -> None:
        self._world, self._device, self._workload = world, world.device, workload
        self._own = TimedStep(workload, world)
        self._fused = self._fused_update()

    def obey(self, order: Message) -> Message:
        """Return what the order asks for."""
        match order["kind"]:
            case "pass":
                return self.whole(order["rows"], order["seconds"])
            case "layers":
                return self.layers(order["rows"], order["seconds"])
            case "part":
                return self.part(order)
            case "play":
                return RolloutTimer(self._own, self._world).played(order["environments"], order["seconds"])
            case "learn":
                timer = RolloutTimer(self._own, self._world)
                return self._steps(timer.batch(order["environments"], order["steps"]), order["seconds"])
        if self._world.rank:
            return {}
        return facts(self._own) if order["kind"] == "facts" else loading(self._own)

    def _fused_update(self) -> Callable[[], None] | None:
        """Return an update by torch's fused kernels, as the strategies make it that divide the weights; None where the
        workload's own update is the same, or it is not known when the update comes."""
        replica = self._own.replica
        if self._workload.update is not None or replica.optimizers.searching:
            return None
        made: Any = with_fused_updates(self._workload).make_optimizer(list(replica.model.named_parameters()))
        if not step_hooked(made, before_only=True):
            return None
        clip, parameters = self._workload.clip_grad_norm, replica.trainable()

        def update() -> None:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            made.step()
            self._own.forget()

        return update

    # Whole steps

    def whole(self, rows: int, seconds: float) -> Message:
        """Time steps of ``rows`` rows: seconds of each one's forward (with the loss), backward and update; every other
        one with a ``fused`` update, where there is one."""
        return self._steps(self._own.rows(rows), seconds)

    def _steps(self, batch: Batch, seconds: float) -> Message:
        found: dict[str, list[float]] = {"forward": [], "backward": [], "update": [], "fused": []}
        waited = Waited()
        for run in self._timed(seconds, STEPS):
            if run == 0:
                self._warm(batch)
            elif self._workload.update is not None:
                self._one_of_its_own(batch, found)
            else:
                self._one(batch, found, self._fused if run % 2 == 0 else None)
        about = {"rows": len(batch), "without_core": waited.share()}
        return {**about, **{name: _median(times) for name, times in found.items()}}

    def _warm(self, batch: Batch) -> None:
        """Make a step that is not counted; both updates are made with its gradients."""
        step, parameters = self._own.step, self._own.replica.trainable()
        if self._workload.update is not None:
            step(batch)
            return
        step.backward(batch)
        gradients = [p.grad for p in parameters]
        step.update()
        if self._fused is not None:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            self._fused()

    def _one(self, batch: Batch, found: dict[str, list[float]], fused: Callable[[], None] | None) -> None:
        """Time one step. ``fused``: the update that is made instead of the workload's own."""
        began = clock(self._device)
        self._own.step.backward(batch)
        ended = clock(self._device)
        found["forward"].append(self._own.forward_ended - began)
        found["backward"].append(ended - self._own.forward_ended)
        (fused or self._own.step.update)()
        found["update" if fused is None else "fused"].append(clock(self._device) - ended)

    def _one_of_its_own(self, batch: Batch, found: dict[str, list[float]]) -> None:
        """Time one step of a workload with an ``update=``, which alone knows where forward ends and backward begins: a
        third is taken as forward, two thirds as backward."""
        replica = self._own.replica
        began, updating = clock(self._device), replica.seconds
        self._own.step(batch)
        updated = replica.seconds - updating
        rest = clock(self._device) - began - updated
        for name, seconds in (("forward", rest / 3), ("backward", rest * 2 / 3), ("update", updated)):
            found[name].append(seconds)

    # Layers

    def layers(self, rows: int, seconds: float) -> Message:
        """Time each call, in seconds, in the course of steps of ``rows`` rows; the loss is under ``""``."""
        batch = self._own.rows(rows)
        followed = self._own.followed(len(batch))
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in self._timed(seconds, CALLS):
            times = self._watched(batch) if followed is None else self._own.called(followed, batch)
            for name, both in times.items():
                found.setdefault(name, []).append(both)
        return {
            "rows": len(batch),
            "forward": {name: _least([f for f, _ in times]) for name, times in found.items()},
            "backward": {name: _least([b for _, b in times]) for name, times in found.items()},
        }

    def _watched(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Time the modules of a network that cannot be followed, by hooks. Backward is not seen, and is taken as twice
        the forward."""
        began: dict[str, float] = {}
        found: dict[str, tuple[float, float]] = {}
        calls: dict[str, int] = {}
        handles = []
        for path, module in self._own.replica.model.named_modules():
            if any(True for _ in module.children()):
                continue

            def begin(*_: Any, path: str = path) -> None:
                began[path] = clock(self._device)

            def end(module: nn.Module, *_: Any, path: str = path) -> None:
                seconds = clock(self._device) - began[path]
                calls[path] = calls.get(path, 0) + 1
                name = path or type(module).__name__
                name = name if calls[path] == 1 else f"{name}#{calls[path]}"
                found[name] = (seconds, 2 * seconds)

            handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
        try:
            self._own.step.backward(batch)
        finally:
            for handle in handles:
                handle.remove()
        self._own.forget()
        return found

    def part(self, order: Message) -> Message:
        """Time a layer by itself, in seconds: whole (``way=""``), or cut for a number of ranks; share None where it
        cannot be cut so."""
        batch = self._own.rows(order["rows"])
        followed = self._own.followed(len(batch))
        assert followed is not None, "only a network that is followed has parts"
        ran = self._own.ran(followed, batch, order["layer"])
        with self._own.replica.autocast():
            made = self._part(ran, order["way"], order["ranks"])
            if made is None:
                return {"share": None}
            found = [made[1].run() for _ in self._timed(order["seconds"], CALLS)]
        return {
            "share": made[0],
            "rows": len(batch),
            "forward": _least([f for f, _ in found]),
            "backward": _least([b for _, b in found]),
        }

    def _part(self, ran: TimedCall, way: str, ranks: int) -> tuple[float, TimedPart] | None:
        """Return (share, part), run once; None where the layer has no such part."""
        given = (ran.args, ran.kwargs)
        if not way:
            return 1.0, PartCalls(ran.call, *given, self._device, copies=ran.copies)
        try:
            made: tuple[float, TimedPart] | None = part_of(ran.call, given, way, ranks, copies=ran.copies)
            if made is not None:
                made[1].run()
        except (RuntimeError, ValueError):  # its sizes, or shapes that it was given, do not go with a part
            return None
        return made

    def _timed(self, seconds: float, least: Runs) -> Iterator[int]:
        """Yield the number of each run: 0, to get warm; and then, all ranks together, until the time is up."""
        began = clock(self._device)
        yield 0
        many = least.slow if clock(self._device) - began > SLOW_SECONDS else least.quick
        self._world.group().barrier()
        end = clock(self._device) + seconds
        for run in range(1, MOST + 1):
            if run > many and clock(self._device) > end:
                return
            yield run


def _median(times: list[float]) -> float | None:
    """Return the median of the times of whole steps, since a step's time is predicted as its median; None where there
    are no times."""
    return statistics.median_low(times) if times else None


def _least(times: list[float]) -> float:
    """Return the least of the times of a layer: only the proportions of layers count, there are few runs of each, and
    whatever disturbs a run makes it longer."""
    return min(times)


# The facts of a profile, beside times: a workload's layers, how they can be cut, what they keep, and what is asked of
# a strategy.


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
        "accumulate": workload.accumulate,
        "averages": workload.average is not None,
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
