"""What is mounted where in the namespace of this process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from apportion.script_check.sandbox import linux
from apportion.script_check.sandbox.scope import within

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
