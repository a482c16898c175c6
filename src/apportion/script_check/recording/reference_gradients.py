"""Computes, before each optimizer step of one process, the gradient of the user's reference function.

The function gets the script's own network, at the weights with which the step begins, and the rows of the step in one
batch. Gradients, buffers and generators are left as they are found.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from apportion.script_check.recording.batches import restored
from apportion.script_check.recording.modules import Networks, gathered
from apportion.script_check.recording.precision import widened
from apportion.script_check.recording.recorder import Finished, Recorder
from apportion.script_check.recording.tensors import values


class _Unusable(Exception):
    """The script or the function is not one that can be compared, for the reason that the text gives."""


class ReferenceGradients:
    """The gradients of the function that the plan names."""

    def __init__(self, recorder: Recorder, networks: Networks) -> None:
        self._recorder, self._networks = recorder, networks
        file, _, self._name = str(recorder.plan["reference"]).rpartition(":")
        self._file = Path(file)
        self._function: Callable[..., Any] | None = None
        self._done = set[int]()

    def before(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Before a step: computes the gradient, once for the rows that were read for it."""
        recorder = self._recorder
        rows = recorder.feed.step_rows.get(recorder.step + 1) if recorder.feed is not None else None
        if rows is None or recorder.step in self._done or not recorder.active:
            return
        self._done.add(recorder.step)
        try:
            batch = restored(rows)
            self._compute(widened(batch) if recorder.plan["float64"] else batch)
        except (Exception, SystemExit) as error:
            self._fail(error)
            raise Finished from error

    def _compute(self, batch: Any) -> None:
        networks = self._networks
        trained = [root for root in networks.roots() if root.label in networks.trained]
        if len(trained) != 1:
            raise _Unusable(f"the script trains {len(trained)} networks, and a reference is given one")
        model = trained[0].module
        function = self._loaded()
        with _left_as_found(model), torch.enable_grad():
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(True)
            loss = function(model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
                what += " without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
                raise _Unusable(f"it returns {what:.80}, and not the loss, a tensor with one element and its gradient")
            loss.backward()
            with gathered(networks.roots(), gradients=True):
                gradients = {
                    name: None if parameter.grad is None else values(parameter.grad, networks.sampled)
                    for name, parameter in trained[0].parameters()
                }
        self._recorder.emit("reference", gradients=gradients)

    def _loaded(self) -> Callable[..., Any]:
        if self._function is None:
            found = getattr(self._module(), self._name, None)
            if not callable(found):
                raise _Unusable(f"{self._file.name} has no function {self._name} when the first step is made")
            self._function = found
        return self._function

    def _module(self) -> Any:
        """The module that has the function: the running script itself where it is in the script's file."""
        script = sys.modules["__main__"]
        if os.path.realpath(self._file) == os.path.realpath(str(getattr(script, "__file__", ""))):
            return script
        if str(self._file.parent) not in sys.path:
            sys.path.append(str(self._file.parent))
        spec = importlib.util.spec_from_file_location(self._file.stem, self._file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(self._file.stem, module)  # as its classes look for their module
        spec.loader.exec_module(module)
        return module

    def _fail(self, error: BaseException) -> None:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == self._file.name]
        code = getattr(self._function, "__code__", None)
        line = frames[-1].lineno if frames else getattr(code, "co_firstlineno", None)
        kind = "" if isinstance(error, _Unusable) else f"{type(error).__name__}: "
        self._recorder.emit(
            "reference_failed",
            message=f"{kind}{error}",
            site=self._file.name if line is None else f"{self._file.name}:{line}",
            text=(frames[-1].line or "") if frames else "",
        )


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Gradients that are free for the body, and what the network and the generators are afterwards as before."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for buffer, held in buffers:
                buffer.copy_(held)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def install(recorder: Recorder, networks: Networks) -> None:
    """Compute the reference before each step of the optimizers that torch's hooks see."""
    register_optimizer_step_pre_hook(ReferenceGradients(recorder, networks).before)
