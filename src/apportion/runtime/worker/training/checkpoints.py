"""The checkpoints of a run: all ranks make the state, and rank 0 writes it, in the background. The best value of the
metric decides which checkpoint is the best."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, final

import torch

from apportion.comm.group import Group, collective
from apportion.comm.world import World
from apportion.core.replica_digest import check_replicated
from apportion.core.strategy import State, Step
from apportion.errors import CheckpointError
from apportion.runtime.checkpoint.async_writer import Saver
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.worker.job import Job
from apportion.runtime.worker.nonfinite_loss import LossGuard


@final
class BestMetric:
    """The best value that the metric has had so far, the same on every rank after each evaluation."""

    def __init__(self, value: float | None) -> None:
        self.value = value
        """The value, where more is better; None: there was no evaluation yet."""

    def improve(self, rule: str | None, metrics: Mapping[str, float]) -> bool:
        """Takes the value that these metrics give by the rule ("max accuracy"); tells whether it is the best so far."""
        if rule is None:
            return False
        sense, _, name = rule.partition(" ")
        value = metrics[name] if sense == "max" else -metrics[name]
        if math.isnan(value) or (self.value is not None and not value > self.value):
            return False
        self.value = value
        return True

    @collective
    def agree(self, best: bool, group: Group, device: torch.device) -> bool:
        """Returns rank 0's answer: a replacement does not know how well the network did before it joined. Called by all
        ranks of the group."""
        answer = torch.tensor([float(best), math.nan if self.value is None else self.value], dtype=torch.float64)
        answer = answer.to(device)
        # float64 carries the flag and the value in one message, without a rounding of the value.
        group.broadcast(answer)
        self.value = None if math.isnan(answer[1].item()) else answer[1].item()
        return bool(answer[0].item())


class RunCheckpoints:
    """One rank's part in the checkpoints of a run. ``directory``: the run directory that this rank writes, rank 0's or
    its copy on another host; None: this rank writes none."""

    def __init__(
        self, job: Job, step: Step, guard: LossGuard, directory: RunDirectory | None, best: float | None
    ) -> None:
        self._job, self._step, self._guard = job, step, guard
        self._open(directory)
        self._saved = step.done if job.resume else 0
        """The step of the last state that another rank was to write, on a disk that this one may not see; 0: none."""
        self.best = BestMetric(best)
        """The best value of the metric so far, which a checkpoint holds."""

    def _open(self, directory: RunDirectory | None) -> None:
        self.directory = directory
        """The run directory that this rank writes; None: none."""
        self.saver = Saver(directory, self._job.policy.keep, str(self._job.strategy))
        """The writer of the states, which writes nothing without a directory."""

    def take_over(self, directory: RunDirectory | None) -> None:
        """Writes this run directory from now on, where this rank takes the place of one that has died."""
        if directory is not None and directory is not self.directory:
            self._open(directory)
            self.best.value = directory.best()

    def cut(self, cuts: Mapping[str, Any] | None) -> None:
        """Records from now on, in every checkpoint, where the network is cut into stages."""
        if self.directory is not None:
            self.directory.cuts = cuts

    @collective
    def save(self, world: World, *, best: bool = False) -> None:
        """Saves the state: every rank takes part in making it, where all hold it in the same way; one writes it, in the
        background."""
        if self._job.run_dir is None:
            return
        began = time.perf_counter()
        step = self._step
        # Ranks that have drifted apart are found before the state of one of them is written as that of all.
        check_replicated(step.replicated(), rank=world.rank, step=step.done, device=world.device)
        state = step.state_dict()
        state.settings["best"] = self.best.value
        self.write_state(state, best=best, seconds=time.perf_counter() - began)

    def write_state(self, state: State, *, best: bool, seconds: float = 0.0) -> None:
        """Has a state of this run written in the background, unless it holds a number that is not finite.
        ``seconds``: the time that it took to make it."""
        if self.directory is None:  # another rank looks at it, and writes it
            self._saved = state.step
        elif (spoilt := self._guard.may_keep(state)) is not None:
            self._guard.not_kept(state, spoilt)
        else:
            self.saver.submit(state, state.step / self._step.source.deal.batches, best=best, seconds=seconds)

    def save_committed(self) -> int:
        """Writes the state after the last update, and returns the step it is of. Called from another thread than the
        loop's."""
        if self.directory is None:
            raise CheckpointError("the run has no run_dir")
        # The main thread may be in the middle of a step; only a state that no step writes to may be read here.
        state = self._step.committed()
        if state is None:
            self.saver.flush()  # what was on its way is what the run goes back to
            raise CheckpointError("it is spread over the ranks, or in the middle of an update")
        if (spoilt := self._guard.may_keep(state)) is not None:
            raise CheckpointError(f"{spoilt} holds a NaN by then")
        state.settings["best"] = self.best.value
        self.saver.submit(state, state.step / self._step.source.deal.batches, best=False, seconds=0.0)
        self.saver.flush()
        self.saver.check()
        return state.step

    def summary_of_saved(self) -> str:
        """Returns what is left of a run that ends with a loss that is not finite, and what can be done."""
        self.saver.flush()
        steps = [] if self._job.run_dir is None else RunDirectory(self._job.run_dir).steps()
        last = steps[-1] if steps else self._saved  # on another host's disk
        kept = f"the last finite checkpoint, step {last}, is kept" if last else "no checkpoint was saved before"
        return (
            f"{kept}; use a smaller learning rate, or clip_grad_norm=1.0, or mend the layer "
            '(Policy(on_nan="warn") goes on all the same)'
        )
