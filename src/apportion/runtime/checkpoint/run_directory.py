"""Checkpoints: atomic save and restore of the full state, independent of the world's size.

A run directory::

    run.json                       the address, strategy, launcher, versions, fingerprint of the workload; who may write
    checkpoints/step-00000120/     model.safetensors, optimizer.safetensors, carry.safetensors (recurrent runs only),
                                   buffers.safetensors (buffers beside the model's state, where training changes them),
                                   python.safetensors (tensors that are attributes, where training changes them),
                                   state.json (the rest, with size and sha256 of the files beside it)
    checkpoints/latest, best       relative links

A checkpoint is written aside and synced, then renamed, then ``latest`` moves: at every moment the link points at a
whole one, whatever dies. Nothing is pickled.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from apportion.core.average import SLOT, averages_in
from apportion.core.fingerprint import check_fingerprint
from apportion.core.strategy import PARTS, State
from apportion.errors import CheckpointError
from apportion.runtime.checkpoint.code_ownership import source_of
from apportion.runtime.checkpoint.durable_files import open_own, sync, unwritten, write_json
from apportion.runtime.checkpoint.tensor_file import read_tensors, storable
from apportion.runtime.checkpoint.terms import RunWriter, claimed, publish, refuse_superseded, term_entry, writer_of
from apportion.runtime.checkpoint.validation import (
    REPLACED,
    check_manifest,
    check_run,
    read_json,
    refuse_started,
    saved_steps,
)

FORMAT = 1
_LOCK_SECONDS = 10.0  # a killed writer may still be syncing when the resumed run saves for the first time
_AVERAGE = "average.safetensors"
_WRITING, _REMOVED, _LINK = ".writing", ".removed", ".link"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Saved:
    """The result of a save: the step it is of, the checkpoint's folder, how long it took in seconds, how large it is in
    bytes."""

    step: int
    path: Path
    seconds: float
    bytes: int


class RunDirectory:
    """The folder of one run. One process saves into it at a time; any number may read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.checkpoints = self.path / "checkpoints"
        self._writer: RunWriter | None = None
        self._newest = -1
        """The newest step that this object has saved."""
        self.cuts: Mapping[str, Any] | None = None
        """The layers before which the network is cut into stages, with the number of workers; None where it is not.
        Every checkpoint records it."""

    def claim(self, start: str, generation: int) -> None:
        """Writes from now on as rank 0 in a generation of a start of the run (``start``: a name that no other has), and
        keeps out who has begun before. Raises Superseded where another start has begun since."""
        try:
            with self._locked():
                run = self.read_run()
                self._writer = claimed(writer_of(run), start, generation)
                publish(self.path, {**run, **term_entry(self._writer)}, write_json)
        except OSError as error:
            raise unwritten(self.path, error) from error

    def start(self, run: Mapping[str, Any]) -> None:
        """Make the folder and write ``run.json``: ``run`` (plain JSON: ``address``, ``strategy``, ``launcher``,
        ``fingerprint``), the versions, the time, ``cwd``, against which a relative address is resolved, and ``source``,
        the file behind the address with its digest.

        ValueError where it already holds a run that could be resumed; CheckpointError where it cannot be written."""
        refuse_started(self.path)
        about = {
            "cwd": os.getcwd(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            **run,
        }
        about["source"] = source_of(about.get("address"), about["cwd"])
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            publish(self.path, about, write_json)
            # The names of the files and of the folder itself are data of the folders around them, and have to be synced
            # as well.
            for folder in (self.path, self.path.resolve().parent):
                sync(folder)
        except OSError as error:
            raise unwritten(self.path, error) from error

    def resume(self, fingerprint: Mapping[str, Any]) -> State:
        """Returns the newest state of this run. Raises ValueError where it was started with another workload;
        CheckpointError where no checkpoint exists yet (``steps()`` is empty) or the newest cannot be trusted."""
        check_fingerprint(self.read_run().get("fingerprint", {}), fingerprint)
        if (self.checkpoints / "latest").is_dir():
            return self.restore("latest")
        # A writer died before the link was on disk. What is there was renamed into place, so it is whole or refused.
        if steps := self.steps():
            return self.restore(steps[-1])
        raise CheckpointError(f"{self.path} holds no checkpoint yet: start it again without resume=True")

    def read_run(self) -> dict[str, Any]:
        """Returns what ``run.json`` holds. Raises ValueError where no run exists, CheckpointError where it cannot be
        read."""
        path = self.path / "run.json"
        try:
            run = read_json(path)
        except FileNotFoundError:
            raise ValueError(f"{self.path} holds no run (it has no run.json): give the folder of one") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): put it back, or start a new run") from error
        return check_run(path, run)

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints that are there, oldest first."""
        return saved_steps(self.path)

    def recorded_cuts(self, strategy: str, workers: int) -> tuple[str, ...]:
        """Returns the layers before which the run has cut the network as of its newest checkpoint, or as ``run.json``
        has it where there is none yet; none where it was another strategy's, or another number of workers'."""
        try:
            found: Mapping[str, Any] = self.read_run()
            if (self.checkpoints / "latest").is_dir() or self.steps():
                latest = (self.checkpoints / "latest").is_dir()
                found = _read_manifest(self._locate("latest" if latest else self.steps()[-1]) / "state.json")
            cuts = found.get("cuts") or {}
            return tuple(cuts["before"]) if (found["strategy"], cuts["workers"]) == (strategy, workers) else ()
        except (CheckpointError, OSError, ValueError, KeyError, TypeError):
            return ()  # loading the checkpoint raises what is wrong with it

    def save(self, state: State, *, epoch: float, strategy: str, keep: int, best: bool = False) -> Saved:
        """Write the state, point ``latest`` (and ``best``) at it, and leave the newest ``keep`` checkpoints up to this
        step, besides what the links point at. A step that is already there, whole and equal, is kept as it is. The best
        may be known late, after a newer one was saved by this object: ``latest`` stays there then.

        CheckpointError where it cannot be written; then, as after a crash at any moment, the earlier ones are intact.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1 checkpoint")
        started, path = time.perf_counter(), self.checkpoints / _name(state.step)
        manifest: dict[str, Any] = {"format": FORMAT, "step": state.step, "epoch": epoch, "strategy": strategy}
        manifest["settings"] = _plain(state.settings, "settings")
        if (mark := self._mark()) is not None:
            manifest["run"] = mark
        if self.cuts is not None:
            manifest["cuts"] = dict(self.cuts)
        averages = averages_in(state.optimizer)
        slots = {name: slot for name, slot in state.optimizer.items() if name.removesuffix(f"/{SLOT}") not in averages}
        written = {name: getattr(state, name) for name in PARTS} | {"optimizer": slots, "average": averages}
        parts = {name: storable(name, tensors) for name, tensors in written.items()}
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if self._writer is not None:
                    # The check is made under the lock, which a newer writer takes to claim the directory: none can
                    # claim it between this line and the last rename.
                    refuse_superseded(self.path, self._writer)
                self._tidy()
                manifest["files"] = self._write(
                    {f"{k}.safetensors": v for k, v in parts.items() if v[0] or k in ("model", "optimizer")}
                )
                size = write_json(self.checkpoints / _WRITING / "state.json", _sealed(manifest))
                # The evaluation of an older step may end after a newer step was saved.
                late = best and state.step < self._newest
                links = ("best",) if late else ("latest", "best") if best else ("latest",)
                self._publish(path, manifest, links)
                self._newest = self._newest if late else state.step
                self._prune(self._newest, keep)
        except (OSError, SafetensorError) as error:
            raise unwritten(path, error) from error
        size += sum(entry["bytes"] for entry in manifest["files"].values())
        return Saved(state.step, path, time.perf_counter() - started, size)

    def restore(self, which: str | int = "latest") -> State:
        """Returns the state of ``"latest"``, ``"best"`` or a step, its tensors on the CPU, tied ones the same tensor.
        Raises CheckpointError where a file of it is missing, truncated, changed or of another format."""
        return self.trusted(which, _read_state)

    def best(self) -> float | None:
        """Returns what the metric was at the checkpoint that ``best`` points at; None where there is none yet."""
        try:
            found = read_json(self._locate("best") / "state.json")["settings"]["best"]
            return float(found) if found is not None else None
        except (CheckpointError, OSError, ValueError, KeyError, TypeError, IndexError, OverflowError):
            return None

    def trusted(self, which: str | int, read: Callable[[Path], _T]) -> _T:
        """Returns what ``read`` makes of a checkpoint's folder, read again where a writer has just replaced it."""
        folder = self._locate(which)
        # A folder that was replaced under the same name has another inode: what was read of the two does not belong
        # together, and an error may come of that alone.
        inode = _inode(folder)
        try:
            found = read(folder)
            self._check_origin(folder)
        except CheckpointError as error:
            if self._locate(which) == folder and _inode(folder) == inode:
                raise CheckpointError(f"{error}; {self._cure(folder)}") from error
        else:
            if _inode(folder) == inode:
                return found
        return self.trusted(which, read)  # a training that goes on saved the step again, or pruned it meanwhile

    def _mark(self) -> str | None:
        """Returns what tells this run's checkpoints from another's: a digest of its fingerprint. None where there is
        none."""
        try:
            mark = read_json(self.path / "run.json")["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return hashlib.sha256(json.dumps(mark, sort_keys=True).encode()).hexdigest()

    def _check_origin(self, folder: Path) -> None:
        mark, found = self._mark(), _read_manifest(folder / "state.json").get("run")
        if mark is not None and found is not None and found != mark:
            raise CheckpointError(f"{folder} is of another run, with another workload or seed than run.json says")

    def _locate(self, which: str | int) -> Path:
        if isinstance(which, str) and which not in ("latest", "best"):
            raise ValueError(f'which={which!r} must be "latest", "best" or a step, one of {self.steps()}')
        link = self.checkpoints / str(which)
        name = _name(which) if isinstance(which, int) else os.readlink(link) if link.is_symlink() else which
        if link.is_symlink() and re.fullmatch(r"step-\d{8,}", name) is None:
            raise CheckpointError(f"{link} points at {name}, which is not a checkpoint of this run: remove the link")
        final, replaced = self.checkpoints / name, self.checkpoints / f"{REPLACED}{name}"
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
                    return f"step {step} is intact: ask for it, or remove {bad} and resume=True goes on from it"
            except CheckpointError:
                continue
        return "no other checkpoint is intact: start again with another run_dir="

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets one writer in at a time, so that whatever lies aside is of a dead one. A killed holder lets go."""
        deadline = time.monotonic() + _LOCK_SECONDS
        with open(open_own(self.checkpoints / ".lock", os.O_WRONLY | os.O_CREAT), "ab") as file:
            while True:
                try:
                    # The kernel releases the lock with its last descriptor, so a killed writer never leaves it behind.
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if not isinstance(error, BlockingIOError):
                        break  # a file system without locks: nothing to hold on to
                    if time.monotonic() > deadline:
                        raise CheckpointError(
                            f"another process has been writing in {self.checkpoints} for {_LOCK_SECONDS:.0f} s: "
                            "give each run its own run_dir="
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
        for folder in self.checkpoints.glob(f"{REPLACED}*"):
            # A writer died between its two renames: where the new checkpoint is not in place, the old one goes back.
            whole = self.checkpoints / folder.name.removeprefix(REPLACED)
            if whole.exists():
                shutil.rmtree(folder)
            else:
                os.rename(folder, whole)

    def _write(self, parts: dict[str, tuple[dict[str, Tensor], dict[str, str]]]) -> dict[str, dict[str, Any]]:
        folder = self.checkpoints / _WRITING
        # It fails where the folder exists: _tidy has removed what dead writers left, and the lock keeps out living
        # ones.
        folder.mkdir()
        files = {}
        with ThreadPoolExecutor(2) as pool:  # one file is hashed and one synced while the next is written
            for name, (tensors, notes) in parts.items():
                save_file(tensors, folder / name, notes)
                files[name] = pool.submit(_describe, folder / name), pool.submit(sync, folder / name)
            for _, synced in files.values():
                synced.result()
            return {name: described.result() for name, (described, _) in files.items()}

    def _publish(self, path: Path, manifest: Mapping[str, Any], links: tuple[str, ...]) -> None:
        written, replaced = self.checkpoints / _WRITING, self.checkpoints / f"{REPLACED}{path.name}"
        # The order matters: first the files (in _write), then their names, then the rename, then the links, then the
        # names in the folder around. A link is made only when the checkpoint that it leads to is in place.
        sync(written)
        if not _holds(path, manifest):
            if path.exists():
                # Readers and the next writer find it under this name, should this process die before the next line.
                os.rename(path, replaced)
            os.rename(written, path)
        for link in links:
            # A symbolic link cannot be changed in place: a new one is renamed over it, so that readers always find one
            # of the two.
            os.symlink(path.name, self.checkpoints / _LINK)
            os.replace(self.checkpoints / _LINK, self.checkpoints / link)
        sync(self.checkpoints)
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


def _read_state(folder: Path) -> State:
    manifest = _verify(folder)
    parts = {Path(name).stem: read_tensors(folder / name) for name in manifest["files"]}
    averages = parts.pop("average", {})
    parts["optimizer"] = parts.get("optimizer", {}) | {f"{name}/{SLOT}": t for name, t in averages.items()}
    return State(step=manifest["step"], settings=manifest["settings"], **parts)


def read_model(folder: Path) -> dict[str, Tensor]:
    """Returns the model's tensors alone, verified; among them the buffers that its ``state_dict()`` leaves out."""
    names = model_files(folder)
    _verify(folder, *names)
    return {name: tensor for file in names for name, tensor in read_tensors(folder / file).items()}


def read_average(folder: Path) -> dict[str, Tensor]:
    """Returns the averages of the weights by the name of the parameter, verified; none where none are kept."""
    if _AVERAGE not in _read_manifest(folder / "state.json")["files"]:
        return {}
    _verify(folder, _AVERAGE)
    return read_tensors(folder / _AVERAGE)


def read_python(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns what training kept in Python: its record, and the tensors that belong to it."""
    manifest = _read_manifest(folder / "state.json")
    tensors: dict[str, Tensor] = {}
    for name in python_files(folder):
        _verify(folder, name)
        tensors |= read_tensors(folder / name)
    return manifest["settings"].get("python", {}), tensors


def python_files(folder: Path) -> list[str]:
    """Returns those files of a checkpoint that have tensors of what training kept in Python."""
    return [name for name in _read_manifest(folder / "state.json")["files"] if name == "python.safetensors"]


def average_files(folder: Path) -> list[str]:
    """Returns those files of a checkpoint that have the averages of the weights."""
    return [name for name in _read_manifest(folder / "state.json")["files"] if name == _AVERAGE]


def model_files(folder: Path) -> list[str]:
    """Returns those files of a checkpoint that have the model's tensors."""
    others = ("optimizer.safetensors", "carry.safetensors", "python.safetensors", _AVERAGE)
    return [name for name in _read_manifest(folder / "state.json")["files"] if name not in others]


def _verify(folder: Path, *names: str) -> dict[str, Any]:
    """Returns ``state.json``, after its own checks and those of the files (where none is named: of all). Raises
    CheckpointError otherwise."""
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
        manifest = read_json(path)
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
    check_manifest(path, manifest)
    named = re.fullmatch(r"step-(\d{8,})", path.resolve().parent.name)
    if named is not None and int(named[1]) != manifest["step"]:
        raise CheckpointError(f"{path} is of step {manifest['step']}: it belongs to another checkpoint than {named[0]}")
    return manifest


def _holds(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Tells whether this very checkpoint is already there, and whole."""
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


def _plain(value: Any, place: str) -> Any:
    """Returns a value as JSON gives it back (tuples as lists). Raises a ValueError that names what JSON cannot hold."""
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
