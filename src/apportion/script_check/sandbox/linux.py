"""The system calls of Linux that Python has no function for. Each raises OSError where the kernel refuses it.

Landlock (Linux 5.13) has the kernel refuse this process, and all that it starts, to write outside of some folders. It
takes no privileges, and holds for programs that a script starts and for libraries that are not Python as well.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOSYMFOLLOW, MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_RELATIME, MS_STRICTATIME = (
    1 << bit for bit in (8, 10, 11, 12, 13, 14, 18, 21, 24)
)
CAP_SYS_ADMIN = 21

_MNT_DETACH = 2
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


@cache
def _libc() -> Any:
    if sys.platform != "linux":
        raise OSError("only Linux has namespaces")
    return ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library that returns -1 and sets errno where it fails. Raises OSError then."""
    result = int(getattr(_libc(), name)(*arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Move this process into new namespaces, and with ``CLONE_NEWPID`` its later children."""
    call("unshare", flags)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount, as mount(2) does."""
    call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )


def unmount(target: str) -> None:
    """Take a mount out of the tree; it goes when nothing uses it any more."""
    call("umount2", os.fsencode(target), _MNT_DETACH)


def exchange(first: str, second: str) -> None:
    """Exchange two entries of a file system in one step."""
    call("renameat2", _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)


def forbid_new_privileges() -> None:
    """No program that this process runs from here on gets more privileges than it has, such as by sudo."""
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def bound_capabilities(allowed: Collection[int]) -> None:
    """Programs that this process runs have no other capabilities than these, even as root."""
    for capability in range(64):
        if capability not in allowed:
            try:
                call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
            except OSError:  # beyond the last capability of this kernel
                return


def capabilities() -> int:
    """Returns the effective capabilities of this process, as bits."""
    with open("/proc/self/status") as file:
        return next((int(line.split()[1], 16) for line in file if line.startswith("CapEff")), 0)


def raise_loopback() -> None:
    """Set the loopback interface of this network namespace up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sh22x", b"lo", 0))
        (flags,) = struct.unpack_from("h", request, 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # removing and making each kind of entry


def landlock_version() -> int:
    """Returns the version of the kernel's interface. Raises OSError where it has none."""
    return _landlock_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))


def allow_writes_only_in(folders: Sequence[str], devices: Sequence[str] = ()) -> None:
    """Refuse every change of files elsewhere from here on; in ``devices`` existing files can be written.

    Raises OSError where the kernel does not offer it.
    """
    version = landlock_version()
    # The kernel refuses a set of rules that names a right it does not know yet.
    changes = _CHANGES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("Q", changes)
    rules = _landlock_call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        for paths, allowed in ((folders, changes), (devices, changes & (_WRITE_FILE | _TRUNCATE))):
            for path in paths:
                _allow_beneath(rules, path, allowed)
        # Without privileges the kernel accepts the restriction only so.
        forbid_new_privileges()
        _landlock_call(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0))
    finally:
        os.close(rules)


def _allow_beneath(rules: int, path: str, allowed: int) -> None:
    try:
        folder = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    try:
        _landlock_call(
            _ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), struct.pack("=Qi", allowed, folder),
            ctypes.c_uint(0),
        )  # fmt: skip
    finally:
        os.close(folder)


def _landlock_call(number: int, *arguments: object) -> int:
    return call("syscall", ctypes.c_long(number), *arguments)
