"""Checkpoints: atomic save and restore of the full state, independent of the world's size; ``load`` of a trained net.

A run directory::

    run.json                       the address, strategy, launcher, versions, fingerprint of the workload
    checkpoints/step-00000120/     model.safetensors, optimizer.safetensors, carry.safetensors (recurrent runs only),
                                   state.json (the rest, with size and sha256 of the files beside it)
    checkpoints/latest, best       relative links

A checkpoint is written aside and synced, then renamed, then ``latest`` moves: at every moment the link points at a
whole one, whatever dies. Nothing is pickled.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from apportion.address import load_workload
from apportion.deal import Deal
from apportion.errors import CheckpointError
from apportion.strategy import State
from apportion.workload import Workload

FORMAT = 1
_LOCK_SECONDS = 10.0  # a killed writer may still be syncing when the resumed run saves for the first time
_WRITING, _REMOVED, _REPLACED, _LINK = ".writing", ".removed", ".replaced-", ".link"
_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex128, torch.complex64),
}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Saved:
    """What a save wrote: the step it is of, the checkpoint's folder, how long it took, how large it is."""

    step: int
    path: Path
    seconds: float
    bytes: int


class RunDirectory:
    """The folder of one run. One process saves into it at a time; any number may read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.checkpoints = self.path / "checkpoints"

    def start(self, run: Mapping[str, Any]) -> None:
        """Make the folder and write ``run.json``: ``run`` (plain JSON: ``address``, ``strategy``, ``launcher``,
        ``fingerprint``), the versions, the time, and ``cwd``, against which a relative address is resolved.

        ValueError where it already holds a run that could be resumed; CheckpointError where it cannot be written."""
        if steps := self.steps():
            raise ValueError(
                f"{self.path} already holds a run, at step {steps[-1]}: use --resume to go on, or another --run-dir"
            )
        about = {
            "cwd": os.getcwd(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
        }
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            _write_json(self.path / ".run.json", {**about, **run})
            os.replace(self.path / ".run.json", self.path / "run.json")
            for folder in (self.path, self.path.resolve().parent):
                _sync(folder)
        except OSError as error:
            raise _unwritten(self.path, error) from error

    def resume(self, fingerprint: Mapping[str, Any]) -> State:
        """The newest state of this run. ValueError where it was started with another workload; CheckpointError where
        there is no checkpoint yet (``steps()`` is empty) or the newest cannot be trusted."""
        check_fingerprint(self.read_run().get("fingerprint", {}), fingerprint)
        if (self.checkpoints / "latest").is_dir():
            return self.restore("latest")
        # A writer died before the link was on disk. What is there was renamed into place, so it is whole or refused.
        if steps := self.steps():
            return self.restore(steps[-1])
        raise CheckpointError(f"{self.path} holds no checkpoint yet: start it again without --resume")

    def read_run(self) -> dict[str, Any]:
        """``run.json``. ValueError where there is no run."""
        path = self.path / "run.json"
        try:
            run = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ValueError(f"{self.path} holds no run (it has no run.json): give the folder of one") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): put it back, or start a new run") from error
        if not isinstance(run, dict):
            raise CheckpointError(f"{path} is no run.json of apportion: put it back, or start a new run")
        return run

    def steps(self) -> list[int]:
        """The checkpoints that are there, oldest first."""
        pattern = re.compile(rf"(?:{re.escape(_REPLACED)})?step-(\d{{8,}})")
        folders = [p.name for p in self.checkpoints.glob("*step-*") if p.is_dir()]
        return sorted({int(match[1]) for name in folders if (match := pattern.fullmatch(name))})

    def save(self, state: State, *, epoch: float, strategy: str, keep: int, best: bool = False) -> Saved:
        """Write the state, point ``latest`` (and ``best``) at it, and leave the newest ``keep`` checkpoints up to this
        step, besides what the links point at. A step that is already there, whole and equal, is kept as it is.

        CheckpointError where it cannot be written; then, as after a crash at any moment, the earlier ones are intact.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1 checkpoint")
        started, path = time.perf_counter(), self.checkpoints / _name(state.step)
        manifest: dict[str, Any] = {"format": FORMAT, "step": state.step, "epoch": epoch, "strategy": strategy}
        manifest["settings"] = _plain(state.settings, "settings")
        parts = {name: _storable(name, getattr(state, name)) for name in ("model", "optimizer", "carry")}
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._tidy()
                manifest["files"] = self._write(
                    {f"{k}.safetensors": v for k, v in parts.items() if v[0] or k != "carry"}
                )
                size = _write_json(self.checkpoints / _WRITING / "state.json", _sealed(manifest))
                self._publish(path, manifest, ("latest", "best") if best else ("latest",))
                self._prune(state.step, keep)
        except (OSError, SafetensorError) as error:
            raise _unwritten(path, error) from error
        size += sum(entry["bytes"] for entry in manifest["files"].values())
        return Saved(state.step, path, time.perf_counter() - started, size)

    def restore(self, which: str | int = "latest") -> State:
        """The state of ``"latest"``, ``"best"`` or a step, its tensors on the CPU, tied ones the same tensor.
        CheckpointError where a file of it is missing, truncated, changed or of another format."""
        return self._trusted(which, _read_state)

    def _trusted(self, which: str | int, read: Callable[[Path], _T]) -> _T:
        folder = self._locate(which)
        inode = _inode(folder)
        try:
            found = read(folder)
        except CheckpointError as error:
            if self._locate(which) == folder and _inode(folder) == inode:
                raise CheckpointError(f"{error}; {self._cure(folder)}") from error
        else:
            if _inode(folder) == inode:
                return found
        return self._trusted(which, read)  # a training that goes on saved the step again, or pruned it meanwhile

    def _locate(self, which: str | int) -> Path:
        if isinstance(which, str) and which not in ("latest", "best"):
            raise ValueError(f'which={which!r} must be "latest", "best" or a step, one of {self.steps()}')
        link = self.checkpoints / str(which)
        name = _name(which) if isinstance(which, int) else os.readlink(link) if link.is_symlink() else which
        final, replaced = self.checkpoints / name, self.checkpoints / f"{_REPLACED}{name}"
        for folder in (final, replaced, final):  # the last for a writer that put it there meanwhile
            if folder.is_dir():
                return folder
        if link.is_symlink() and os.readlink(link) != name:  # a writer moved it meanwhile
            return self._locate(which)
        there = ", ".join(map(str, self.steps()))
        raise CheckpointError(
            f"{final} is not there; " + (f"there are the steps {there}" if there else "there are none yet")
        )

    def _cure(self, bad: Path) -> str:
        for step in reversed(self.steps()):
            try:
                folder = self._locate(step)
                if folder != bad and _verify(folder):
                    return f"step {step} is intact: ask for it, or remove {bad} and --resume goes on from it"
            except CheckpointError:
                continue
        return "no other checkpoint is intact: start again with another --run-dir"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time, so that whatever lies aside is of a dead one. A killed holder lets go."""
        deadline = time.monotonic() + _LOCK_SECONDS
        with open(self.checkpoints / ".lock", "ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if not isinstance(error, BlockingIOError):
                        break  # a file system without locks: nothing to hold on to
                    if time.monotonic() > deadline:
                        raise CheckpointError(
                            f"another process has been writing in {self.checkpoints} for {_LOCK_SECONDS:.0f} s: "
                            "give each run its own --run-dir"
                        ) from None
                    time.sleep(0.01)
            try:
                yield
            finally:
                shutil.rmtree(self.checkpoints / _WRITING, ignore_errors=True)
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile holds the file open too

    def _tidy(self) -> None:
        """Clear away what dead writers left."""
        (self.checkpoints / _LINK).unlink(missing_ok=True)
        for name in (_WRITING, _REMOVED):
            shutil.rmtree(self.checkpoints / name, ignore_errors=True)
        for folder in self.checkpoints.glob(f"{_REPLACED}*"):
            whole = self.checkpoints / folder.name.removeprefix(_REPLACED)
            if whole.exists():
                shutil.rmtree(folder)
            else:
                os.rename(folder, whole)

    def _write(self, parts: dict[str, tuple[dict[str, Tensor], dict[str, str]]]) -> dict[str, dict[str, Any]]:
        folder = self.checkpoints / _WRITING
        folder.mkdir()
        files = {}
        with ThreadPoolExecutor(2) as pool:  # one file is hashed and one synced while the next is written
            for name, (tensors, notes) in parts.items():
                save_file(tensors, folder / name, notes)
                files[name] = pool.submit(_describe, folder / name), pool.submit(_sync, folder / name)
            for _, synced in files.values():
                synced.result()
            return {name: described.result() for name, (described, _) in files.items()}

    def _publish(self, path: Path, manifest: Mapping[str, Any], links: tuple[str, ...]) -> None:
        written, replaced = self.checkpoints / _WRITING, self.checkpoints / f"{_REPLACED}{path.name}"
        _sync(written)
        if not _holds(path, manifest):
            if path.exists():
                os.rename(path, replaced)  # found there by readers and by the next writer, should this one die here
            os.rename(written, path)
        for link in links:
            os.symlink(path.name, self.checkpoints / _LINK)
            os.replace(self.checkpoints / _LINK, self.checkpoints / link)
        _sync(self.checkpoints)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, step: int, keep: int) -> None:
        # Later steps belong to a history that was given up when an older checkpoint was restored.
        kept = {_name(s) for s in [s for s in self.steps() if s <= step][-keep:]}
        for link in ("latest", "best"):
            if (self.checkpoints / link).is_symlink():
                kept.add(os.readlink(self.checkpoints / link))
        for name in {_name(s) for s in self.steps()} - kept:
            os.rename(self.checkpoints / name, self.checkpoints / _REMOVED)  # never half a checkpoint under its name
            shutil.rmtree(self.checkpoints / _REMOVED)


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
    if (path / "state.json").is_file():
        if which is not None:
            raise ValueError(f"{path} is one checkpoint: give which={which!r} with the run's folder")
        run, tensors = RunDirectory(path.parent.parent), _read_model(path)
    else:
        run = RunDirectory(path)
        if not run.steps():
            run.read_run()  # it is the wrong folder, or too early
        best = (run.checkpoints / "best").is_symlink()
        tensors = run._trusted(which if which is not None else "best" if best else "latest", _read_model)
    module = _build(run, model)
    _fill(module, tensors, path)
    return module.eval()


def fingerprint(
    workload: Workload, model: nn.Module, optimizers: Mapping[str, Optimizer], examples: int
) -> dict[str, Any]:
    """What a resumed run must have in common with the one that wrote the checkpoint, as plain JSON.

    ``model`` is the plain one and ``optimizers`` what the workload's factory made for it, before any update;
    ``examples`` are in the training set. Training longer is no difference, unless a schedule spreads over the steps.
    """
    found: dict[str, Any] = {
        name: getattr(workload, name) for name in ("batch_size", "seed", "order", "precision", "clip_grad_norm")
    }
    given = ("loss", "update", "carry", "augment", "schedule")
    found |= {name: "given" if getattr(workload, name) is not None else None for name in given}
    found["examples"] = examples
    if workload.schedule is not None:
        found["total steps"] = workload.total_steps(Deal(examples, workload.batch_size).batches)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found["parameters"] = _shapes(parameters) | {"trained": sum(p.requires_grad for p in parameters.values())}
    found["buffers"] = _shapes(dict(model.named_buffers(remove_duplicate=False)))
    for name, optimizer in optimizers.items():
        groups = {f"group {i}": _hyperparameters(group) for i, group in enumerate(optimizer.param_groups)}
        found[f"optimizer {name}".rstrip()] = {"class": type(optimizer).__qualname__, **groups}
    return found


def check_fingerprint(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ValueError naming each field in which two fingerprints differ, with both values and the cure."""
    then, today = dict(_leaves(saved)), dict(_leaves(now))
    differ = [
        f"{name} was {then.get(name, 'absent')} and is {today.get(name, 'absent')}"
        for name in dict.fromkeys((*then, *today))
        if then.get(name, "absent") != today.get(name, "absent")
    ]
    if differ:
        raise ValueError(
            f"the run was started with another workload: {'; '.join(differ)}. Change it back to go on with --resume, "
            "or start a new run in another --run-dir"
        )


def _leaves(tree: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{place}{name}, ")
        else:
            yield f"{place}{name}", json.dumps(value)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    listed = json.dumps([[name, list(t.shape), str(t.dtype)] for name, t in tensors.items()])
    digest = hashlib.sha256(listed.encode()).hexdigest()[:16]
    return {
        "tensors": len(tensors),
        "elements": sum(t.numel() for t in tensors.values()),
        "names, shapes and dtypes": digest,
    }


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of an optimizer's group; not how it is computed (``fused``), and not what a schedule makes of the rate."""
    how = ("params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable")
    found = {name: _scalar(value) for name, value in group.items() if name not in how}
    if "initial_lr" in group:
        found["lr"] = _scalar(group["initial_lr"])
    return {"parameters": len(group["params"]), **found}


def _scalar(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_scalar(v) for v in value]
    return value if value is None or isinstance(value, str | int | float) else type(value).__qualname__


def _build(run: RunDirectory, make: Callable[[], nn.Module] | None) -> nn.Module:
    about = run.read_run() if (run.path / "run.json").is_file() else {}
    seed = about.get("fingerprint", {}).get("seed", 0)
    if make is None:
        if not about.get("address"):
            raise ValueError(
                f"{run.path} names no workload as FILE:NAME (it was started from Python): give load(..., model=...)"
            )
        make, seed = _workload_model(about["address"], about.get("cwd", "."))
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


def _workload_model(address: str, cwd: str) -> tuple[Callable[[], nn.Module], int]:
    place, _, name = address.rpartition(":")
    if place.endswith(".py") or os.sep in place:
        address = f"{Path(cwd) / place}:{name}"
    elif cwd not in sys.path:
        sys.path.append(cwd)
    try:
        workload = load_workload(address)
    except ValueError as error:
        raise ValueError(f"{error}; put it back, or give load(..., model=...)") from error
    return workload.model, workload.seed


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    if {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.float64}:
        module.to(torch.float64)  # as precision="float64" trained it, with what is not saved
    own = module.state_dict()
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
    module.load_state_dict(tensors)


def _storable(part: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors as safetensors takes them (on the CPU, contiguous, no memory in common), and notes to undo it: the
    order, which name is tied to which, which are complex. In one note: several are written in no fixed order, and
    equal states must give equal files."""
    stored: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _DTYPES:
            kind = f"a {tensor.dtype} {tensor.layout} tensor on {tensor.device}"
            raise ValueError(
                f"{part}/{name} is {kind}, which a checkpoint cannot hold: keep it dense, in an ordinary dtype"
            )
        if tensor.numel() and (tied := first.setdefault(_identity(tensor), name)) != name:
            ties[name] = tied
            continue
        stored[name] = _dense(tensor)
        if stored[name].untyped_storage().data_ptr() in storages:
            stored[name] = stored[name].clone()
        storages.add(stored[name].untyped_storage().data_ptr())
    notes = {"order": list(tensors), "ties": ties, "complex": [n for n in stored if tensors[n].is_complex()]}
    return stored, {"apportion": json.dumps(notes)}


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    where = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*where, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _dense(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            notes = json.loads(file.metadata()["apportion"])
            # Copied out of the mapped file, which someone may change while the state lives.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch could not map it
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    tensors |= {name: torch.view_as_complex(tensors[name]) for name in notes["complex"]}
    tensors |= {name: tensors[tied] for name, tied in notes["ties"].items()}
    return {name: tensors[name] for name in notes["order"]}


def _read_state(folder: Path) -> State:
    manifest = _verify(folder)
    parts = {Path(name).stem: _read_tensors(folder / name) for name in manifest["files"]}
    return State(step=manifest["step"], settings=manifest["settings"], **parts)


def _read_model(folder: Path) -> dict[str, Tensor]:
    _verify(folder, "model.safetensors")
    return _read_tensors(folder / "model.safetensors")


def _verify(folder: Path, *names: str) -> dict[str, Any]:
    """``state.json``, after its own checks and those of the files (None named: all). CheckpointError otherwise."""
    manifest = _read_manifest(folder / "state.json")
    for name in names or manifest["files"]:
        path, entry = folder / name, manifest["files"][name]
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise CheckpointError(f"{path} was {entry['bytes']} bytes when it was written and is {size} now")
            if _describe(path) != entry:
                raise CheckpointError(f"{path} is not as it was written: its sha256 differs from the one in state.json")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is truncated or changed: {error}") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CheckpointError(f"{path} was not written by apportion: it names no format")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']!r} and this apportion reads {FORMAT}: "
            "use the version that run.json names"
        )
    if _sealed({k: v for k, v in manifest.items() if k != "sha256"}) != manifest:
        raise CheckpointError(f"{path} is not as it was written: its sha256 differs from the one in it")
    return manifest


def _holds(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Is this very checkpoint already there, and whole?"""
    try:
        return folder.exists() and _verify(folder) == _sealed(manifest)
    except CheckpointError:
        return False


def _sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(manifest, sort_keys=True)
    return {**manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _sync(path: Path) -> None:
    """To the disk, contents of a file or names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, content: Mapping[str, Any]) -> int:
    """Written and synced; how many bytes."""
    text = json.dumps(content, indent=1).encode()
    with open(path, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return len(text)


def _plain(value: Any, place: str) -> Any:
    """As JSON gives it back (tuples as lists), or a ValueError that names what it cannot hold."""
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _plain(v, f"{place}/{name}") for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{place}/{i}") for i, v in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"{place}={value!r} must be plain JSON (numbers, text, lists, and dicts by text) to be saved")


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _versions() -> dict[str, str]:
    return {"apportion": metadata.version("apportion"), "torch": torch.__version__, "python": platform.python_version()}


def _unwritten(path: Path, error: Exception) -> CheckpointError:
    cures = {
        errno.ENOSPC: "free some of the disk, or use a --run-dir on another one",
        errno.EDQUOT: "free some of your quota, or use a --run-dir on another disk",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
        errno.EACCES: "make the folder writable, or use another --run-dir",
        errno.EROFS: "use a --run-dir on a disk that is writable",
    }
    told = re.search(r"os error (\d+)", str(error))  # safetensors tells the number in its text only
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    cause = os.strerror(number) if number else str(error)
    cure = cures.get(number or 0, "check the disk, or use another --run-dir")
    return CheckpointError(f"{path} could not be written: {cause}; what was there before is intact; {cure}")
