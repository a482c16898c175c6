"""The evaluations of a run: when one is due, what it gives, and whether it is the best so far."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from apportion.comm.group import Group, collective
from apportion.core.data.acted import ActedDataset
from apportion.core.data.source import BatchSource
from apportion.core.strategy import State, Step
from apportion.core.workload import Workload
from apportion.runtime.worker.evaluation import evaluate, try_evaluation
from apportion.runtime.worker.training.checkpoints import BestMetric
from apportion.runtime.worker.training.evaluator import Evaluator


class RunEvaluations:
    """One rank's part in the evaluations of a run.

    Ranks in lockstep evaluate together, each a part of the examples. A rank that trains on its own would stand still
    for whole episodes, and be stale after them: it has a process beside it, which plays them with a snapshot.
    """

    def __init__(self, workload: Workload, step: Step, *, rank: int, alone: bool) -> None:
        self._step, self._evaluation = step, workload.evaluation
        self.metrics: Mapping[str, float] = {}
        """The metrics of the last evaluation."""
        self._source: BatchSource | None = None
        if workload.evaluation is not None:
            rank = 0 if step.whole else rank  # who loads the same batch draws the same numbers for it
            dtype = step.source.dtype
            self._source = BatchSource.of_evaluation(workload, device=step.device, dtype=dtype, rank=rank)
        self._news: list[str] = []
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
        self.metrics = evaluate(self._step, self._evaluation, self._source, group, beat)
        if isinstance(dataset, ActedDataset):
            self._news += dataset.news()
        return best.agree(best.improve(self._evaluation.best, self.metrics), group, self._step.device)

    def news(self) -> list[str]:
        """What is to be reported of the evaluations since this was last asked, a sentence each."""
        news, self._news = self._news, []
        return news + (self.beside.news() if self.beside is not None else [])

    def record_metrics(self, state: State, metrics: Mapping[str, float], best: BestMetric) -> bool:
        """Records the metrics of a snapshot, and returns whether it is the best so far."""
        assert self._evaluation is not None
        self.metrics = metrics
        improved = best.improve(self._evaluation.best, metrics)
        state.settings["best"] = best.value
        return improved

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
