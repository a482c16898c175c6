"""``assert_same_network``: a training step on several ranks against the same step in one process."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from apportion.errors import ApportionError
from apportion.process import PACKAGE
from apportion.script_check.comparison.tensors import initial
from apportion.script_check.record import RankRecord, read_records
from apportion.testing.processes import before_stacks, log_of, run_pass
from apportion.testing.transfer import packed
from apportion.testing.trial import Division, RankPlace, Step, StepTrial, divided
from apportion.testing.verdict import DifferentNetwork, disagreement, message

__tracebackhide__ = True  # pytest shows the line of the test, and not those of this module


def assert_same_network(  # noqa: PLR0913 (one argument for each thing that a step is called with)
    step: Step,
    *,
    model: nn.Module | Callable[[], nn.Module],
    rows: Any,
    wrap: Callable[[nn.Module], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    ranks: int = 2,
    steps: int = 8,
    reference: Step | None = None,
    shared: bool | int = False,
    parts: Sequence[int] | None = None,
    buffers: bool = True,
    backend: str = "gloo",
    timeout: float = 60.0,
) -> None:
    """Raise AssertionError where a training step does not train, on several ranks, the network of one process.

    ``step(model, optimizer, rows)`` makes one training step, as the user's own program does it (forward, backward,
    ``optimizer.step()``), and returns the loss. It is called ``steps`` times on each of ``ranks`` processes with that
    rank's rows, and in one process with the rows of all ranks, from the same initial weights. Gradients before and
    weights after every optimizer step, buffers, learning rates and the number of steps have to agree.

    Three common uses::

        # 1. DistributedDataParallel; the rows are divided among the ranks
        assert_same_network(step, model=Net(), wrap=DistributedDataParallel, rows=(inputs, targets))

        # 2. a function that sets up the model, and the optimizer after it, on each rank: fully_shard, broadcasts, hooks
        def setup(model):
            fully_shard(model)
            return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

        assert_same_network(step, model=Net(), wrap=setup, rows={"x": inputs, "y": targets}, ranks=4)

        # 3. tensor parallelism: all ranks read the same rows, and one process trains the plain model
        assert_same_network(step, model=Net(), wrap=shard_layers, rows=(inputs, targets), shared=True, reference=plain)

    ``model``: a module, which has the same weights on all ranks, or a function that each rank calls; there random
    numbers are seeded differently on each rank, as in a program that seeds nothing. ``wrap``: called on each rank with
    the model when the process group is open; returns the model to train, or ``(model, optimizer)``. ``optimizer``: a
    function that makes an optimizer from the parameters, by default ``torch.optim.SGD`` with a learning rate of 0.01;
    it is called where ``wrap`` returns none. ``reference``: a function like ``step`` for one process, which is given
    the plain model and all rows; by default ``step`` itself with the model that ``wrap`` returns in a group of one
    rank.

    ``rows``: a tensor or a tree of tensors with examples in dimension 0. They are divided into ``steps`` global
    batches, and each of these into equal contiguous parts. ``parts``: the rows of each rank in a batch where they are
    not equal. ``shared``: True gives all ranks the same rows; a number gives them to that many consecutive ranks.
    ``buffers``: False leaves buffers out of the comparison. ``backend``: of torch.distributed; with "nccl" rank n has
    GPU n. ``timeout``: the seconds for which no rank may make progress before the test fails with the stacks of all.

    The model, the rows, all other tensors and the default element type are float64, and dropout is off, so that what
    differs is a mistake and not rounding. The ranks are processes of their own; functions may be closures, lambdas and
    definitions of the test's module.

    Raises DifferentNetwork, an AssertionError with a table of the tensors that differ, the cause and the remedy;
    WorkerFailed where a rank raises (with its own traceback), ends or hangs; ValueError where an argument is wrong.
    """
    __tracebackhide__ = True
    refuse_unfit(step, model, ranks, steps, backend, timeout)
    refuse_other_than_functions({"wrap": wrap, "optimizer": optimizer, "reference": reference})
    division = divided(rows, ranks, steps, shared, parts)
    trial = StepTrial(step, model, wrap, optimizer, reference, rows, steps, division)
    data = packed(trial, [f for f in (step, model, wrap, optimizer, reference) if f is not None], _caller())
    folder = Path(tempfile.mkdtemp(prefix="apportion-testing-"))
    try:
        on_ranks, union = _recorded(folder, data, ranks, _source(step), backend, timeout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    refuse_nothing_compared(on_ranks, union)
    found = disagreement(on_ranks, union, _shares(division, ranks), buffers)
    if found is not None:
        raise DifferentNetwork(message(found, ranks), found)


def _recorded(
    folder: Path, data: bytes, ranks: int, source: str, backend: str, timeout: float
) -> tuple[list[RankRecord], RankRecord]:
    """Runs the ranks, and then one process from their initial weights; returns what they have recorded."""
    __tracebackhide__ = True
    for name in ("ranks", "one"):
        (folder / name).mkdir()
    wait = timeout * 4  # the ranks' own deadline of a collective comes after that of the test, which prints stacks
    places = [RankPlace(rank, ranks, str(folder / "ranks"), source, backend, wait) for rank in range(ranks)]
    _printing(places, data, timeout)
    on_ranks = _whole(read_records(folder / "ranks"), ranks)
    weights = folder / "weights.pkl"
    weights.write_bytes(pickle.dumps(_common_weights(on_ranks)))
    alone = RankPlace(0, 1, str(folder / "one"), source, backend, wait, alone=True, weights=str(weights))
    _printing([alone], data, timeout)
    (union,) = _whole(read_records(folder / "one"), 1)
    return on_ranks, union


def _printing(places: Sequence[RankPlace], data: bytes, timeout: float) -> None:
    """Runs a pass, and prints what its ranks have printed, whether or not it succeeds."""
    __tracebackhide__ = True
    try:
        run_pass(places, data, timeout)
    finally:
        for place in places:
            name = "reference" if place.alone else f"rank {place.rank}"
            for line in before_stacks(log_of(place)).splitlines():
                print(f"[{name}] {line}")


def _whole(records: list[RankRecord], ranks: int) -> list[RankRecord]:
    if len(records) != ranks:
        raise ApportionError(f"{len(records)} of {ranks} ranks have left a record: check that the disk has room")
    return records


def _common_weights(ranks: Sequence[RankRecord]) -> dict[str, Any]:
    """The initial weights that all ranks have under the same names; none of those of which each rank has its own, such
    as the stages of a pipeline."""
    by_rank = [initial(record) for record in ranks]
    same = all(each.keys() == by_rank[0].keys() for each in by_rank)
    return by_rank[0] if same else {}


def _caller() -> str:
    """The name of the module that the call stands in, outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
        frame = frame.f_back
    return "__main__" if frame is None else str(frame.f_globals.get("__name__", "__main__"))


def _shares(division: Division, ranks: int) -> tuple[float, ...]:
    groups = [division.parts[rank // division.group] for rank in range(ranks)]
    return tuple(part / sum(groups) for part in groups)


def _source(step: Step) -> str:
    """The folder whose files count as the user's: that of the step."""
    code = getattr(getattr(step, "func", step), "__code__", None)
    return os.path.dirname(os.path.abspath(code.co_filename)) if code is not None else os.getcwd()


BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")
_FUNCTIONS = {
    "wrap": "a function that is called with the model on each rank, such as DistributedDataParallel",
    "optimizer": "a function that makes an optimizer from the parameters, such as torch.optim.AdamW",
    "reference": "a function reference(model, optimizer, rows) that makes the step in one process",
}
LONGEST = 7 * 24 * 3600.0
"""The longest time without progress, in seconds, that the deadlines of collectives can be made of."""
LARGEST = 1e100
"""The largest value that is compared: squares beyond it overflow."""


def refuse_unfit(step: Any, model: Any, ranks: int, steps: int, backend: str, timeout: float) -> None:
    """Raise ValueError for an argument that cannot be tried."""
    if not callable(step):
        raise ValueError(f"step={step!r}: it is a function step(model, optimizer, rows) that returns the loss")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:
        raise ValueError(f"ranks={ranks!r}: a distributed step is compared on at least 2 ranks; give ranks=2")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: it is the number of calls of step, at least 1; give steps=8")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= LONGEST:
        raise ValueError(
            f"timeout={timeout!r}: it is a number of seconds above 0, at most {LONGEST:.0f}; give timeout=60.0"
        )
    if isinstance(model, nn.Module):
        if next(model.parameters(), None) is None:
            raise ValueError(
                f"model {type(model).__name__} has no parameters: gradients and weights are compared; give the network "
                "that the step trains"
            )
    elif not callable(model):
        raise ValueError(f"model={model!r}: it is a torch.nn.Module, or a function without arguments that returns one")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: it is one of {', '.join(map(repr, BACKENDS))}")
    if "nccl" in backend and torch.cuda.device_count() < ranks:
        raise ValueError(
            f"backend={backend!r} has one GPU for each of ranks={ranks}, and this machine has "
            f"{torch.cuda.device_count()}: use backend='gloo', which computes on the CPU"
        )


def refuse_other_than_functions(given: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument, by its name, that is neither None nor the function that it has to be."""
    for name, value in given.items():
        if value is None or (callable(value) and not isinstance(value, nn.Module)):
            continue
        shown = repr(value) if isinstance(value, str | int | float) else f"an object of type {type(value).__name__}"
        raise ValueError(f"{name}={shown}: it is {_FUNCTIONS[name]}")


def refuse_nothing_compared(ranks: Sequence[RankRecord], union: RankRecord) -> None:
    """Raise ValueError where the step has shown nothing: no loss, no optimizer step, or no gradient."""
    losses = [call["returned"] for record in ranks for call in record.events_of("call")]
    for who, returned in (
        ("on every rank", losses),
        ("in one process", [e["returned"] for e in union.events_of("call")]),
    ):
        if all(each == "None" for each in returned):
            raise ValueError(
                f"step returned None {who}: it returns the loss, a tensor with one element or a number; end it with "
                "`return loss`"
            )
    for who, records in (("on the ranks", ranks), ("in one process", [union])):
        if not any(record.steps for record in records):
            calls = len(union.events_of("call"))
            raise ValueError(
                f"step made no optimizer step {who} in {calls} calls: it ends with optimizer.step() "
                "of the optimizer that it is given"
            )
    gradients = [array for step in union.steps for array in step["gradients"].values() if array is not None]
    if not any(np.any(array) for array in gradients):
        raise ValueError(
            "no parameter has a gradient other than zero when optimizer.step() is called in one process: call "
            "loss.backward() before it, and optimizer.zero_grad() before the backward pass or after the step"
        )
    weights = [array for step in union.steps for array in step["weights"].values()]
    largest = max(float(np.max(np.abs(array), initial=0.0)) for array in [*gradients, *weights])
    if not largest < LARGEST:
        raise ValueError(
            f"gradients or weights in one process reach {largest:g}, and nothing can be compared with that: use a "
            "smaller learning rate, fewer steps or other rows"
        )
