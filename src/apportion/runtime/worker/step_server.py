"""Steps on command: how trials, comparisons and checks drive a strategy. Between commands the process sleeps."""

from __future__ import annotations

import functools
import hashlib
import itertools
import pickle
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Subset

from apportion.comm.channel import Message
from apportion.comm.group import Alone, bytes_of
from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.sampler import DataShard
from apportion.core.strategy import State, Step, batches
from apportion.core.workload import Evaluation, Update, Workload
from apportion.parallel.replica.replica import Replica
from apportion.parallel.replica.step import OneDeviceStep, ReferenceState, reference
from apportion.parallel.tracing.uncompiled import uncompiled
from apportion.runtime.proof.coarse_rounding import coarse_types
from apportion.runtime.proof.module_taps import taps
from apportion.runtime.proof.proof_workload import opened_once
from apportion.runtime.worker.cpu_wait import Waited
from apportion.runtime.worker.determinism import Observed, silence_recurrent_dropout, without_dropout
from apportion.runtime.worker.evaluation import evaluate
from apportion.runtime.worker.job import Job
from apportion.runtime.worker.step_contract import made_again, predicted, predicted_at, predicted_by, unrepeatable


class StepChannel(Protocol):
    """The part of a channel by which steps are commanded."""

    commands: SimpleQueue[Message | None]
    """What is to be done; None where no more commands can arrive."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends an answer."""


Failed = Callable[[BaseException], None]


def serve_steps(job: Job, world: World, channel: StepChannel, *, failed: Failed | None = None) -> None:
    """Build the step, report that, and obey: ``go`` (``steps`` steps, timed), ``state`` and ``log`` (into a file),
    ``reload`` (the last step once more, from the state before it), ``predict``, ``facts`` (what a plan for this
    workload holds for), ``evaluate`` (the loss on held-out examples), ``again`` (from the beginning, in another
    precision), ``close``.

    ``failed``: for a process that goes on after an error; it is called with it before the step is closed.
    """
    again: Job | None = _with_data_kept(job)
    while again is not None:
        again = _serve_steps(again, world, channel, failed)
    world.close()


def _with_data_kept(job: Job) -> Job:
    return replace(job, workload=opened_once(job.as_written())) if job.proof else job


def _serve_steps(job: Job, world: World, channel: StepChannel, failed: Failed | None) -> Job | None:
    workload = job.open()
    with _proving(job, workload) as seen:
        step = job.strategy.build(seen.quiet(workload), world)
        try:
            again = _obey(job, workload, step, world, seen, channel)
        except BaseException as error:
            if failed is not None:
                failed(error)
                step.source.close()
                step.close()
            raise
    step.source.close()
    step.close()
    return again


def _obey(job: Job, workload: Workload, step: Step, world: World, seen: _Seen, channel: StepChannel) -> Job | None:
    """Answers what the step is asked until it is to be built anew, or to be closed; returns the job of the new one."""
    step.source.load_ahead(job.loaders)
    if not workload.compile:  # what is compiled cannot be watched
        seen.watch(step.model)
    serving = _Serving(job, workload, step, world, seen)
    steps = _steps(step)
    about = {"steps": steps, "each": _each(step, world, steps), "precision": job.as_written().precision}
    about |= {
        "linear": _is_linear(step),
        "whole": step.whole,
        "again": _can_be_made_again(step),
        "parameters": step.parameters,
        "batch_size": job.as_written().batch_size,
    }
    channel.send({"kind": "built", **about})
    again = None
    while (order := channel.commands.get()) is not None and order["kind"] != "close":
        if order["kind"] == "again":
            again = replace(job, **order["job"])
            break
        channel.send(serving.answer(order))
    serving.close()
    return again


class _Serving:
    """A step that is built, and the answers to what it is asked."""

    def __init__(self, job: Job, workload: Workload, step: Step, world: World, seen: _Seen) -> None:
        self._job, self._workload, self._step, self._world, self._seen = job, workload, step, world, seen
        self._held_out: tuple[Evaluation, BatchSource] | None = None
        self._before: State | None = None
        """The state before the last step, where it was to be kept."""

    def answer(self, order: Message) -> Message:
        """Returns the answer to an order."""
        kind, rank = order["kind"], self._world.rank
        if kind == "go":
            if order.get("keep"):
                self._before = self._step.state_dict()
            return {"kind": "went", **_go(self._step, self._world, order["steps"]), **self._seen.noted()}
        if kind == "state":
            state = self._step.state_dict()
            delivered = _deliver(state, order["path"] if rank in order["ranks"] else None)
            return {"kind": "state", "digest": _digested(state), **delivered}
        if kind == "facts":
            return {"kind": "facts", **_facts(self._step, self._workload, self._job.as_written())}
        if kind == "reload":
            assert self._before is not None, "a step was made that is to be made again"
            state = made_again(self._step, self._before)
            delivered = _deliver(state, order["path"] if rank in order["ranks"] else None)
            return {"kind": "reloaded", "digest": _digested(state), **delivered}
        if kind == "predict":
            return {"kind": "predicted", **self._predicted(order)}
        if kind == "evaluate":
            return {"kind": "evaluated", "loss": self._loss(order["examples"])}
        if kind == "taps":
            return {"kind": "tapped", "rows": _tapped(self._step, order["path"], rank)}
        assert kind == "log", kind
        if rank == 0:
            Path(order["path"]).write_bytes(pickle.dumps(self._step.log()))
        return {"kind": "log"}

    def _predicted(self, order: Message) -> dict[str, Any]:
        rank = self._world.rank
        if "state" not in order:
            return predicted(self._step, rank, self._world.size, f"{order['path']}{rank}")
        state = self._step.state_dict()
        if rank == 0:
            Path(order["state"]).write_bytes(pickle.dumps(state))
        return {}

    def _loss(self, examples: int) -> float | None:
        """Returns the mean loss on at most ``examples`` examples of the evaluation set, or of the training set where
        there is none. None on a rank that takes no part: where each trains on its own, all but the first."""
        if not self._step.lockstep and self._world.rank != 0:
            return None
        if self._held_out is None:
            if isinstance(self._step.source.dataset, ActedDataset):
                raise ValueError(
                    "what a network that acts has learnt is its score, and not a loss on the same examples: train by "
                    "each strategy, and compare the scores; or choose an exact one"
                )
            held_out = _held_out(self._workload, examples)
            workload = replace(self._workload, evaluation=held_out)
            source = BatchSource.of_evaluation(
                workload, device=self._step.device, dtype=self._step.source.dtype, rank=self._world.rank
            )
            self._held_out = held_out, source
        group = self._world.group() if self._step.lockstep else Alone()
        return evaluate(self._step, *self._held_out, group, lambda: None)["loss"]

    def close(self) -> None:
        """Closes the source of the examples."""
        if self._held_out is not None:
            self._held_out[1].close()


def _held_out(workload: Workload, examples: int) -> Evaluation:
    given, loss = workload.open_data if workload.evaluation is None else workload.evaluation.data, workload.loss
    if loss is None:
        raise ValueError("update= has no loss that two strategies could be compared by: choose an exact one")

    def data() -> Any:
        everything: Any = given()
        return Subset(everything, range(min(examples, len(everything))))

    return Evaluation(data=data, metrics={"loss": lambda outputs, targets: loss(outputs, targets)})


def _facts(step: Step, workload: Workload, written: Workload) -> dict[str, Any]:
    """Returns what distinguishes this workload from others whose steps take another time, and how many steps there
    are."""
    mark = step.fingerprint(workload)
    for name in ("seed", "total steps", "schedule"):  # the time of a step does not depend on these
        mark.pop(name, None)
    batch = step.source.at(0, DataShard())
    shapes = [[list(t.shape), str(t.dtype)] for t in tree.tensors((batch.inputs, batch.targets))]
    network = hashlib.sha256(repr(step.model).encode()).hexdigest()[:16]
    return {
        "mark": {**mark, "network": network, "batch": shapes, "compile": workload.compile},
        "steps": written.total_steps(step.source.deal.batches),
    }


def serve_reference(job: Job, world: World, channel: StepChannel) -> None:
    """Gives the states that the strategy must compute: one on each ``next``, or the one that a log leads to; ``again``
    and ``close`` as in ``serve_steps``."""
    again: Job | None = _with_data_kept(job)
    while again is not None:
        again = _serve_reference(again, channel)


def _serve_reference(job: Job, channel: StepChannel) -> Job | None:
    workload = job.open()
    with _proving(job, workload, made=True) as seen:
        quiet = seen.quiet(workload)
        states = None if job.strategy.replays(job.workers) else _reference(job, quiet)
        channel.send({"kind": "built"})
        state = before = None
        while (order := channel.commands.get()) is not None:
            if order["kind"] == "close":
                break
            if order["kind"] == "again":
                return replace(job, **order["job"])
            if order["kind"] == "start":
                channel.send({"kind": "started", **_start(quiet, order["path"])})
                continue
            if order["kind"] == "predict":
                channel.send({"kind": "predicted", **_predicted(state, quiet, order)})
                continue
            if order["kind"] == "reload":
                again = _reference(job, quiet)
                channel.send({"kind": "reloaded", **unrepeatable(state, before, again)})
                continue
            if order["kind"] == "taps":
                rows = _tapped(_after(quiet, order["steps"]), order["path"], 0)
                channel.send({"kind": "tapped", "rows": rows})
                continue
            if states is None:
                log = pickle.loads(Path(order["log"]).read_bytes())
                state, coarse = next(job.strategy.reference(quiet, job.workers, log)), set[str]()
            else:
                before = state if order.get("keep") else None
                with coarse_types(workload.precision, moves=job.coarse) as coarse:
                    state = next(states)
            about = {"coarse": sorted(coarse), "values": _values_of(state), **seen.noted()}
            channel.send({"kind": "state", **about, **_deliver(state, order["path"])})
    return None


def _reference(job: Job, workload: Workload) -> Iterator[State]:
    """Returns the states that the strategy must compute. An exact one is held to one device, whatever it has for a
    reference itself: a mistake that both share would not show."""
    return reference(workload) if job.strategy.exact else job.strategy.reference(workload, job.workers)


def _predicted(state: State | None, workload: Workload, order: Message) -> dict[str, Any]:
    """Writes what one device predicts at the state that the reference, or the ranks of an approximate strategy, have
    come to."""
    rows, path = order.get("rows"), order["path"]
    if isinstance(state, ReferenceState):
        return predicted_by(state.maker, rows, path)
    return predicted_at(pickle.loads(Path(order["state"]).read_bytes()), workload, rows, path)


def _values_of(state: State) -> dict[str, float] | None:
    """Returns the named values of the step that has led to the state of a reference; None where it does not say."""
    if not isinstance(state, ReferenceState):
        return None
    return {name: float(value) for name, value in state.values.items() if value.numel() == 1}


def _after(workload: Workload, steps: int) -> Step:
    """Returns the step of one device that has made ``steps`` steps."""
    step = OneDeviceStep(workload, torch.device("cpu"))
    for batch in batches(step, stop=steps):
        step(batch)
    return step


def _tapped(step: Step, path: str, rank: int) -> int:
    """Makes one step with what every submodule computes written into the file; returns how many rows this rank had."""
    batch = step.take()
    assert batch is not None, "a step that was compared can be made again"
    with taps(step.model) as found:
        step(batch)
    found.save(f"{path}{rank}")
    return len(batch)


def _start(workload: Workload, path: str) -> dict[str, Any]:
    """Writes what one device begins with into the file, and tells which of it are parameters."""
    step = OneDeviceStep(workload, torch.device("cpu"))
    weights = [name for name, _ in step.model.named_parameters(remove_duplicate=False)]
    delivered = _deliver(step.state_dict(), path)
    step.source.close()
    step.close()
    return {**delivered, "weights": weights}


class _Seen:
    """Collects what a proof has to name; nothing is looked at otherwise."""

    def __init__(
        self, observed: Observed | None, dropped: set[str], uncompiled: ExitStack | None, *, made: bool = False
    ) -> None:
        """Collects for a proof. ``uncompiled``: the time during which parts that compile themselves do not, from where
        there is a model; ``made``: every model that is made is watched, as those of a reference are."""
        self._observed, self._dropped, self._uncompiled, self._made = observed, dropped, uncompiled, made

    def quiet(self, workload: Workload) -> Workload:
        """Returns the workload with the dropout turned off that is inside kernels, with nothing compiled, and with an
        update of its own that is watched for what it draws."""
        if self._observed is None:
            return workload

        def model() -> nn.Module:
            made = workload.make_model()
            self._dropped.update(silence_recurrent_dropout(made))
            if self._uncompiled is not None:
                self._uncompiled.enter_context(uncompiled())
            if self._made:
                self.watch(made)
            return made

        update = None if workload.update is None else self._watched(workload.update)
        return replace(workload, model=model, update=update)

    def _watched(self, update: Update) -> Update:
        observed = self._observed
        assert observed is not None

        @functools.wraps(update)
        def watched(step: Step, batch: Batch) -> Mapping[str, Tensor]:
            inputs = (
                batch.inputs
            )  # loaded before anything is watched: what is drawn for that is not drawn by the network
            with observed.within(update, "update", inputs):
                return update(step, batch)

        return watched

    def watch(self, model: nn.Module) -> None:
        """Watches the model for what else it draws."""
        if self._observed is not None:
            self._observed.watch(model)

    def noted(self) -> dict[str, list[str]]:
        """Returns the dropout that was turned off, other draws, and operations in less than float64."""
        if self._observed is None:
            return {}
        seen = self._observed
        return {
            "dropout": sorted(self._dropped),
            "row_draws": sorted(seen.row_draws),
            "accepted_draws": sorted(seen.accepted_draws),
            "draws": sorted(seen.draws),
            "narrow": sorted(seen.narrow),
            "plain_draws": sorted(seen.plain_draws),
        }


@contextmanager
def _proving(job: Job, workload: Workload, *, made: bool = False) -> Iterator[_Seen]:
    """Prepares a proof of the network as it is written: parts that compile themselves do not, unless all of it does,
    which cannot be watched then. ``made``: for a reference, whose models are watched as they are made."""
    with ExitStack() as stack:
        if not job.proof:
            yield _Seen(None, set(), None)
            return
        dropped = stack.enter_context(without_dropout())
        observed = Observed(workload.per_rank_draws, coarse=workload.precision != "float64")
        if not workload.compile:
            stack.enter_context(_watched_losses(observed))
        yield _Seen(observed, dropped, None if workload.compile else stack, made=made and not workload.compile)


@contextmanager
def _watched_losses(observed: Observed) -> Iterator[None]:
    """Has every call of a workload's loss watched, in this process."""
    plain = Replica.loss

    def loss(self: Replica, outputs: Any, targets: Any) -> Tensor:
        with observed.within(self.workload.loss, "loss", (outputs, targets)):
            return plain(self, outputs, targets)

    # The class is patched, not an instance: strategies make replicas of their own after this point.
    Replica.loss = loss  # type: ignore[method-assign]
    try:
        yield
    finally:
        Replica.loss = plain  # type: ignore[method-assign]


def _is_linear(step: Step) -> bool:
    """Tells whether what the weights move by is proportional to the gradient, whatever its size."""
    optimizers = getattr(step, "optimizers", {})  # where each rank has a part, it may have none
    return bool(optimizers) and all(type(optimizer) is torch.optim.SGD for optimizer in optimizers.values())


def _can_be_made_again(step: Step) -> bool:
    """Tells whether all ranks make the same steps together, on examples that are there to be taken again."""
    return step.lockstep and step.data_shard is not None and not isinstance(step.source.dataset, ActedDataset)


def _steps(step: Step) -> int:
    """Returns the number of steps that there are: where whole batches are given out in turn, a round of them is a
    step."""
    shard = step.data_shard
    return step.source.total // (shard.of if shard is not None and shard.whole_batches else 1)


def _each(step: Step, world: World, steps: int) -> int:
    """Returns the number of steps that every rank can make: where each takes what comes next, a rank's part of them."""
    shard = step.data_shard
    shared = shard is not None and shard.whole_batches and shard.of == 1 and not step.lockstep
    return steps // world.size if shared else steps


def _go(step: Step, world: World, count: int) -> Message:
    """Makes steps, each timed; returns what the time went to, and every wait, by a clock that the host's processes
    share."""
    group, values, shard = world.group(), [], step.data_shard
    step.source.start_over()  # what was loaded between commands would be free
    group.barrier()
    group.waits.clear()
    waited, blocked = Waited(), group.waited
    before, times, examples = dict(step.spent()), [time.perf_counter()], 0
    for _ in range(count if shard is not None else 0):  # a server answers the others meanwhile
        batch = step.take()
        assert batch is not None, "more steps were asked for than there are"
        values.append(step(batch))
        examples += batch.size
        times.append(time.perf_counter())
    # Clocks of several hosts say nothing of each other: who waits least is taken to wait for what is sent alone.
    waits = list(group.waits) if world.channel is not None else [(blocked - group.waited, 0.0)]
    return {
        "without_core": waited.share(),
        "seconds": [b - a for a, b in itertools.pairwise(times)],
        "examples": examples,
        "lockstep": step.lockstep and (shard is None or not shard.whole_batches or shard.of == 1),
        "spent": {name: seconds - before[name] for name, seconds in step.spent().items()},
        "waits": waits,
        "values": {n: torch.stack([v[n].reshape(()) for v in values]).tolist() for n in values[-1]} if values else {},
        "peak_bytes": _peak_bytes(),
        "held": step.held()._asdict(),
    }


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _deliver(state: State, path: str | None) -> dict[str, Any]:
    """Writes the tensors of a state into the file, where one is asked for."""
    if path is not None:
        save_file(_delivered(state), path)
    return {"path": path, "step": state.step}


def _digested(state: State) -> str:
    """A digest of every tensor of a state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_delivered(state).items()):
        digest.update(name.encode())
        digest.update(bytes_of(tensor).numpy().data)
    return digest.hexdigest()


def _delivered(state: State) -> dict[str, Tensor]:
    """Returns the tensors on the CPU and contiguous; complex numbers as pairs, since the file's format has no
    complex128."""
    tensors = {name: tensor.detach().cpu().resolve_conj().resolve_neg() for name, tensor in state.tensors()}
    return {name: (torch.view_as_real(t) if t.is_complex() else t).contiguous() for name, t in tensors.items()}
