"""The run directory of a run on other hosts, copied to where the driver is: file by file, over the agent's connection.

The driver asks for each piece, so that neither end holds more than one. It takes no name that leads out of the folder,
and no link but to a neighbour.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, final

from apportion.errors import CheckpointError
from apportion.runtime.checkpoint.validation import mark_of
from apportion.runtime.hosts.frames import FrameError, FrameReader, FrameWriter, Message

PIECE_BYTES = 1 << 20
LOCK = ".training"


def send_run(
    run_dir: Path,
    known: list[int] | None,
    writer: FrameWriter,
    reader: FrameReader,
    *,
    only: Collection[str] | None = None,
) -> None:
    """Sends a run directory, unless the driver has it: ``known`` is the mark of its own. ``only``: the names of the
    files to be sent; None: all of them."""
    mark = mark_of(run_dir)
    if mark is None or mark == known:
        writer.send({"kind": "fetched", "copied": False, "there": mark is not None, "path": str(run_dir)})
        return
    for message in _contents(run_dir) if only is None else _files(run_dir, only):
        writer.send(message)
        while (answer := reader.receive()) == {"kind": "alive"}:
            pass
        if answer != {"kind": "more"}:
            raise FrameError("the driver no longer wants the run directory")
    writer.send({"kind": "fetched", "copied": True, "there": True, "path": str(run_dir)})


def _contents(run_dir: Path) -> Iterator[Mapping[str, Any] | bytes]:
    for place, folders, files in os.walk(run_dir):
        below = Path(place).relative_to(run_dir)
        for name in sorted([*folders, *files]):
            path, sent = Path(place, name), (below / name).as_posix()
            if path.is_symlink():
                yield {"kind": "link", "path": sent, "target": os.readlink(path)}
            elif path.is_dir():
                yield {"kind": "folder", "path": sent}
            elif path.is_file() and name != LOCK:
                yield from _file(path, sent)


def _files(run_dir: Path, names: Collection[str]) -> Iterator[Mapping[str, Any] | bytes]:
    for name in names:
        if (run_dir / name).is_file():
            yield from _file(run_dir / name, name)


def _file(path: Path, name: str) -> Iterator[Mapping[str, Any] | bytes]:
    yield {"kind": "file", "path": name}
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


@final
class RunCopy:
    """The driver's copy of a run directory, beside its place until it is whole."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._aside = run_dir.with_name(f".{run_dir.name}.copy-{os.getpid()}")
        self._file: Path | None = None

    def write(self, message: Message | bytes) -> None:
        """Writes what an agent has sent. Raises FrameError where it must not be written, CheckpointError where it
        cannot."""
        self._raising_copy_error(lambda: self._write_message(message))

    def finish(self) -> None:
        """Puts the copy in its place, where its files take that of their like and all others stay. Raises
        CheckpointError where that cannot be done."""
        self._raising_copy_error(lambda: _merge(self._aside, self._run_dir))

    def drop(self) -> None:
        """Removes what is not whole."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def _raising_copy_error(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that this host cannot write
            why = error.strerror if isinstance(error, OSError) else ascii(str(error))
            raise CheckpointError(f"the run directory cannot be copied to {self._run_dir}: {why}") from error

    def _write_message(self, message: Message | bytes) -> None:
        self._aside.mkdir(parents=True, exist_ok=True)
        if isinstance(message, bytes):
            if self._file is None:
                raise FrameError("bytes came before the name of their file")
            with open(self._file, "ab") as file:
                file.write(message)
            return
        path = self._aside / path_inside(message["path"])
        if message["kind"] == "folder":
            path.mkdir()
        elif message["kind"] == "link":
            path.symlink_to(neighbour_target(message["target"]))
        else:
            path.touch()
            self._file = path


def _merge(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir(), key=Path.is_symlink):  # a link comes after what it leads to
        if path.is_dir() and not path.is_symlink():
            _merge(path, target / path.name)
        else:
            path.replace(target / path.name)


def path_inside(path: str) -> PurePosixPath:
    """Returns a path that leads nowhere but below a folder. Raises FrameError for another."""
    found = PurePosixPath(path)
    if found.is_absolute() or ".." in found.parts or not found.parts or "\0" in path:
        raise FrameError(f"{path!r} is not a path below a run directory")
    return found


def neighbour_target(target: str) -> str:
    """Returns the target of a link that is in the same folder. Raises FrameError for another."""
    if "/" in target or target in ("", ".", "..") or "\0" in target:
        raise FrameError(f"a link to {target!r} would lead out of its folder")
    return target
