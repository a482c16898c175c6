"""A workload's step timed in parts, on command, while other workers of the same host time the same: how profiles are
measured. Between commands the process sleeps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apportion import network, tree
from apportion.batch import Batch
from apportion.comm.channel import Channel, Message
from apportion.deal import DataShard
from apportion.graph import Unfollowed, follow
from apportion.job import Job
from apportion.network import Layer
from apportion.parallel.fused import with_fused_updates
from apportion.parallel.one_device import OneDeviceStep
from apportion.parallel.replica import Replica
from apportion.parallel.rules import rule_of
from apportion.timed_calls import Calls, Ran, clock, kept_bytes
from apportion.timed_parts import Called, Part, part_of, ways, window
from apportion.workload import Workload
from apportion.world import World

LEAST, MOST = 3, 400
"""Runs of whatever is timed, beside the first, which nobody counts; the time may be up before."""
LOADED, LOADING_SECONDS = 64, 0.25
"""Batches that are loaded at most to see how long that takes; no more are where it takes that long."""


def serve_timings(job: Job, world: World, channel: Channel) -> None:
    """Make the workload's step and tell what it is (``facts``); then obey: ``pass``, ``layers``, ``part``, ``close``.

    Every rank begins to time when all are there, and goes on for the same number of seconds."""
    timed = Timed(job.open(), world)
    channel.send({"kind": "facts", **(timed.facts() if world.rank == 0 else {})})
    while (order := channel.commands.get()) is not None:
        if order["kind"] == "close":
            break
        if order["kind"] == "pass":
            channel.send({"kind": "pass", **timed.whole(order["rows"], order["seconds"], fused=order["fused"])})
        elif order["kind"] == "layers":
            channel.send({"kind": "layers", **timed.layers(order["rows"], order["seconds"])})
        elif order["kind"] == "part":
            channel.send({"kind": "part", **timed.part(order)})
    world.close()


@dataclass
class _Followed:
    """A network whose calls are known."""

    calls: Calls
    inputs: Any


class Timed:
    """A step of one device, and its parts."""

    def __init__(self, workload: Workload, world: World) -> None:
        self._world, self._device = world, world.device
        self._forward_ended = 0.0
        self._workload = workload
        loss = workload.loss
        if loss is not None:

            def timed(outputs: Any, targets: Any) -> Tensor:
                found = loss(outputs, targets)
                self._forward_ended = clock(self._device)
                return found

            workload = replace(workload, loss=timed)
        self._step = OneDeviceStep(workload, world.device)
        self._replica: Replica = self._step.replica
        self._batch = self._step.source.at(0, DataShard())
        self._at: dict[tuple[str, float], Ran] = {}
        self._known: dict[float, _Followed | None] = {}
        self._because: str | None = None
        self._fused = self._fused_update()

    def _fused_update(self) -> Callable[[], None] | None:
        """An update by torch's fused kernels, as the strategies make it that divide the weights; None where the
        workload's own is the same, or nothing is known of when it comes."""
        if self._workload.update is not None or self._replica.searching:
            return None
        made: Any = with_fused_updates(self._workload).optimizer(list(self._replica.model.named_parameters()))
        if not made._optimizer_step_pre_hooks:
            return None
        clip, parameters = self._workload.clip_grad_norm, self._replica.trainable()

        def update() -> None:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            made.step()
            self._forget()

        return update

    def _forget(self) -> None:
        """The gradients; and a step is made."""
        for p in self._replica.trainable():
            p.grad = None
        self._replica.commit()

    # What it is

    def facts(self) -> Message:
        """What a profile says beside times; the layers as far as they are known."""
        workload, replica, model = self._workload, self._replica, self._replica.model
        loading = self._loading()
        self._step(self._batch)  # the optimizer's slots are there from now on
        numel = sum(p.numel() for p in replica.trainable())
        slots = sum(t.numel() for _, t in replica.slots() if t.dim())
        return {
            "batch_size": len(self._batch),  # fewer than asked for where there are fewer examples
            "model": type(model).__name__,
            "parameter_bytes": sum(p.nbytes for p in model.parameters()),
            "slots": round(slots / max(1, numel)),
            "buffer_bytes": sum(b.nbytes for b in model.buffers()),
            "loading_seconds": loading,
            "examples": len(self._step.source.dataset),  # type: ignore[arg-type]
            "batch_norm": any(isinstance(m, _BatchNorm) and m.training for m in model.modules()),
            "cut_by_rows": workload.count is not None,
            "own_update": workload.update is not None,
            "carries": workload.carry is not None,
            "element_wise": all(rule_of(o, g) is not None for o in replica.optimizers.values() for g in o.param_groups),
            "precision": workload.precision,
            "layers": self._layers(),
            "untraceable": self._because,
        }

    def _loading(self) -> float:
        """Seconds of an example, once the data are open: several batches may be gathered at once."""
        source, rows = self._step.source, 0
        self._batch.inputs  # noqa: B018 (the first takes longer)
        before = source.seconds
        for step in range(source.deal.batches, min(source.total, source.deal.batches + LOADED)):
            batch = source.at(step, DataShard())
            batch.inputs  # noqa: B018
            rows += len(batch)
            if source.seconds - before > LOADING_SECONDS:
                break
        return (source.seconds - before) / max(1, rows)

    def _layers(self) -> list[dict[str, Any]]:
        """In order of execution, without times; none where the network is not called by its forward alone."""
        model, batch = self._replica.model, self._batch
        if self._workload.loss is None:
            self._because = "update= calls the network as it likes"
            return []
        inputs = self._inputs(batch)
        with self._replica.autocast():
            traced = network.trace(model, inputs)
        self._because = traced.untraceable
        followed = self._followed(len(batch))
        if followed is None:
            return [_described(layer) for layer in traced.layers]
        with self._replica.autocast():
            kept = kept_bytes(followed.calls, inputs, self._loss(batch))
        calls = {ran.name: ran for ran in followed.calls.ran}
        found, first = [], dict[Any, str]()
        for layer in traced.layers:
            ran = calls[layer.name]
            told = _described(layer) | _cuts(ran) | {"kept_bytes": kept.get(layer.name, 0)}
            found.append(told | {"like": first.setdefault(_signature(layer, ran), layer.name)})
        return found

    # Whole steps

    def whole(self, rows: int, seconds: float, *, fused: bool) -> Message:
        """Steps of so many rows: seconds of each one's forward (with the loss), backward and update; in turns with
        ``fused`` updates where that is asked for."""
        batch = self._rows(rows)
        found: dict[str, list[float]] = {"forward": [], "backward": [], "update": [], "fused": []}
        for first in self._timed(seconds):
            kept = found if not first else {name: [] for name in found}
            if self._workload.update is None:
                self._one(batch, kept)
            else:
                self._one_of_its_own(batch, kept)
            if fused and self._fused is not None:
                self._one(batch, kept, self._fused)
        return {"rows": len(batch), **{name: _median(times) for name, times in found.items()}}

    def _one(self, batch: Batch, found: dict[str, list[float]], fused: Callable[[], None] | None = None) -> None:
        """With ``fused``: instead of the workload's own update."""
        began = clock(self._device)
        self._step.backward(batch)
        ended = clock(self._device)
        found["forward"].append(self._forward_ended - began)
        found["backward"].append(ended - self._forward_ended)
        (fused or self._step.update)()
        found["update" if fused is None else "fused"].append(clock(self._device) - ended)

    def _one_of_its_own(self, batch: Batch, found: dict[str, list[float]]) -> None:
        """Where forward ends and backward begins in an ``update=`` only itself knows: a third and two thirds."""
        began, updating = clock(self._device), self._replica.seconds
        self._step(batch)
        updated = self._replica.seconds - updating
        rest = clock(self._device) - began - updated
        for name, seconds in (("forward", rest / 3), ("backward", rest * 2 / 3), ("update", updated)):
            found[name].append(seconds)

    # Layers

    def layers(self, rows: int, seconds: float) -> Message:
        """Seconds of each call, in the course of steps of so many rows: of the loss under ``""``."""
        batch = self._rows(rows)
        followed = self._followed(len(batch))
        found: dict[str, list[tuple[float, float]]] = {}
        for first in self._timed(seconds):
            times = self._watched(batch) if followed is None else self._called(followed, batch)
            for name, both in times.items():
                found.setdefault(name, [])
                if not first:
                    found[name].append(both)
        return {
            "rows": len(batch),
            "forward": {name: _least([f for f, _ in times]) for name, times in found.items()},
            "backward": {name: _least([b for _, b in times]) for name, times in found.items()},
        }

    def _called(self, followed: _Followed, batch: Batch) -> dict[str, tuple[float, float]]:
        with self._replica.autocast():
            return followed.calls.forward_and_backward(followed.inputs, self._loss(batch))

    def _watched(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """By hooks: of a network that cannot be followed. Backward is not seen: twice the forward."""
        began: dict[str, float] = {}
        found: dict[str, tuple[float, float]] = {}
        calls: dict[str, int] = {}
        handles = []
        for path, module in self._replica.model.named_modules():
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
            self._step.backward(batch)
        finally:
            for handle in handles:
                handle.remove()
        self._forget()
        return found

    def part(self, order: Message) -> Message:
        """Seconds of a layer by itself: whole (``way=""``), or cut for so many ranks; None where it cannot be."""
        batch = self._rows(order["rows"])
        followed = self._followed(len(batch))
        assert followed is not None, "only a network that is followed has parts"
        ran = self._ran(followed, batch, order["layer"])
        with self._replica.autocast():
            made = self._part(ran, order["way"], order["ranks"])
            if made is None:
                return {"share": None}
            forward, backward = self._time(made[1], order["seconds"])
        return {"share": made[0], "rows": len(batch), "forward": forward, "backward": backward}

    def _part(self, ran: Ran, way: str, ranks: int) -> tuple[float, Part] | None:
        """With its share, run once; None where the layer has no such part."""
        given = (ran.args, ran.kwargs)
        if not way:
            return 1.0, Called(ran.call, *given, self._device, copies=ran.copies)
        try:
            made: tuple[float, Part] | None = part_of(ran.call, given, way, ranks, copies=ran.copies)
            if made is not None:
                made[1].run()
        except (RuntimeError, ValueError):  # its sizes, or shapes that it was told, do not go with a part
            return None
        return made

    def _time(self, part: Part, seconds: float) -> tuple[float, float]:
        found = []
        for first in self._timed(seconds):
            both = part.run()
            if not first:
                found.append(both)
        return _least([f for f, _ in found]), _least([b for _, b in found])

    # What is timed

    def _timed(self, seconds: float) -> Iterator[bool]:
        """Once to get warm (True); and then, all ranks together, until the time is up."""
        yield True
        self._world.group().barrier()
        end = clock(self._device) + seconds
        for many in range(MOST):
            if many >= LEAST and clock(self._device) > end:
                return
            yield False

    def _rows(self, rows: int) -> Batch:
        """So many rows of the first batch, or somewhat more."""
        return self._batch.parts(-(-len(self._batch) // rows))[0]

    def _inputs(self, batch: Batch) -> Any:
        """All that the model is called with."""
        if self._workload.carry is None:
            return batch.inputs
        state = tree.cast(self._workload.carry(len(batch)), self._device, self._workload.dtype)
        if isinstance(batch.inputs, dict):
            return {**batch.inputs, "state": state}
        return (*(batch.inputs if isinstance(batch.inputs, tuple | list) else (batch.inputs,)), state)

    def _loss(self, batch: Batch) -> Callable[[Any], Tensor]:
        carries, targets, loss = self._workload.carry is not None, batch.targets, self._workload.loss
        assert loss is not None
        return lambda outputs: loss(outputs[0] if carries else outputs, targets)

    def _followed(self, rows: int) -> _Followed | None:
        if rows not in self._known:
            self._known[rows] = self._follow(rows)
        return self._known[rows]

    def _follow(self, rows: int) -> _Followed | None:
        if self._workload.loss is None:
            return None
        model, inputs = self._replica.model, self._inputs(self._rows(rows))
        try:
            graph: fx.Graph = follow(model, inputs)
        except Unfollowed:
            return None
        return _Followed(Calls(model, graph, self._device), inputs)

    def _ran(self, followed: _Followed, batch: Batch, name: str) -> Ran:
        """The call of a layer, as it was made last."""
        if not followed.calls.ran:
            self._called(followed, batch)
        return next(ran for ran in followed.calls.ran if ran.name == name)


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


def _cuts(ran: Ran) -> dict[str, Any]:
    """How a layer can be cut, and what that depends on."""
    found: dict[str, Any] = {"ways": list(ways(ran.call, ran.node, ran.args))}
    first = ran.args[0] if ran.args else None
    if isinstance(ran.call, nn.RNNBase) and isinstance(first, Tensor) and first.dim() == 3:
        found |= {"stack": ran.call.num_layers, "length": first.shape[1 if ran.call.batch_first else 0]}
    moved = window(ran.call)
    return found if moved is None or not isinstance(first, Tensor) else found | {"image": [first.shape[2], *moved]}


def _signature(layer: Layer, ran: Ran) -> Any:
    """The same of layers that take the same time: repeated blocks are timed as one."""
    settings = repr(ran.call) if isinstance(ran.call, nn.Module) else repr(ran.node.kwargs)
    wanted = tuple(t.requires_grad for t in tree.tensors((ran.args, ran.kwargs)))
    return layer.kind, settings, layer.input_shapes, layer.output_shapes, wanted


def _median(times: list[float]) -> float | None:
    """A step's time is predicted as its median, so that is what whole steps are timed by."""
    return statistics.median(times) if times else None


def _least(times: list[float]) -> float:
    """Of layers only the proportions count, and there are few runs of each: whatever disturbs one makes it longer."""
    return min(times)
