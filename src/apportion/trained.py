"""The network that a run has trained, as a plain module."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from apportion.address import load_workload
from apportion.checkpoint import RunDirectory, model_files, read_model
from apportion.errors import CheckpointError
from apportion.workload import Workload

_T = TypeVar("_T")


def load(
    run_dir: str | os.PathLike[str], *, which: str | int | None = None, model: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """The trained module, plain and in evaluation mode, on the CPU.

    ``run_dir``: of a run, or of one of its checkpoints. ``which``: "best", "latest" or a step; None takes the best
    where the run has one. ``model`` makes the module where the run has no address (it was started from a notebook).
    The caller's random state is left as it is. ValueError where the model cannot be made, CheckpointError where the
    checkpoint cannot be trusted or does not fit it.
    """
    path = Path(run_dir)
    run, tensors = _read(path, which, read_model)
    module = _build(run, model)
    _fill(module, tensors, path)
    return module.eval()


def pinned(run_dir: str | os.PathLike[str], folder: Path) -> Path:
    """The checkpoint that ``load`` takes now, in a folder that is made: what is loaded from there stays the same when a
    training that goes on finds a better one, and prunes this one. Errors are those of ``load`` and ``workload_of``, and
    OSError where the folder cannot be filled."""

    def linked(checkpoint: Path) -> Path:
        made = folder / "checkpoints" / checkpoint.resolve().name
        shutil.rmtree(made, ignore_errors=True)  # of an attempt that a writer has crossed
        made.mkdir(parents=True)
        try:
            for name in ("state.json", *model_files(checkpoint)):
                _link(checkpoint / name, made / name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{checkpoint} is not whole: there is no {error.filename}") from error
        return made

    run, made = _read(Path(run_dir), None, linked)
    _about(run)
    shutil.copyfile(run.path / "run.json", folder / "run.json")
    return made


def _link(path: Path, to: Path) -> None:
    """Files of a checkpoint are never written again; on another disk it is copied."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)


def workload_of(path: str | os.PathLike[str]) -> Workload:
    """What a run, or the run of a checkpoint, has trained. ValueError where it was started from Python."""
    path = Path(path)
    about = _about(RunDirectory(path.parent.parent if (path / "state.json").is_file() else path))
    return _workload(about["address"], about.get("cwd", "."))


def _about(run: RunDirectory) -> dict[str, Any]:
    about = run.read_run()
    if not about.get("address"):
        raise ValueError(f"{run.path} names no workload as FILE:NAME (it was started from Python)")
    return about


def _read(path: Path, which: str | int | None, read: Callable[[Path], _T]) -> tuple[RunDirectory, _T]:
    """What ``read`` makes of a checkpoint, and the run that it is of."""
    if (path / "state.json").is_file():
        if which is not None:
            raise ValueError(f"{path} is one checkpoint: give which={which!r} with the run's folder")
        return RunDirectory(path.parent.parent), read(path)
    run = RunDirectory(path)
    if not run.steps():
        run.read_run()  # it is the wrong folder, or too early
    best = (run.checkpoints / "best").is_symlink()
    return run, run.trusted(which if which is not None else "best" if best else "latest", read)


def _build(run: RunDirectory, make: Callable[[], nn.Module] | None) -> nn.Module:
    about = run.read_run() if (run.path / "run.json").is_file() else {}
    seed = about.get("fingerprint", {}).get("seed", 0)
    if make is None:
        if not about.get("address"):
            raise ValueError(
                f"{run.path} names no workload as FILE:NAME (it was started from Python): give load(..., model=...)"
            )
        workload = _workload(about["address"], about.get("cwd", "."))
        make, seed = workload.model, workload.seed
    with _seeded(seed):  # what the model draws and does not save is drawn as in training
        return make()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch, numpy and Python start from the seed, as in a worker; afterwards they go on where they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _workload(address: str, cwd: str) -> Workload:
    place, _, name = address.rpartition(":")
    if place.endswith(".py") or os.sep in place:
        address = f"{Path(cwd) / place}:{name}"
    elif cwd not in sys.path:
        sys.path.append(cwd)
    try:
        return load_workload(address)
    except ValueError as error:
        raise ValueError(f"{error}; put it back, or give load(..., model=...)") from error


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    if {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.float64}:
        module.to(torch.float64)  # as precision="float64" trained it, with what is not saved
    own = module.state_dict()
    beside = {n: b for n, b in module.named_buffers() if n in tensors and n not in own}
    own |= beside
    wrong = [f"{name} is only in the checkpoint" for name in tensors if name not in own]
    wrong += [f"{name} is only in the model" for name in own if name not in tensors]
    wrong += [
        f"{name} is {list(t.shape)} in the checkpoint and {list(own[name].shape)} in the model"
        for name, t in tensors.items()
        if name in own and own[name].shape != t.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(
            f"{path} does not fit the model: {'; '.join(wrong[:4])}{more}. Give the model it was trained with: "
            "load(..., model=...)"
        )
    module.load_state_dict({name: t for name, t in tensors.items() if name not in beside})
    for name, buffer in beside.items():
        buffer.copy_(tensors[name])
