"""The network that a run has trained, as a plain module."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from apportion.core.address import load_workload, workload_in
from apportion.core.average import take_averages
from apportion.core.named_arguments import named_arguments
from apportion.core.place_names import split_address
from apportion.core.python_state.leaves import load_tensors, tensors_of
from apportion.core.python_state.python_state import PythonState
from apportion.core.rng import fork_rng, gpus_in_use, seed_host
from apportion.core.workload import Workload
from apportion.core.workload_rules import check_model
from apportion.errors import CheckpointError
from apportion.runtime.checkpoint import code_ownership
from apportion.runtime.checkpoint.run_directory import (
    RunDirectory,
    average_files,
    model_files,
    python_files,
    read_average,
    read_model,
    read_python,
)

_T = TypeVar("_T")


@named_arguments("load")
def load(
    run_dir: str | os.PathLike[str],
    *,
    which: str | int | None = None,
    model: Callable[[], nn.Module] | None = None,
    average: bool = True,
    trust: bool = False,
) -> nn.Module:
    """The trained module, plain and in evaluation mode, on the CPU.

    ``run_dir``: of a run, or of one of its checkpoints. ``which``: "best", "latest" or a step; None takes the best
    where the run has one. ``model`` makes the module where the run has no address (it was started from a notebook).
    ``average``: with the average of the weights, where the workload keeps one; False: with the weights themselves.
    The file that the run names is imported only where it is the caller's own: below the nearest pyproject.toml or .git
    above the program's script or the current folder, or in that folder where there is neither and no other user may
    write to it or the file; outside any run directory, and as it was when the run was started; or in an installed
    package that the program has imported. ``trust=True`` imports any. A script that is running, and a module that is
    imported already, are taken as they are. The caller's random state is left as it is. ValueError where the model
    cannot be made, CheckpointError where the checkpoint cannot be trusted or does not fit it.
    """
    if not isinstance(run_dir, str | os.PathLike):
        raise ValueError(f"run_dir={run_dir!r} must be the path of a folder: load('runs/first')")
    if model is not None:
        check_model(model)
    path = Path(run_dir)
    run, (tensors, averages, (record, beside)) = _read(
        path, which, lambda folder: (read_model(folder), read_average(folder), read_python(folder))
    )
    module = _build(run, model, trust)
    python = PythonState()
    python.watch(model=module)
    _fill(module, tensors, path)
    if average:
        take_averages(module, averages)
    python.show(record, beside)
    return module.eval()


def pinned(
    run_dir: str | os.PathLike[str], folder: Path, *, trust: bool = False, projects: Sequence[Path] | None = None
) -> Path:
    """Puts the checkpoint that ``load`` takes now into a folder that is made: what is loaded from there stays the same
    when a training that goes on finds a better one, and prunes this one. The code that the run names is held to be the
    caller's own here (``projects``: those of the caller, where this process has another script), so that a program that
    loads from the folder may trust it. Errors are those of ``load`` and ``workload_of``, and OSError where the folder
    cannot be filled."""

    def linked(checkpoint: Path) -> Path:
        made = folder / "checkpoints" / checkpoint.resolve().name
        shutil.rmtree(made, ignore_errors=True)  # of an attempt that a writer has crossed
        # Links to the same inodes keep the files alive after the training has pruned the checkpoint.
        made.mkdir(parents=True)
        try:
            for name in ("state.json", *model_files(checkpoint), *average_files(checkpoint), *python_files(checkpoint)):
                _link(checkpoint / name, made / name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{checkpoint} is not whole: {error.filename} is missing") from error
        return made

    run, made = _read(Path(run_dir), None, linked)
    about = _about(run)
    _place(run, about["address"], about, "source", trust, projects)
    (folder / "run.json").write_text(json.dumps(about))
    return made


def _link(path: Path, to: Path) -> None:
    """Links a file of a checkpoint, which is never written again; on another disk it is copied."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)


def workload_of(path: str | os.PathLike[str], *, trust: bool = False) -> Workload:
    """Returns what a run, or the run of a checkpoint, has trained. Raises ValueError where it was started from Python,
    or would run code that is not the caller's own."""
    path = Path(path)
    run = RunDirectory(path.parent.parent if (path / "state.json").is_file() else path)
    return _workload(run, _about(run), trust)


def _about(run: RunDirectory) -> dict[str, Any]:
    about = run.read_run()
    if not about.get("address"):
        raise ValueError(f"{run.path} names no workload as FILE:NAME (it was started from Python)")
    return about


def _read(path: Path, which: str | int | None, read: Callable[[Path], _T]) -> tuple[RunDirectory, _T]:
    """Returns the run that a checkpoint is of, and what ``read`` makes of the checkpoint."""
    if (path / "state.json").is_file():
        if which is not None:
            raise ValueError(f"{path} is one checkpoint: give which={which!r} with the run's folder")
        return RunDirectory(path.parent.parent), read(path)
    run = RunDirectory(path)
    if not run.steps():
        run.read_run()  # it is the wrong folder, or too early
    best = (run.checkpoints / "best").is_symlink()
    return run, run.trusted(which if which is not None else "best" if best else "latest", read)


def _build(run: RunDirectory, make: Callable[[], nn.Module] | None, trust: bool) -> nn.Module:
    about = run.read_run() if (run.path / "run.json").is_file() else {}
    seed = about.get("fingerprint", {}).get("seed", 0)
    if make is None and about.get("factory"):
        make = _factory(run, about, trust)
    if make is None:
        if not about.get("address"):
            raise ValueError(
                f"{run.path} names no workload as FILE:NAME (it was started from Python): give load(..., model=...)"
            )
        workload = _workload(run, about, trust)
        make, seed = workload.model, workload.seed
    with _seeded(seed):  # what the model draws and does not save is drawn as in training
        return make()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Starts torch, numpy and Python from the seed, as in a worker; afterwards they go on where they were."""
    with fork_rng(gpus_in_use()):
        seed_host(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        yield


def _workload(run: RunDirectory, about: Mapping[str, Any], trust: bool) -> Workload:
    """Returns the workload that a run names: as this process has it, or imported where that may be."""
    parts = split_address(about["address"])
    found = _place(run, about["address"], about, "source", trust)
    if isinstance(found, ModuleType):
        try:
            return workload_in(found, about["address"])
        except ValueError as error:
            raise ValueError(
                f"{run.path} was started from {parts.place}, which runs already and has no workload {parts.name} here: "
                f"it is not run again; give load(..., model=...) ({error})"
            ) from error
    try:
        with code_ownership.imported_by_load(about["address"]):
            return load_workload(parts.at(found))
    except ValueError as error:
        raise ValueError(f"{error}; put it back, or give load(..., model=...)") from error


def _factory(run: RunDirectory, about: Mapping[str, Any], trust: bool) -> Callable[[], nn.Module] | None:
    """Returns what has made the model of a run that was started from Python, where its workload is not at hand."""
    address = about.get("address")
    place = split_address(address).place if address else ""
    if code_ownership.is_file(place) and code_ownership.at_hand(Path(about.get("cwd", "."), place)) is not None:
        return None
    place, _, name = about["factory"]["name"].rpartition(":")
    found = _place(run, about["factory"]["name"], about, "factory", trust)
    with code_ownership.imported_by_load(about["factory"]["name"]):
        module = importlib.import_module(found) if isinstance(found, str) else found
    make = code_ownership.attribute(module, name)
    if not callable(make):
        raise ValueError(f"{run.path}: {place} has no {name} any more; give load(..., model=...)")
    return cast("Callable[[], nn.Module]", make)


def _place(
    run: RunDirectory,
    address: str,
    about: Mapping[str, Any],
    kind: str,
    trust: bool,
    projects: Sequence[Path] | None = None,
) -> str | ModuleType:
    """Returns the module of an address where this process has it already; else the place to import it from, which has
    been found to be the caller's own, or is trusted. Raises ValueError where it is neither."""
    place, cwd = split_address(address).place, about.get("cwd", ".")
    own = code_ownership.projects() if projects is None else projects
    # A folder that run.json alone names may hold anything under the name of what an own file imports.
    folders = [*sys.path, cwd] if trust or code_ownership.is_below(Path(cwd), own) else sys.path
    if code_ownership.is_file(place):
        file: Path | None = Path(cwd) / place
        found = code_ownership.at_hand(Path(cwd) / place)
    else:
        found, file = sys.modules.get(place), code_ownership.located(place, folders)
    if found is not None:
        return found
    if file is None:
        raise ValueError(f"module {place} does not exist: put it back, or give load(..., model=...)")
    if not trust:
        why = _not_own(place, file, (about.get(kind) or {}).get("sha256"), own)
        if why is not None:
            raise ValueError(f"{run.path} names {file}, which is not run: {why}; {code_ownership.CURE}")
    if code_ownership.is_file(place):
        return str(file)
    if cwd in folders and cwd not in sys.path:
        sys.path.append(cwd)
    return place


def _not_own(place: str, file: Path, recorded: object, projects: Sequence[Path]) -> str | None:
    if code_ownership.is_file(place) or not code_ownership.is_installed(file):
        return code_ownership.refusal(file, recorded, projects)
    package = place.partition(".")[0]
    return None if package in sys.modules else f"your program has not imported the installed package {package}"


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    if {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.float64}:
        module.to(torch.float64)  # as precision="float64" trained it, with what is not saved
    own = tensors_of(module)
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
    load_tensors(module, {name: t for name, t in tensors.items() if name not in beside})
    for name, buffer in beside.items():
        buffer.copy_(tensors[name])
