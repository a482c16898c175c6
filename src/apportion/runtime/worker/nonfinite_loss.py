"""A loss that is not finite: noticed at its step, and the layer named where it begins.

The loss is looked at between the backward pass and the update, so that the weights are still those of the step before,
and a second forward pass on a plain copy of the network can tell which layer gives the first output that is not finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.policy import Policy
from apportion.core.rng import fork_rng, mix
from apportion.core.strategy import State, Step
from apportion.core.workload import Workload
from apportion.errors import NotFinite

OTHERS_SECONDS = 1.0
"""The seconds that a rank in whose rows nothing is found waits: the rank that holds the row reports it."""
ROWS = 1024
"""The number of rows that are looked at in one forward pass."""
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@final
class LossGuard:
    """Makes the steps of a rank, and looks at each loss; the policy decides what to do about one that is not finite.

    On a CPU every step is looked at, which costs a microsecond. On other devices the loss would have to be waited for:
    there only what is reported anyway is looked at, by ``reported``.
    """

    def __init__(self, step: Step, workload: Workload, policy: Policy, *, ranks: int) -> None:
        self._step, self._workload, self._policy, self._ranks = step, workload, policy, ranks
        self._watches = policy.on_nan != "ignore"
        self._each = self._watches and step.device.type == "cpu"
        # Where a step is a backward pass and an update, the loss is known before anything changes.
        self._apart = self._each and workload.update is None
        self._reported = False
        self._exempt = frozenset(n for n, b in step.model.named_buffers() if b.is_floating_point() and _has_nan(b))
        self.news: list[str] = []
        """The warnings that are to be reported, under ``on_nan="warn"``."""

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        """Makes one step, and returns the named values of the global batch. Raises NotFinite where the run ends
        here."""
        if not self._each:
            return self._step(batch)
        if not self._apart:
            values = self._step(batch)
        else:
            loss = self._step.backward(batch)
            if loss is not None and not math.isfinite(loss.item()):
                self._found(batch.step + 1, "loss", loss.item(), batch)
            values = self._step.update()
        for name, value in values.items():
            if _is_loss(name) and not math.isfinite(value.item()):
                self._found(batch.step + 1, name, value.item())
        return values

    def reported(self, done: int, values: Mapping[str, list[float]]) -> None:
        """Looks at the values of the last steps, as they are reported after ``done`` updates. Raises NotFinite where
        the run ends here."""
        if self._each or not self._watches:
            return
        for name, numbers in values.items():
            for before, number in enumerate(reversed(numbers)):
                if _is_loss(name) and not math.isfinite(number):
                    self._found(done - before, name, number)

    def may_keep(self, state: State) -> str | None:
        """Returns None where this state may be written down, else the name of a tensor that holds a NaN."""
        if not self._watches:
            return None
        return next(
            (n for n, t in state.model.items() if t.is_floating_point() and n not in self._exempt and _has_nan(t)), None
        )

    def not_kept(self, state: State, name: str) -> None:
        """Reports that this state is not written down. Raises NotFinite where the run ends here."""
        self._say(
            f"{name} holds a NaN after step {state.step}, though the loss was finite until then: the gradient was not; "
            "this state is not saved"
        )

    def _found(self, number: int, name: str, value: float, batch: Batch | None = None) -> None:
        """Tells of a value that is not finite. ``batch``: the batch with which to look where it begins."""
        if self._reported:
            return
        where = None if batch is None else where_it_begins(self._step, self._workload, batch)
        if where is None and self._policy.on_nan == "stop" and self._ranks > 1:
            # The first error that reaches the supervisor ends the run; that of the rank which holds the row names the
            # layer.
            time.sleep(OTHERS_SECONDS)
        self._say(f"{name} is {value} at step {number}" + (f": {where}" if where else ""))

    def _say(self, text: str) -> None:
        if self._policy.on_nan == "stop":
            raise NotFinite(text)
        if not self._reported:
            self._reported = True
            self.news.append(text)


def _is_loss(name: str) -> bool:
    return "loss" in name.lower()


def _has_nan(tensor: Tensor) -> bool:
    return bool(tensor.isnan().any())


def where_it_begins(step: Step, workload: Workload, batch: Batch) -> str | None:
    """Returns in words what a second look at a step that gave a loss that is not finite finds, before its update. None:
    it finds nothing in the rows of this rank.

    It looks at the rows of this rank, with the draws of the step, on a copy of the plain network: it asks no other
    rank, and leaves the step as it was.
    """
    weights = [name for name, p in step.model.named_parameters() if not bool(_local_part(p).isfinite().all())]
    if weights:
        return (
            f"{weights[-1]} is not finite since the update before, whose gradient was not: look at what is computed "
            "from it (a square root of zero, a division, a logarithm)"
        )
    try:
        with fork_rng([step.device.index or 0] if step.device.type == "cuda" else ()):
            return _look(step, workload, batch)
    except Exception as error:
        return f"where it begins could not be found out here ({type(error).__name__}); single_device names the layer"


def _look(step: Step, workload: Workload, batch: Batch) -> str | None:
    model = workload.make_model().to(device=step.device, dtype=step.source.dtype)
    wanted, local = model.state_dict(), step.model.state_dict()
    if wanted.keys() != local.keys() or any(wanted[n].shape != _local_part(local[n]).shape for n in wanted):
        return "this rank holds a part of the network; single_device names the layer"
    model.load_state_dict(local)
    # Dropout has to drop the same elements, or the value may not appear.
    torch.manual_seed(mix(workload.seed, batch.step, step.rank))  # as the step drew
    first = FirstNotFinite(model)
    dtype = _AUTOCAST.get(workload.precision)
    with torch.no_grad(), nullcontext() if dtype is None else torch.autocast(step.device.type, dtype=dtype):
        for part in batch.parts(math.ceil(len(batch) / ROWS)):
            state = () if workload.carry is None else (tree.cast(workload.carry(len(part)), step.device, None),)
            outputs = tree.call(model, part.inputs, *state)
            if first.found is not None:
                return first.found
            outputs = outputs[0] if state else outputs
            assert workload.loss is not None
            terms = 1.0 if workload.count is None else part.count
            if terms and not bool(workload.loss(outputs, part.targets).isfinite().all()):
                return "the outputs of every layer are finite, and the loss function makes it of them and the targets"
    return None


class FirstNotFinite:
    """Watches a forward pass of a network for the first output that is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.found: str | None = None
        """The place where it begins, in words; None: it begins nowhere."""
        self._open: list[str] = []
        for name, module in model.named_modules():
            label = f"{name} ({type(module).__name__})" if name else type(module).__name__
            module.register_forward_pre_hook(lambda m, a, k, label=label: self._enter(label, (a, k)), with_kwargs=True)
            module.register_forward_hook(lambda m, a, result, label=label: self._leave(label, result))

    def _enter(self, label: str, given: Any) -> None:
        if self.found is None and not _finite(given):
            if self._open:
                self.found = f"what {self._open[-1]} computes before it calls {label} is the first that is not finite"
            else:
                self.found = "the inputs of the batch are not finite"
        self._open.append(label)

    def _leave(self, label: str, result: Any) -> None:
        self._open.pop()
        if self.found is None and not _finite(result):
            self.found = f"the output of {label} is the first that is not finite"


def _local_part(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor: to ask for a whole sharded tensor would be to wait for the other
    ranks."""
    part: Any = tensor.detach()
    return part.to_local() if hasattr(part, "to_local") else part  # type: ignore[no-any-return] # a DTensor


def _finite(values: Any) -> bool:
    return all(bool(t.isfinite().all()) for t in tree.tensors(values) if t.is_floating_point() or t.is_complex())
