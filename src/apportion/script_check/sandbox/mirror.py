"""A copy of the script's folder in a tree that stands for the whole file system, where there are no namespaces.

Below ``root`` the tree has the user's paths. Of the script's folder it holds copies of the small files and links to the
large ones; of each folder above it, of the current folder and of the home directory it holds links to what is in them.
A link is replaced by a copy, or by a folder of links, when a script is about to change what it leads to (``writable``):
so reading costs nothing, and a write never follows a link out of the tree.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from apportion.errors import ApportionError
from apportion.script_check.sandbox import linux
from apportion.script_check.sandbox.scope import FileScope, argument_path, within

LARGEST_COPIED = 1 << 20
"""The bytes of a file from which on it is linked."""
MOST_FILES, MOST_BYTES = 20_000, 1 << 28
"""The most that is copied of a script's folder."""
_LINKED_WHOLE = frozenset((".git", ".hg", ".svn", "node_modules", "site-packages", "wandb", "mlruns", ".tox"))
_MOST_SIBLINGS = 10_000
_PLAIN = ("/proc", "/sys", "/dev")


@dataclass(frozen=True)
class Mirror:
    """The tree at ``root``. ``folder``: the script's. ``temporary``: the private folder for temporary files.
    ``writable``: where else may be written. All are absolute paths without links, of the user's file system."""

    root: str
    folder: str
    temporary: str
    home: str
    writable: tuple[str, ...]

    @classmethod
    def build(cls, root: Path, scope: FileScope, writable: Path) -> Mirror:
        """Make the tree. Raises ApportionError where the script's folder is too large to be copied."""
        folder = scope.folder
        mirror = cls(str(root), folder, str(writable / "temporary"), scope.home, (str(writable),))
        if folder == "/":
            raise ApportionError("no copy can be made of /, the folder of the script: move it to one of its own")
        root.mkdir()
        Path(mirror.temporary).mkdir(exist_ok=True)
        _Copy(mirror).copy()
        for path in (scope.current, scope.home, os.path.dirname(folder)):
            mirror._link_folders_to(path)
        mirror.description.write_text(json.dumps(asdict(mirror)))
        return mirror

    @classmethod
    def load(cls, path: str) -> Mirror:
        """Returns the tree that a file describes."""
        fields = json.loads(Path(path).read_text())
        return cls(**{**fields, "writable": tuple(fields["writable"])})

    @property
    def description(self) -> Path:
        """The file that ``load`` reads."""
        return Path(self.root + ".json")

    def path(self, path: str) -> str:
        """Returns the place in the tree of an absolute path; files of the system have none."""
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        return path if within(real, (*_PLAIN, *self.writable)) else self.root + real.rstrip("/")

    def argument(self, argument: str) -> str:
        """Returns an argument of a script with the path in it, if it is absolute, as one of the tree."""
        name, path = argument_path(argument)
        return name + self.path(path) if path else argument

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that name folders in which libraries write, as paths of the tree."""
        folders = {
            name: self.path(value)
            for name, value in environment.items()
            if name.endswith(("_HOME", "_CACHE", "_DIR")) and os.path.isabs(value)
        }
        optional = {"GIT_OPTIONAL_LOCKS": "0"}  # git status would write to the user's repository
        return {**folders, **optional, "HOME": self.root + self.home, "TMPDIR": self.temporary}

    def _link_folders_to(self, path: str) -> None:
        """Makes the folders on the way to a path, and the path, folders of links."""
        at = ""
        for part in ("", *Path(path).parts[1:]):
            at = f"{at}/{part}" if part else ""
            place = self.root + at
            if os.path.islink(place):
                os.unlink(place)
            if part and not os.path.isdir(place):
                os.mkdir(place)
            link_entries(at or "/", place)

    def contains(self, path: str) -> bool:
        """Whether a path of this file system, without links, is in the tree or may be written all the same."""
        return within(path, (self.root, *self.writable))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the other processes of the script from replacing links."""
        with open(self.root + ".lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def prepare(self, path: str, *, content: bool, follow: bool) -> str:
        """Have a path be one that can be changed without changing the user's files, if it is in the tree, and return
        what it leads to, without links. ``content``: a file is to keep what it holds. ``follow``: a link at the path
        itself is followed, as by opening it."""
        folder = self.prepare_folder(os.path.dirname(os.path.abspath(path)))
        name = os.path.basename(os.path.abspath(path))
        place = os.path.join(folder, name)
        if not follow or not os.path.islink(place):
            return place
        real = os.path.realpath(place)
        if not within(place, [self.root]) or self.contains(real):
            return real
        # Looked at again under the lock, as another rank may have replaced the link meanwhile.
        with self.locked():
            if os.path.islink(place):
                _replace_link(place, real, content)
        return place

    def prepare_folder(self, folder: str) -> str:
        """Replaces the links to folders on the way; returns the folder without links."""
        if not within(folder, [self.root]):
            folder = os.path.realpath(folder)
        if not within(folder, [self.root]):
            return folder
        at = self.root
        for part in folder[len(self.root) :].split("/"):
            at = os.path.join(at, part) if part else at
            if not os.path.islink(at):
                continue
            real = os.path.realpath(at)
            if self.contains(real) or not os.path.isdir(real):
                at = real
                continue
            with self.locked():
                if os.path.islink(at):
                    _replace_link_by_folder(at, real)
        return at


def link_entries(folder: str, place: str) -> None:
    """Link what is in a folder from another one, unless there is something by its name."""
    try:
        names = os.listdir(folder)
    except OSError:  # not to be read by this user
        return
    for name in names[:_MOST_SIBLINGS]:
        try:
            os.symlink(os.path.join(folder, name), os.path.join(place, name))
        except FileExistsError:
            continue


def _replace_link(place: str, real: str, content: bool) -> None:
    new = f"{place}.{os.getpid()}.apportion"
    if content and os.path.isfile(real):
        shutil.copyfile(real, new)
        shutil.copymode(real, new)
    elif os.path.exists(real):
        with open(new, "wb"):
            pass
    else:
        os.unlink(place)
        return
    # In one step: another rank opens either the link or the copy, never half of it.
    os.replace(new, place)


def _replace_link_by_folder(place: str, real: str) -> None:
    new = f"{place}.{os.getpid()}.apportion"
    os.mkdir(new)
    link_entries(real, new)
    try:
        linux.exchange(new, place)
        os.unlink(new)
    except OSError:  # an old kernel: for a moment there is neither
        os.unlink(place)
        os.rename(new, place)


class _Copy:
    """The copy of a script's folder in a tree."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror, self._files, self._bytes = mirror, 0, 0

    def copy(self) -> None:
        """Copy the folder."""
        self._folder(self._mirror.folder, self._mirror.root + self._mirror.folder)

    def _folder(self, folder: str, place: str) -> None:
        os.makedirs(place, exist_ok=True)
        with os.scandir(folder) as entries:
            for entry in entries:
                self._entry(entry, os.path.join(place, entry.name))

    def _entry(self, entry: os.DirEntry[str], place: str) -> None:
        if entry.is_symlink():
            inside = within(os.path.realpath(entry.path), [self._mirror.folder])
            target = os.readlink(entry.path) if inside else os.path.realpath(entry.path)
            os.symlink(self._mirror.path(target) if os.path.isabs(target) and inside else target, place)
        elif entry.is_dir():
            if within(self._mirror.writable[0], [entry.path]):  # the records, in a folder beside the script
                return
            if entry.name in _LINKED_WHOLE or os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                os.symlink(entry.path, place)
            else:
                self._folder(entry.path, place)
        elif entry.is_file():
            self._file(entry, place)

    def _file(self, entry: os.DirEntry[str], place: str) -> None:
        size = entry.stat().st_size
        if size > LARGEST_COPIED or not os.access(entry.path, os.R_OK):
            os.symlink(entry.path, place)
            return
        self._files, self._bytes = self._files + 1, self._bytes + size
        if self._files > MOST_FILES or self._bytes > MOST_BYTES:
            raise ApportionError(
                f"the folder {self._mirror.folder} of the script has to be copied, as the kernel allows no namespaces "
                f"here, and holds more than {MOST_FILES} files or, in those below 1 MiB, more than {MOST_BYTES >> 20} "
                "MiB: move data out of it"
            )
        shutil.copy2(entry.path, place)
