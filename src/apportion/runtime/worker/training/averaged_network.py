"""The network with the average of its weights, for an evaluation: a plain model beside the one that is trained, on
every rank. The weights that are trained are not touched, so that a rank that dies meanwhile leaves them whole."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn

from apportion.comm.group import collective
from apportion.core import tree
from apportion.core.average import averages_in, take_averages
from apportion.core.data.batch import Batch
from apportion.core.python_state.leaves import load_tensors
from apportion.core.python_state.python_state import PythonState
from apportion.core.rng import fork_rng, gpus_in_use, seed_host
from apportion.core.strategy import State, Step
from apportion.core.workload import Workload
from apportion.parallel.replica.initial_model import fresh_model

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@final
class AveragedNetwork:
    """A network as ``evaluate`` asks for it, each rank for its rows of each batch."""

    whole = False

    def __init__(self, workload: Workload, step: Step) -> None:
        self.device, self._step, self._precision = step.device, step, _AUTOCAST.get(workload.precision)
        with fork_rng(gpus_in_use()):
            seed_host(workload.seed)  # what the model draws and does not save is drawn as in training
            self.model: nn.Module = fresh_model(workload, step.device, step.source.dtype)
        self._python = PythonState()
        self._python.watch(model=self.model)

    @collective
    def refresh(self) -> None:
        """Take the averages as they are now. Called by all ranks."""
        self._show(self._step.state_dict())

    @torch.no_grad()
    def _show(self, state: State) -> None:
        self.model.train()  # the evaluated network may have been made of the weights that were there before
        load_tensors(self.model, state.model)
        buffers = dict(self.model.named_buffers())
        for name, values in state.buffers.items():
            buffers[name].copy_(values)
        take_averages(self.model, averages_in(state.optimizer))
        self._python.show(dict(state.settings["python"]), state.python)
        self.model.eval()

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any | None:
        """The outputs for this rank's rows, None where it has none."""
        if not len(batch):
            return None
        if self._precision is None:
            return tree.call(self.model, batch.inputs)
        with torch.autocast(self.device.type, dtype=self._precision):
            return tree.call(self.model, batch.inputs)

    def looked(self) -> None:
        """Nothing is kept, and nothing has to be put back."""
