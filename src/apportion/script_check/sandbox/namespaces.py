"""Moves a process into namespaces of its own: other mounts, no network but loopback, other process numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from apportion.script_check.sandbox import linux

_KEPT_CAPABILITIES = frozenset((0, 1, 2, 3, 4, 5, 6, 7, 10, 14, 19, 23, 24))
"""Those over files, processes, memory and priorities: what a program of root uses that is not administration."""


@dataclass(frozen=True)
class Configuration:
    """Which namespaces are made. ``user``: a user namespace, which gives a process without privileges the right to make
    the others; ``processes``: one of process numbers, with whose first process the kernel ends all others."""

    user: bool
    processes: bool


CONFIGURATIONS = {
    "privileged": Configuration(user=False, processes=True),
    "unprivileged": Configuration(user=True, processes=True),
    "visible processes": Configuration(user=True, processes=False),
}
"""The configurations, by name and in the order in which they are tried: the last one is for a kernel that allows no
further /proc to be mounted, as in some containers."""


def possible(configuration: Configuration) -> bool:
    """Whether a configuration is worth a try: without a user namespace the process must be the administrator."""
    return sys.platform == "linux" and (configuration.user or bool(linux.capabilities() >> linux.CAP_SYS_ADMIN & 1))


def enter(configuration: Configuration, map_all: Callable[[], bool]) -> None:
    """Move this process into new namespaces. Raises OSError where the kernel does not allow it.

    ``map_all`` is called once the user namespace exists: another process outside of it gives this one all users and
    groups, and returns whether it could. Where it could not, this process gets its own user and group alone.
    """
    user, group = os.geteuid(), os.getegid()
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC
    flags |= linux.CLONE_NEWUSER if configuration.user else 0
    flags |= linux.CLONE_NEWPID if configuration.processes else 0
    linux.unshare(flags)
    if configuration.user and not map_all():
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/setgroups", "deny")  # without it the kernel takes no map of groups from this process
        _write("/proc/self/gid_map", f"{group} {group} 1")
    # It is down in a new network namespace, and the ranks find each other by it.
    linux.raise_loopback()


def map_all_users(pid: int) -> bool:
    """Give the user namespace of a process all users and groups of this one, each by its own number. Returns whether
    the kernel allows that, which it does to an administrator."""
    if os.geteuid() != 0:
        return False
    try:
        for kind in ("uid", "gid"):
            with open(f"/proc/self/{kind}_map") as file:
                extents = [line.split() for line in file]
            _write(f"/proc/{pid}/{kind}_map", "".join(f"{first} {first} {count}\n" for first, _, count in extents))
    except OSError:
        return False
    return True


def restrict_programs() -> None:
    """The programs that this process runs get no privileges over the mounts, nor over the machine."""
    linux.forbid_new_privileges()
    linux.bound_capabilities(_KEPT_CAPABILITIES)


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())  # in one call, as the kernel takes a map once
    finally:
        os.close(file)
