"""The evaluations of a run: when one is due, what it gives, and whether it is the best so far.

A network that plays is evaluated by a process beside the rank, from snapshots, while the rank trains on.

::

    rank:       step N -- snapshot --> pipe        steps N+1, N+2, ...        <-- metrics of step N
    evaluator:                     the network of step N plays its episodes

It answers in the order in which it is asked. It ends with its rank.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from apportion.comm.group import Alone, Group, collective
from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.python_state.leaves import load_tensors
from apportion.core.python_state.python_state import PythonState
from apportion.core.strategy import State, Step
from apportion.core.workload import Evaluation, Workload
from apportion.errors import ApportionError
from apportion.process import die_with_parent, outlive_notice
from apportion.runtime.worker.evaluation import evaluate, try_evaluation
from apportion.runtime.worker.training.averaged_network import AveragedNetwork
from apportion.runtime.worker.training.checkpoints import BestMetric


class RunEvaluations:
    """One rank's part in the evaluations of a run.

    Ranks in lockstep evaluate together, each a part of the examples. A rank that trains on its own would stand still
    for whole episodes, and be stale after them: it has a process beside it, which plays them with a snapshot.
    """

    def __init__(self, workload: Workload, step: Step, *, rank: int, alone: bool) -> None:
        self._step, self._evaluation, self._is_first = step, workload.evaluation, rank == 0
        self.metrics: Mapping[str, float] = {}
        """The metrics of the last evaluation."""
        self._source: BatchSource | None = None
        if workload.evaluation is not None:
            rank = 0 if step.whole else rank  # who loads the same batch draws the same numbers for it
            dtype = step.source.dtype
            self._source = BatchSource.of_evaluation(workload, device=step.device, dtype=dtype, rank=rank)
        self._averaged: AveragedNetwork | None = None
        if self._source is not None and workload.average is not None:
            if isinstance(self._source.dataset, ActedDataset):
                raise ValueError(
                    f"average={workload.average}: a network that plays is evaluated as it acts, with its weights: "
                    "leave average out"
                )
            self._averaged = AveragedNetwork(workload, step)
        self._news: list[str] = []
        self._reported_nan = False
        self.beside: Evaluator | None = None
        """The process that evaluates while this rank trains; None: this rank evaluates."""
        if alone and self._source is not None and isinstance(self._source.dataset, ActedDataset):
            self.beside = Evaluator(workload, step.source.dtype)

    @collective
    def attempt(self, group: Group) -> None:
        """Tries the evaluation before the first step. Called by all ranks of the group."""
        if self._evaluation is not None and self._source is not None:
            try_evaluation(self._step, self._evaluation, self._source, group)

    def load_ahead(self, loaders: int) -> None:
        """Lets ``loaders`` processes load the batches of the evaluation ahead."""
        if self._source is not None:
            self._source.load_ahead(loaders)

    def is_due(self, before: int) -> bool:
        """Tells whether an evaluation has come due since there were ``before`` updates."""
        done, evaluation = self._step.done, self._evaluation
        if evaluation is None or evaluation.every is None or done >= self._step.source.total:
            return False
        every = evaluation.every * self._step.source.deal.batches
        return int(done / every) > int(before / every)

    @collective
    def run(self, group: Group, best: BestMetric, beat: Callable[[], None]) -> bool | None:
        """Evaluates the network, and returns whether it is the best so far; None where the workload has no evaluation.
        Called by all ranks of the group; ``beat`` is called after each batch."""
        if self._evaluation is None or self._source is None:
            return None
        self._source.acts(self._step.model)  # and not in the attempt, which would play whole episodes
        if isinstance(dataset := self._source.dataset, ActedDataset):
            dataset.beat = beat
        if self._averaged is not None:
            self._averaged.refresh()
        network = self._averaged or self._step
        self.metrics = evaluate(network, self._evaluation, self._source, group, beat)
        if isinstance(dataset, ActedDataset):
            self._news += dataset.news()
        self._report_nan(self._step.done)
        return best.agree(best.improve(self._evaluation.best, self.metrics), group, self._step.device)

    def news(self) -> list[str]:
        """What is to be reported of the evaluations since this was last asked, a sentence each."""
        news, self._news = self._news, []
        return news + (self.beside.news() if self.beside is not None else [])

    def record_metrics(self, state: State, metrics: Mapping[str, float], best: BestMetric) -> bool:
        """Records the metrics of a snapshot, and returns whether it is the best so far."""
        assert self._evaluation is not None
        self.metrics = metrics
        self._report_nan(state.step)
        improved = best.improve(self._evaluation.best, metrics)
        state.settings["best"] = best.value
        return improved

    def _report_nan(self, step: int) -> None:
        """Reports, once, that the metric by which the best checkpoint is chosen is NaN."""
        rule = self._evaluation.best if self._evaluation is not None else None
        name = rule.partition(" ")[2] if rule is not None else ""
        if self._is_first and name and math.isnan(self.metrics[name]) and not self._reported_nan:
            self._reported_nan = True
            self._news.append(
                f"the metric {name!r} is NaN at step {step}, and no checkpoint of such a step is kept as the best "
                f"(best={rule!r}): let the metric skip what is undefined, or choose the best by another one"
            )

    def record(self, folder: str | None) -> None:
        """Records an episode for people to look at, where the network acts in an environment. A run does not end
        because an episode cannot be drawn."""
        if self._source is None or folder is None or not isinstance(dataset := self._source.dataset, ActedDataset):
            return
        try:
            dataset.record(Path(folder))
        except Exception as error:  # rendering is the code of the environment
            warnings.warn(f"no episode is recorded: {type(error).__name__}: {error}", stacklevel=2)

    def close(self) -> None:
        """Ends the loading processes, and the one that evaluates."""
        if self._source is not None:
            self._source.close()
        if self.beside is not None:
            self.beside.close()


LOOK_SECONDS = 1.0
"""The seconds between two looks at whether the evaluator lives, while its rank waits for it."""
MOST_UNDER_WAY = 2
"""The largest number of snapshots that wait for their metrics: with more of them the rank waits."""
MOST_STARTS = 3
"""The number of times that an evaluator is started again in a run, where something ends it."""
END_SECONDS = 2.0
"""The seconds in which the process ends by itself, with the processes of its environments, before it is killed."""
BEAT = b"beat"
BEAT_SECONDS = 0.2
"""The seconds between two signs of life: the rank may not read them for a while, and a pipe holds some thousands."""


class EvaluationFailed(ApportionError):
    """The evaluation raised in its process."""


@final
class Evaluator:
    """The evaluations of a run in a process of their own, by the rank that asks for them."""

    def __init__(self, workload: Workload, dtype: torch.dtype | None) -> None:
        self._workload, self._dtype = workload, dtype
        self._asked: deque[State] = deque()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._answer: bytes | None = None
        """An answer that has come and was not taken yet."""
        self._starts = 0
        self._news: list[str] = []

    def submit(self, state: State, beat: Callable[[], None]) -> list[tuple[State, Mapping[str, float]]]:
        """Have this snapshot evaluated. Returns those that are done by now; it waits for the oldest where too many are
        under way."""
        done = []
        while len(self._asked) >= MOST_UNDER_WAY:
            done.append(self._oldest_metrics(beat))
        self._asked.append(state)
        self._send(state)
        return done

    def finished(self) -> list[tuple[State, Mapping[str, float]]]:
        """Return the snapshots that are done by now, each with its metrics."""
        found = []
        while self._asked and self._pipe is not None and self._answers(0.0, lambda: None):
            found.append(self._oldest_metrics(lambda: None))
        return found

    def wait_for_all(self, beat: Callable[[], None]) -> list[tuple[State, Mapping[str, float]]]:
        """Wait for all that were asked for; ``beat`` is called as often as the evaluator shows that it goes on."""
        return [self._oldest_metrics(beat) for _ in range(len(self._asked))]

    def close(self) -> None:
        """End the process; what it has not answered is given up."""
        self._asked.clear()
        self._end()

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            # The pipe is closed: the process reads its end, and ends its environments, before it is killed.
            self._process.join(END_SECONDS)
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None

    def _send(self, state: State) -> None:
        if self._process is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(_packed(state))
        except OSError:  # it has ended; the call that waits for its answer finds out why
            pass

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._workload, self._dtype, self._pipe, theirs, os.getpid()), daemon=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the child has one thread, and takes none of its parent's locks
            self._process.start()
        # The end of the child is then the end of the pipe, which _answers sees.
        theirs.close()

    def _answers(self, seconds: float, beat: Callable[[], None]) -> bool:
        """Tells whether an answer is there within ``seconds``; signs of life are taken out."""
        assert self._pipe is not None
        try:
            while self._answer is None and self._pipe.poll(seconds):
                answer = self._pipe.recv_bytes()
                if answer == BEAT:
                    beat()
                else:
                    self._answer = answer
        except (EOFError, OSError):
            return True  # its end is an answer
        return self._answer is not None

    def _oldest_metrics(self, beat: Callable[[], None]) -> tuple[State, Mapping[str, float]]:
        """Wait for the metrics of the oldest snapshot."""
        while not self._answers(LOOK_SECONDS, beat):
            pass
        answer, self._answer = self._answer, None
        if answer is None:
            self._start_again()
            return self._oldest_metrics(beat)
        result = torch.load(io.BytesIO(answer), weights_only=True)
        if "failed" in result:
            raise EvaluationFailed(f"the evaluation failed: {result['failed']}\n{result['traceback']}")
        self._news += result["news"]
        return self._asked.popleft(), result["metrics"]

    def news(self) -> list[str]:
        """Return what is to be reported of the evaluations since this was last asked, a sentence each."""
        news, self._news = self._news, []
        return news

    def _start_again(self) -> None:
        """Start another one in the place of one that has ended, and ask it the same."""
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode
        self._end()
        self._starts += 1
        if self._starts > MOST_STARTS:
            raise ApportionError(
                f"the process that evaluates has ended {self._starts} times, the last time with exit status {code}: "
                "an environment ends it, or the system does for want of memory"
            )
        warnings.warn(f"the process that evaluates ended with exit status {code}, and was started again", stacklevel=2)
        for state in self._asked:
            self._send(state)


def _packed(state: State) -> bytes:
    file = io.BytesIO()
    record = state.settings.get("python", {})
    torch.save({"model": state.model, "buffers": state.buffers, "python": state.python, "record": record}, file)
    return file.getvalue()


# In the process of the evaluator


def _serve(workload: Workload, dtype: torch.dtype | None, parents: Connection, pipe: Connection, parent: int) -> None:
    """Evaluate each snapshot that arrives, until the rank closes the pipe."""
    die_with_parent(parent)
    multiprocessing.current_process().daemon = False  # which may not have children, and environments may start some
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its rank decides
    outlive_notice()
    # The child would otherwise hold the other end of its own pipe open, and outlive its rank.
    parents.close()
    torch.set_num_threads(1)  # the threads of the parent did not come along
    played: _Snapshot | None = None
    try:
        while True:
            # A forked process cannot use the GPU that its parent uses: all snapshots are evaluated on the CPU.
            asked = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=True, map_location="cpu")
            try:
                played = played or _Snapshot(workload, dtype)
                result: Mapping[str, Any] = {"metrics": played.metrics(asked, _Pulse(pipe)), "news": played.news()}
            except Exception as error:
                result = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            file = io.BytesIO()
            torch.save(result, file)
            pipe.send_bytes(file.getvalue())
    except (EOFError, OSError):
        pass
    if played is not None:
        played.close()


class _Pulse:
    """Shows that the evaluator goes on, a few times a second."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._next = pipe, 0.0

    def __call__(self) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + BEAT_SECONDS
            self._pipe.send_bytes(BEAT)


class _Snapshot:
    """A network as it was at a step, for ``evaluate``."""

    whole, device = False, torch.device("cpu")

    def __init__(self, workload: Workload, dtype: torch.dtype | None) -> None:
        assert workload.evaluation is not None
        self._evaluation: Evaluation = workload.evaluation
        self._source = BatchSource.of_evaluation(workload, device=self.device, dtype=dtype)
        self.model: nn.Module = workload.make_model().to(device=self.device, dtype=self._source.dtype).eval()
        self._source.acts(self.model)
        self._python = PythonState()
        self._python.watch(model=self.model)

    def metrics(self, asked: Mapping[str, Mapping[str, Any]], beat: Callable[[], None]) -> Mapping[str, float]:
        """The metrics of this state."""
        buffers = dict(self.model.named_buffers())
        self.model.train()  # the evaluated network may have been made of the weights that were there before
        load_tensors(self.model, asked["model"])  # in place: whatever acts has seen these tensors
        with torch.no_grad():
            for name, values in asked["buffers"].items():
                buffers[name].copy_(values)
        self._python.show(dict(asked["record"]), asked["python"])
        self.model.eval()
        if isinstance(dataset := self._source.dataset, ActedDataset):
            dataset.beat = beat
        return evaluate(self, self._evaluation, self._source, Alone(), beat)

    def news(self) -> list[str]:
        """What is to be reported of the evaluations since this was last asked."""
        return self._source.dataset.news() if isinstance(self._source.dataset, ActedDataset) else []

    def close(self) -> None:
        """Release what the episodes are played with."""
        if isinstance(self._source.dataset, ActedDataset):
            self._source.dataset.close()

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        """The outputs, as ``Step.predict`` gives them."""
        return tree.call(self.model, batch.inputs)

    def looked(self) -> None:
        """Nothing is kept, and nothing has to be put back."""
