"""The program of a worker process from its first line to its last: become a rank, do its job, report how it went."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from apportion.comm.channel import Channel, Message
from apportion.comm.group import unlike_rows
from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.loss_terms import Count, description_of, examples, resolved
from apportion.core.own_frames import formatted
from apportion.core.rng import seeded_rng
from apportion.core.sampler import DataShard
from apportion.core.strategy import Strategy
from apportion.core.workload import Workload
from apportion.errors import ApportionError, CheckpointError, NotFinite, PeerLost, RanksDiffer, StateLost
from apportion.parallel.batch_coupling.loss_probe import (
    ROWS,
    LossFinding,
    ModelValue,
    leaves_of,
    probe_loss,
    probe_model,
)
from apportion.parallel.batch_coupling.row_probe import Steady
from apportion.parallel.replica.initial_model import fresh_model
from apportion.parallel.replica.loss_weighting import refuse_unjoined
from apportion.parallel.replica.replica import called
from apportion.process import keep_what_is_freed
from apportion.runtime.cached_proof.read_recorder import ReadRecorder
from apportion.runtime.proof.proof_workload import chosen_rows, opened_once, spread_with
from apportion.runtime.proof.rare_rows import RareRows, rare_rows
from apportion.runtime.worker.coordination import RunControl
from apportion.runtime.worker.determinism import silence_recurrent_dropout, without_dropout
from apportion.runtime.worker.job import Job, WorkerJob
from apportion.runtime.worker.mistakes import frames_of, is_mistake, package_of
from apportion.runtime.worker.progress import NBYTES, Progress
from apportion.runtime.worker.step_server import serve_reference, serve_steps
from apportion.runtime.worker.training.loop import work


def train(sock: socket.socket, payload: bytes) -> int:
    """Run a job to its end."""
    if os.environ.get("RANK") == "0":  # which makes the key of the run's proof
        ReadRecorder.started()
    return run_program(sock, payload, train_job)


def steps(sock: socket.socket, payload: bytes) -> int:
    """Make steps on command."""
    return run_program(sock, payload, serve_steps)


def reference(sock: socket.socket, payload: bytes) -> int:
    """Give the states that a strategy must compute."""
    return run_program(sock, payload, serve_reference)


def survey(sock: socket.socket, payload: bytes) -> int:
    """Look at a workload before it is proved."""
    return run_program(sock, payload, serve_survey)


def run_program(sock: socket.socket, payload: bytes, program: Callable[[Any, World, Channel], None]) -> int:
    """Become a rank and call ``program`` with the pickled job; returns the exit status of the process."""
    return run_loaded(sock, lambda: cloudpickle.loads(payload), program)


def run_loaded(
    sock: socket.socket, load: Callable[[], WorkerJob], program: Callable[[Any, World, Channel], None]
) -> int:
    """Becomes a rank and calls ``program`` with the job that ``load`` returns; returns the exit status of the
    process."""
    channel = Channel(sock)
    try:
        job = load()
        torch.set_num_threads(job.threads)
        keep_what_is_freed()
        world = World.from_env(device=job.device, channel=channel)
        if job.replaceable:
            world = world.join()
        program(job, world, channel)
        channel.send({"kind": "finished"})
    except BaseException as error:
        report(channel, error)
        return 1
    return 0


def train_job(job: Job, world: World, channel: Channel) -> None:
    """Train as one rank, under the supervisor's orders, and tell it every event."""
    control = RunControl()
    settled = queue.SimpleQueue[dict[str, Any]]()
    # Orders are carried out while the main thread is inside a collective that may never return.
    threading.Thread(target=_obey, args=(channel, control, settled), name="orders", daemon=True).start()
    supervise(control, world)
    control.settle = lambda asked: _settle(asked, world, channel, settled)
    for event in work(job, world, control):
        channel.send({"kind": "event", "event": asdict(event)})


def supervise(control: RunControl, world: World) -> None:
    """Lets a supervisor see how far this rank is, and this rank take its place in the worlds that come."""
    control.progress = progress(world)
    control.rejoined = lambda changed: _rejoined(changed, control)


def progress(world: World) -> Progress:
    """Returns this rank's line of the progress that the supervisor reads; its group notes there when it waits."""
    line = Progress.of_slot(world.shared("progress", NBYTES * world.slots), world.slot)
    world.group().waiting = line.waiting_word
    return line


def _rejoined(world: World, control: RunControl) -> None:
    world.group().waiting = control.progress.waiting_word
    assert world.members is not None
    control.stop = control.stop or world.members.ending


def _settle(
    asked: dict[str, Any], world: World, channel: Channel, settled: queue.SimpleQueue[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the supervisor's answer whether the run is proved; a run that the supervisor ends is waiting in this
    call."""
    if world.rank == 0:
        channel.send({"kind": "prove", **asked})
    return settled.get()


def _obey(channel: Channel, control: RunControl, settled: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Carries out the supervisor's orders, while the main thread trains."""
    while (order := channel.commands.get()) is not None:
        if order["kind"] == "stop":
            control.stop = True
        elif order["kind"] == "settled":
            settled.put(order["proof"])
        elif order["kind"] == "save":
            channel.send({"kind": "saved", **_save_now(control, order["seconds"])})
    # The main thread may wait in C code for ranks that are gone; nothing but the end of the process ends that.
    os._exit(1)  # the supervisor is gone


def _save_now(control: RunControl, seconds: float) -> dict[str, Any]:
    """Writes the last update without waiting for the step under way; returns its number, or None and why not. A
    replacement has ``seconds`` until it has a state."""
    if not control.begun.wait(seconds):
        return {"step": None, "why": "its worker had not begun"}
    try:
        return {"step": control.save_now(), "why": None}
    except Exception as error:  # whatever it is, the supervisor is waiting for an answer
        return {"step": None, "why": _summary(error)}


def report(channel: Channel, error: BaseException) -> None:
    """Tells the supervisor what a rank has raised; where it is gone, standard error."""
    try:
        channel.send(described(error))
    except OSError:
        traceback.print_exception(error)
        sys.stderr.flush()


def described(error: BaseException) -> Message:
    """Returns the message that tells a supervisor what a rank has raised."""
    own = isinstance(error, ApportionError) or is_mistake(error)
    return {
        "kind": "raised",
        "summary": _summary(error),
        "traceback": None if own else formatted(error),
        "mistake": is_mistake(error),
        "symptom": isinstance(error, PeerLost),
        "state_lost": isinstance(error, StateLost),
        "where": None if own else _where(error),
        "checkpoint": isinstance(error, CheckpointError),
        "not_finite": isinstance(error, NotFinite),
        "differs": isinstance(error, RanksDiffer),
    }


def _summary(error: BaseException) -> str:
    text = str(error).strip()
    if isinstance(error, ApportionError) or is_mistake(error):
        return text
    kind, first = type(error).__name__, text.partition("\n")[0]  # the rest is in the traceback
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text.lower():
        cure = "no memory is left: use fewer workers, a smaller batch_size, or data_parallel(microbatches=2)"
        return f"{kind}: {first} ({cure})" if first else f"{kind}: {cure}"
    if isinstance(error, SystemExit):
        return f"SystemExit: the model, the data or the loss left Python with status {error.code!r}"
    return f"{kind}: {first}" if first else kind


def _where(error: BaseException) -> str | None:
    """Returns the innermost line of the user's own code; None where there is none."""
    if isinstance(error, SyntaxError):  # the line that did not even run
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    own = [f for f in frames_of(error) if package_of(f) is None]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}".rstrip(": ")
    return _where(error.__cause__) if error.__cause__ is not None else None


# A look at a workload before it is proved, in a process of its own, so that nothing of it is left in the run.
#
# It finds out which rows are rare, whether the batches that collate makes can be divided, and whether the loss by
# itself is the mean over its terms.


FORWARD_ROWS = 6
"""The number of rows that the model is called with, to see what its outputs are like."""
THROUGH_ROWS = 12
"""The number of rows that the model is called with where it computes the loss by itself."""
QUICK_SECONDS = 0.05
"""The seconds in which these rows go forward and back, up to which all rows are tried, with other weights too."""
CPU = torch.device("cpu")


def serve_survey(job: Job, world: World, channel: Channel) -> None:
    """Looks at the workload once: ``survey`` (which says how many ``seconds`` the data may be read, for how many
    ``ranks``, and whether the ``loss`` is to be tried); the answer has the rows, how many were read, and what the
    batches and the loss have shown."""
    order = channel.commands.get()
    if order is not None and order["kind"] == "survey":
        workload = opened_once(job.open())
        with seeded_rng(workload.seed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = _opened(workload, sent=job.sent is not None)
            collates = workload.collate is not default_collate or workload.augment is not None
            seconds = order["seconds"] / (2 if collates else 1)
            found = RareRows((), 0, 0) if data is None else rare_rows(data, seconds)
            division = BatchDivision.from_strategy(job.strategy, order["ranks"])
            refused = None
            if collates and division is not None and data is not None and workload.parts is None:
                refused = refused_batch(workload, division, found.rows, seconds)
        finding, terms = _tried(workload, data, found) if order["loss"] else (LossFinding(), workload.terms)
        if refused is not None:
            finding = replace(finding, problem=refused)
        rows = {"rare": found.rows, "read": found.read, "of": found.of}
        loss = {"problem": finding.problem, "left": finding.left}
        channel.send({"kind": "surveyed", **rows, **loss, "terms": description_of(workload.count, terms)})
        channel.commands.get()  # until the answer has been taken
    world.close()


def _opened(workload: Workload, *, sent: bool) -> Dataset[Any] | None:
    """Returns the data set; None where its rows cannot be chosen: it is in parts on several hosts, of which some rows
    alone were sent to this host, or the network makes it."""
    if sent:
        return None
    data = workload.open_data()
    return None if isinstance(data, ActedDataset) else data


def _tried(workload: Workload, data: Dataset[Any] | None, found: RareRows) -> tuple[LossFinding, Count | None]:
    """Tries the loss; returns what it shows, and what its terms are."""
    terms = workload.terms
    if workload.loss is None or terms is None:
        return LossFinding(), terms
    if data is None:
        return LossFinding(left="its data are in parts on several hosts, or made by the network"), terms
    try:
        with seeded_rng(workload.seed), without_dropout(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tried = _Tried(workload, data, found)
            terms = tried.terms
            return tried.finding(), terms
    except Exception as error:  # the run, or its proof, will tell why
        left = f"its model or its data could not be called for it ({type(error).__name__})"
        return LossFinding(left=left), terms


class _Tried:
    """A model and rows of its data, the rare ones among them, for its loss to be tried on."""

    def __init__(self, workload: Workload, data: Dataset[Any], found: RareRows) -> None:
        count: int = len(data)  # type: ignore[arg-type]
        index = spread_with(found.rows[: ROWS // 2], count, min(ROWS, count))
        # In the order of their rarity, so that few of them have the rarest.
        order = sorted(index, key=lambda row: found.rows.index(row) if row in found.rows else len(found.rows))
        self._workload = workload
        some = replace(
            workload,
            data=lambda: chosen_rows(data, order),
            parts=None,
            batch_size=len(order),
            order="sequential",
            evaluation=None,
        )
        self._batch = BatchSource(some, dtype=torch.float64).at(0)
        self._model = fresh_model(some, CPU, torch.float64)
        silence_recurrent_dropout(self._model)
        terms = resolved(workload.terms, self._model)
        assert terms is not None
        self.terms: Count = terms
        self._steady = Steady()

    def finding(self) -> LossFinding:
        workload, batch = self._workload, self._batch
        assert workload.loss is not None
        few = batch.parts(max(1, len(batch) // FORWARD_ROWS))[0]
        with torch.no_grad():
            outputs = tree.map_tensors(torch.Tensor.detach, called(workload, self._model, few, CPU))
        found = probe_loss(workload.loss, self.terms, outputs, batch.targets, rows=workload.update_size)
        if found.left is None or workload.carry is not None:
            return found
        try:
            return self._through()
        except ValueError as error:
            return LossFinding(left=str(error))

    def _through(self) -> LossFinding:
        """Tries the loss through the whole model, with other weights too where that is quick."""
        for values, what in ((self._batch.inputs, "inputs"), (self._batch.targets, "targets")):
            if len(leaves_of(values, what)[0]) != len(self._batch):
                raise ValueError(f"its {what} are not tensors of as many rows each")
        rows = min(THROUGH_ROWS, len(self._batch))
        self._value(list(range(rows)))
        began = time.perf_counter()
        self._value(list(range(rows)))
        quick = time.perf_counter() - began < QUICK_SECONDS
        if quick:
            rows = len(self._batch)
        targets = tree.map_tensors(lambda t: t[:rows], self._batch.targets)
        return probe_model(self._value, self.terms, targets, rows=rows, weights=self._weights() if quick else (1,))

    def _weights(self) -> Iterator[float]:
        """Scales the weights of the model by each of these numbers."""
        yield 1.0
        for by in (0.25, 16.0):  # a quarter, and then four times as large as they were
            with torch.no_grad():
                for p in self._model.parameters():
                    p.mul_(by)
            yield by

    def _value(self, rows: list[int]) -> ModelValue:
        """Returns the loss of some rows and its gradient by all parameters. Statistics of the batch are those that were
        first seen, since strategies take them over all ranks."""
        assert self._workload.loss is not None
        part = self._batch.replace(
            inputs=tree.map_tensors(lambda t: t[rows], self._batch.inputs),
            targets=tree.map_tensors(lambda t: t[rows], self._batch.targets),
        )
        with self._steady:
            loss = self._workload.loss(called(self._workload, self._model, part, CPU), part.targets).reshape(())
        trained = [p for p in self._model.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
        gradient = torch.cat([g.to_dense().flatten() for g in gradients]).double()
        return ModelValue(float(loss.detach()), gradient, loss.dtype is torch.float64)


MOST_ROWS = 4096
"""The number of rows of a batch up to which batches are made: larger ones may not fit the memory beside a proof."""


AUGMENT_SECONDS = 0.25
"""The seconds in which batches are made of rows that are collated as usual, at most."""


@dataclass(frozen=True)
class BatchDivision:
    """How a strategy divides each batch."""

    ranks: int
    """The number of ranks that have a share of each batch; 1: each has the whole one."""
    parts: int
    """The number of micro-batches into which a rank divides what it has."""

    @classmethod
    def from_strategy(cls, strategy: Strategy, ranks: int) -> BatchDivision | None:
        """Returns how a strategy divides batches over a number of ranks; None where that is not known of it."""
        if not (strategy.exact and strategy.divides_batches) or getattr(strategy, "of", None) is not None:
            return None
        staged = hasattr(strategy, "cuts")  # whose ranks each have the whole batch
        return cls(1 if staged else ranks, getattr(strategy, "microbatches", 1))


def refused_batch(workload: Workload, division: BatchDivision, rare: Sequence[int], seconds: float) -> str | None:
    """Makes the batches of the first epoch, one of each size and those with rare rows first, for as long as there is
    time; returns how one of them cannot be divided, as a clause; None where each that was made can. What the workload
    itself raises is left to the run. Where rows are collated as usual, and augmented, AUGMENT_SECONDS are enough: what
    augment makes of a batch seldom depends on its rows."""
    if workload.collate is default_collate:
        seconds = min(seconds, AUGMENT_SECONDS)
    until = time.monotonic() + seconds
    source = BatchSource(workload)
    if source.keeps_rows or source.deal.lanes or workload.update_size > MOST_ROWS:
        return None
    if workload.update_size * _seconds_a_row(source) > seconds:  # not even one batch could be made in time
        return None
    for step in _steps(source, rare):
        if time.monotonic() > until:
            break
        try:
            _divide(workload, source, step, division)
        except ValueError as error:
            if not is_mistake(error):
                return None
            return f"the batch of step {step + 1} cannot be trained on: {error}"
        except Exception:
            return None
    return None


def _seconds_a_row(source: BatchSource) -> float:
    """Returns the seconds that a row takes to be loaded and collated. The first one may take longer than others."""
    began = time.monotonic()
    for row in range(2):
        began = time.monotonic()
        with suppress(Exception):  # a collate may leave out what it is given
            _ = source.rows(0, slice(row, row + 1)).inputs
    return time.monotonic() - began


def _steps(source: BatchSource, rare: Sequence[int]) -> Iterator[int]:
    steps = range(min(source.total, source.deal.batches))
    wanted = np.array(rare, dtype=np.int64)
    rare_steps = [step for step in steps if np.isin(source.deal.index(step), wanted).any()] if len(wanted) else []
    sizes = {source.deal.size(step): step for step in reversed(steps)}
    first = [*dict.fromkeys([*sizes.values(), *rare_steps])]
    yield from first
    made = set(first)
    yield from (step for step in steps if step not in made)


def _divide(workload: Workload, source: BatchSource, step: int, division: BatchDivision) -> None:
    """Divides a batch as the ranks will. ValueError, which names the leaf, where it cannot be divided."""
    shares = [source.at(step, DataShard(rank, division.ranks)) for rank in range(division.ranks)]
    shares = [share for share in shares if len(share)]
    for share in shares:
        if source.count is examples:
            _ = share.row_count
        for part in share.parts(division.parts):
            _ = part.inputs
    if workload.count is None and workload.update is None:
        _refuse_unlike(shares)


def _refuse_unlike(shares: Sequence[Batch]) -> None:
    """Raise ValueError where the targets of all ranks cannot be joined for a loss over all of them."""
    if len(shares) == 1:
        return
    for share in shares:
        refuse_unjoined(share.targets, "targets")
    rows = [[(t.shape[1:], t.dtype) for t in tree.tensors(share.targets)] for share in shares]
    if any(each != rows[0] for each in rows):
        shapes = [[f"{tuple(t.shape)} {t.dtype}" for t in tree.tensors(share.targets)] for share in shares]
        raise ValueError(unlike_rows([", ".join(each) for each in shapes]))
