"""Arranges the mounts of a namespace so that what is written to the user's folders goes to a layer that is discarded.

The folders of a scope become overlays, whose upper layer is a tmpfs that ends with the namespace; everything else is
read-only, but the folder of the records. All of them are prepared while the tree is still as it was, and then moved to
their places, parents first: so each one's lower layer is the user's real folder, also where another one covers it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from apportion.script_check.sandbox import linux
from apportion.script_check.sandbox.scope import FileScope, within

_VIRTUAL = frozenset((
    "proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "autofs", "securityfs", "debugfs", "tracefs", "bpf",
    "mqueue", "hugetlbfs", "pstore", "configfs", "fusectl", "binfmt_misc", "nsfs", "fuse.portal", "fuse.gvfsd-fuse",
))  # fmt: skip
"""File systems that hold no files of a user's."""
_FLAGS = {
    "ro": linux.MS_RDONLY, "nosuid": linux.MS_NOSUID, "nodev": linux.MS_NODEV, "noexec": linux.MS_NOEXEC,
    "nosymfollow": linux.MS_NOSYMFOLLOW, "noatime": linux.MS_NOATIME, "nodiratime": linux.MS_NODIRATIME,
    "relatime": linux.MS_RELATIME,
}  # fmt: skip


@dataclass(frozen=True)
class Mount:
    """A mount: its path, the kind of its file system, and its flags as mount(2) takes them."""

    path: str
    kind: str
    flags: int

    @property
    def virtual(self) -> bool:
        """Whether it holds no files of a user's."""
        return self.kind in _VIRTUAL

    def change_flags(self, path: str, *, add: int = 0, remove: int = 0) -> None:
        """Change the flags of this mount, or of a bind mount of a part of it, at ``path``. All others are repeated, as
        a process in a user namespace may not take any of them away."""
        linux.mount("", path, flags=linux.MS_BIND | linux.MS_REMOUNT | (self.flags | add) & ~remove)


class MountTable:
    """The mounts that can be seen: of several at one path the last."""

    def __init__(self, mounts: Mapping[str, Mount]) -> None:
        self._mounts = mounts

    @classmethod
    def read(cls) -> MountTable:
        """Returns the mounts of this process's namespace."""
        with open("/proc/self/mountinfo") as file:
            mounts = [_mount(line) for line in file]
        return cls({mount.path: mount for mount in mounts})

    def containing(self, path: str) -> Mount:
        """Returns the mount that an absolute path without links is on."""
        return max((mount for mount in self._mounts.values() if within(path, [mount.path])), key=lambda m: len(m.path))

    def below(self, path: str) -> list[Mount]:
        """Returns the mounts in a folder that hold files of a user's, outer ones first."""
        found = [m for m in self._mounts.values() if m.path != path and within(m.path, [path]) and not m.virtual]
        return sorted(found, key=lambda mount: len(mount.path))

    def set_read_only(self) -> None:
        """Make every mount read-only for which the kernel allows it; it does not for one that cannot be reached."""
        for mount in self._mounts.values():
            try:
                mount.change_flags(mount.path, add=linux.MS_RDONLY)
            except OSError:
                continue


def _mount(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields = before.split()
    words = fields[5].split(",")
    flags = sum(_FLAGS.get(word, 0) for word in words)
    if not flags & (linux.MS_NOATIME | linux.MS_RELATIME):
        flags |= linux.MS_STRICTATIME  # what a mount has without either of them, and would lose
    path = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[4])
    return Mount(path, after.split()[0], flags)


_LARGEST_COPIED = 1 << 20


@dataclass(frozen=True)
class Prepared:
    """A mount that is to be moved to ``path``. ``descriptor`` is of its root, and stays valid wherever it is."""

    path: str
    descriptor: int


class Layers:
    """Mounts below ``stage``, a tmpfs. ``records`` is the first of them: a writable view of that folder."""

    def __init__(self, stage: str, records: str, table: MountTable, user_namespace: bool) -> None:
        self._stage, self._table, self._user_namespace = stage, table, user_namespace
        self._descriptor = os.open(stage, os.O_PATH)
        self._prepared: list[Prepared] = []
        view = self._new_view()
        linux.mount(records, view, flags=linux.MS_BIND)
        table.containing(records).change_flags(view, remove=linux.MS_RDONLY)
        self._add(records, view)

    def prepared(self) -> list[Prepared]:
        """Returns what is to be moved, outer folders first, and the records after an overlay of the same folder."""
        records, *others = self._prepared
        return sorted([*others, records], key=lambda each: each.path.count("/"))

    def close(self) -> None:
        """Take the tmpfs itself out of the tree; the overlays still have their layers on it."""
        linux.unmount(f"/proc/self/fd/{self._descriptor}")
        os.close(self._descriptor)

    def prepare(self, path: str, needed: Collection[str], temporary: bool) -> None:
        """Prepare a folder and the mounts in it. Where it cannot be an overlay, one for temporary files is empty, and
        another one stays as it is, read-only. Raises OSError where one of the ``needed`` folders is in it."""
        try:
            self._overlay(path)
        except OSError as error:
            if error.errno == errno.EINVAL and self._user_namespace and self._table.below(path):
                self._divide(path, needed)
            elif any(within(each, [path]) for each in needed):
                raise
            elif temporary and os.path.isdir(path):  # it may have been removed just now
                self.prepare_empty(path, 0o1777)
            return
        for mount in self._table.below(path):
            try:
                self._overlay(mount.path)
            except OSError:
                if any(within(each, [mount.path]) for each in needed):
                    raise
                self._bind(mount.path)

    def prepare_empty(self, path: str, mode: int) -> None:
        """Prepare an empty tmpfs."""
        view = self._new_view()
        linux.mount("tmpfs", view, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"mode={mode:o}")
        self._add(path, view)

    def _overlay(self, path: str) -> None:
        view = self._new_view()
        lower = os.open(path, os.O_PATH | os.O_DIRECTORY)
        try:
            layers = self._layers_of(path, os.path.basename(view))
            # By descriptors, as a path in these options would have to be escaped, and might be covered by another
            # mount.
            options = f"lowerdir=/proc/self/fd/{lower},upperdir={layers}/upper,workdir={layers}/work"
            # a folder of the user's can be renamed as such with redirect_dir alone, which takes the administrator's
            # attributes; without it the kernel has programs copy the folder, as between two disks
            options += ",userxattr" if self._user_namespace else ",redirect_dir=on"
            linux.mount("overlay", view, "overlay", options=options)
        finally:
            os.close(lower)
        # On some file systems the mount succeeds and the first write fails.
        _try_to_write(view)
        self._add(path, view)

    def _layers_of(self, path: str, name: str) -> str:
        """Makes the folders of an overlay's upper layer; the path to them has no character that options give a
        meaning to."""
        status = os.stat(path)
        layers = f"/proc/self/fd/{self._descriptor}/{name}-layers"
        for each in ("upper", "work"):
            os.makedirs(os.path.join(layers, each))
        os.chmod(os.path.join(layers, "upper"), stat.S_IMODE(status.st_mode))
        try:
            os.chown(os.path.join(layers, "upper"), status.st_uid, status.st_gid)
        except OSError:  # of another user, who cannot be in this namespace
            pass
        return layers

    def _divide(self, path: str, needed: Collection[str]) -> None:
        """Prepares each folder in a folder for itself: a user namespace may not look at what is below the mounts in
        it, which an overlay of the whole would show."""
        view = self._new_view()
        linux.mount("tmpfs", view, "tmpfs", 0, f"mode={stat.S_IMODE(os.stat(path).st_mode):o}")
        self._add(path, view)
        with os.scandir(path) as entries:
            for entry in entries:
                copy = os.path.join(view, entry.name)
                if entry.is_symlink():
                    os.symlink(os.readlink(entry.path), copy)
                elif entry.is_dir():
                    os.mkdir(copy)
                    self.prepare(entry.path, needed, temporary=True)
                elif entry.is_file():
                    _copy_or_bind(entry, copy)

    def _bind(self, path: str) -> None:
        view = self._new_view()
        linux.mount(path, view, flags=linux.MS_BIND)
        self._add(path, view)

    def _new_view(self) -> str:
        view = os.path.join(self._stage, str(len(os.listdir(self._stage))))
        os.mkdir(view)
        return view

    def _add(self, path: str, view: str) -> None:
        self._prepared.append(Prepared(path, os.open(view, os.O_PATH)))


def require_own(folder: str) -> None:
    """Raises OSError where this user may write in a folder of another user or group, of which a user namespace without
    privileges does not know: an overlay in it refuses to change such files."""
    status = os.stat(folder)
    known = _mapped("uid", status.st_uid) and _mapped("gid", status.st_gid)
    if not known and os.access(folder, os.W_OK):
        raise OSError(errno.EOVERFLOW, f"{folder} is of another user or of a further group of this user")


def _copy_or_bind(entry: os.DirEntry[str], copy: str) -> None:
    try:
        if entry.stat().st_size <= _LARGEST_COPIED:
            with open(entry.path, "rb") as source, open(copy, "wb") as target:
                target.write(source.read())
            os.chmod(copy, stat.S_IMODE(entry.stat().st_mode))
        else:
            os.close(os.open(copy, os.O_CREAT))
            linux.mount(entry.path, copy, flags=linux.MS_BIND)
    except OSError:  # a file that this user may not read
        return


def _try_to_write(view: str) -> None:
    """Raises OSError where an overlay does not take a file although its folder may be written."""
    if not os.access(view, os.W_OK):
        return
    path = os.path.join(view, f".apportion-{os.getpid()}")
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    os.unlink(path)


def _mapped(kind: str, number: int) -> bool:
    """Whether a user or a group is one of this user namespace; one that is not is shown as the overflow user."""
    with open(f"/proc/self/{kind}_map") as file:
        extents = [tuple(map(int, line.split())) for line in file]
    return any(first <= number < first + count for first, _, count in extents)


SHARED_MEMORY = "/dev/shm"
STAGE = "layers"
"""The folder in that of the records below which mounts are prepared; it is empty outside of the namespace."""


def protect(scope: FileScope, records: str, user_namespace: bool) -> None:
    """Arrange the mounts of this process's own namespace; ``records`` is the folder that stays writable.

    Raises OSError where the kernel does not allow it, or where a folder that the scope needs cannot be an overlay.
    """
    for path in scope.needed:
        if user_namespace and path not in scope.temporary:
            require_own(path)
    # Private first: mounts of this namespace must not spread to the one outside, which shares them by default.
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    table = MountTable.read()
    # Mounts that are made from here on, such as the overlays, stay writable.
    table.set_read_only()
    stage = os.path.join(records, STAGE)
    linux.mount("tmpfs", stage, "tmpfs", options="mode=755")
    layers = Layers(stage, records, table, user_namespace)
    for path in _outermost(scope):
        layers.prepare(path, needed=scope.needed, temporary=path in scope.temporary)
    if os.path.isdir(SHARED_MEMORY):
        layers.prepare_empty(SHARED_MEMORY, mode=0o1777)
    for each in layers.prepared():
        _move(each)
    layers.close()


def _outermost(scope: FileScope) -> list[str]:
    """The folders of a scope, without those in another one."""
    paths = dict.fromkeys((*scope.needed, *scope.temporary, *scope.named))
    return [path for path in paths if not within(path, [other for other in paths if other != path])]


def _move(prepared: Prepared) -> None:
    os.makedirs(prepared.path, exist_ok=True)  # where it is below a tmpfs that is empty
    linux.mount(f"/proc/self/fd/{prepared.descriptor}", prepared.path, flags=linux.MS_MOVE)
    os.close(prepared.descriptor)


# Removes the shared memory of processes that are killed, and so do not remove it, where /dev/shm is not private.


_MAPPED = re.compile(rf"(\d+) +{SHARED_MEMORY}/")
"""The number of a file's inode in a line of a process's maps. The C library makes a semaphore under another name than
the one by which it is found, so only the number identifies it."""


def existing() -> set[str]:
    """Returns the names of all shared memory."""
    return set(os.listdir(SHARED_MEMORY)) if os.path.isdir(SHARED_MEMORY) else set()


def mapped(pids: Iterable[int]) -> set[str]:
    """Returns the names of the shared memory that processes use now: semaphores and memory of multiprocessing, torch
    and others."""
    inodes, found = set[int](), set[str]()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
            inodes.update(map(int, _MAPPED.findall(file.read())))
    for name in existing() if inodes else ():
        with contextlib.suppress(OSError):  # removed by now
            if os.stat(os.path.join(SHARED_MEMORY, name)).st_ino in inodes:
                found.add(name)
    return found


def abandoned(names: Iterable[str]) -> set[str]:
    """Returns those of some names that bear the number of a process that has ended, as torch and OpenMP name theirs."""
    numbers = {name: re.match(r"(?:torch|__KMP_REGISTERED_LIB)_(\d+)_", name) for name in names}
    return {name for name, number in numbers.items() if number and not os.path.exists(f"/proc/{number[1]}")}


def remove(names: Collection[str]) -> None:
    """Remove shared memory by its names."""
    for name in names:
        with contextlib.suppress(OSError):  # of another user, or removed by now
            os.unlink(os.path.join(SHARED_MEMORY, name))
