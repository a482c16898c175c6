"""Has the kernel refuse this process, and all that it starts, to write outside of some folders (Linux 5.13).

It takes no privileges, and holds for programs that a script starts and for libraries that are not Python as well.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from apportion.script_check.sandbox import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # removing and making each kind of entry


def version() -> int:
    """Returns the version of the kernel's interface. Raises OSError where it has none."""
    return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))


def allow_writes_only_in(folders: Sequence[str], devices: Sequence[str] = ()) -> None:
    """Refuse every change of files elsewhere from here on; in ``devices`` existing files can be written.

    Raises OSError where the kernel does not offer it.
    """
    known = version()
    changes = _CHANGES | (_REFER if known >= 2 else 0) | (_TRUNCATE if known >= 3 else 0)
    attributes = struct.pack("Q", changes)
    rules = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        for paths, allowed in ((folders, changes), (devices, changes & (_WRITE_FILE | _TRUNCATE))):
            for path in paths:
                _allow(rules, path, allowed)
        linux.forbid_new_privileges()
        _call(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, allowed: int) -> None:
    try:
        folder = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    try:
        _call(
            _ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), struct.pack("=Qi", allowed, folder),
            ctypes.c_uint(0),
        )  # fmt: skip
    finally:
        os.close(folder)


def _call(number: int, *arguments: object) -> int:
    return linux.call("syscall", ctypes.c_long(number), *arguments)
