"""The program that runs a module under the hook of a copy.

``python -m apportion.script_check.sandbox.guarded MIRROR.json MODULE ARGUMENTS``.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import runpy
import socket
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from apportion.script_check.imported_modules import ImportedModules
from apportion.script_check.sandbox.mirror import Mirror
from apportion.script_check.sandbox.scope import within


def main() -> None:
    """Install the hook, and run the module as ``python -m`` does."""
    description, module, *arguments = sys.argv[1:]
    guard = Guard(Mirror.load(description))
    wrap_compiled_writers(guard)
    guard.install()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


# Refuses, by an audit hook, what a script in a copy of its folder would change outside of it, and its connections.
#
# The hook sees what Python's own functions do, in this process and in those forked from it. What a compiled library or
# another program does it does not see; the functions of libraries that open a file in compiled code ask the guard
# first. A process cannot take the hook away.


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FREE = ("/dev", "/proc")
"""Devices and what is shown of processes; the hook leaves them to the kernel. /dev/shm is among them."""


class Guard:
    """The rules of a tree."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._inside = threading.local()
        self._rules: dict[str, Callable[..., None]] = {
            "open": self._open,
            "os.truncate": lambda path, length: self._change(path),
            "os.chmod": lambda path, mode, folder: self._change(path, folder),
            "os.chown": lambda path, user, group, folder: self._change(path, folder),
            "os.utime": lambda path, times, ns, folder: self._change(path, folder),
            "os.setxattr": lambda path, *_: self._change(path),
            "os.removexattr": lambda path, *_: self._change(path),
            "os.remove": self._entry,
            "os.rmdir": self._entry,
            "os.mkdir": lambda path, mode, folder: self._entry(path, folder),
            "os.symlink": lambda source, path, folder: self._entry(path, folder),
            "os.link": lambda source, path, source_folder, folder: self._link(source, path, source_folder, folder),
            "os.rename": self._rename,
            "shutil.rmtree": lambda path, *_: self._tree(path),
            "sqlite3.connect": self._database,
            "socket.connect": self._connect,
            "socket.sendto": self._connect,
            "socket.sendmsg": self._connect,
            "socket.getaddrinfo": lambda host, *_: self._look_up(host),
            "socket.gethostbyname": self._look_up,
        }

    def install(self) -> None:
        """Apply the rules from here on, for the rest of the process."""
        sys.addaudithook(self._hook)

    def allow_write(self, path: Any, content: bool = False) -> None:
        """Have a file be one that may be written. Raises PermissionError where it may not."""
        absolute = self._absolute(path, -1)
        if absolute is not None:
            self._require(self._mirror.prepare(absolute, content=content, follow=True), path)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        rule = self._rules.get(event)
        # Called for every audit event of the process, most of which have no rule: this test has to be cheap.
        if rule is None or getattr(self._inside, "value", False):
            return
        self._inside.value = True  # what a rule does itself is not judged
        try:
            rule(*arguments)
        finally:
            self._inside.value = False

    def _open(self, path: Any, mode: Any, flags: int) -> None:
        if flags & _WRITES and not isinstance(path, int):
            self.allow_write(path, content=not flags & os.O_TRUNC)

    def _change(self, path: Any, folder: int = -1) -> None:
        absolute = self._absolute(path, folder if isinstance(path, str | bytes | os.PathLike) else -1)
        if absolute is not None:
            self._require(self._mirror.prepare(absolute, content=True, follow=True), path)

    def _entry(self, path: Any, folder: int = -1) -> None:
        absolute = self._absolute(path, folder)
        if absolute is not None:
            self._require(self._mirror.prepare(absolute, content=True, follow=False), path)

    def _rename(self, source: Any, target: Any, source_folder: int = -1, target_folder: int = -1) -> None:
        self._entry(source, source_folder)
        self._entry(target, target_folder)

    def _link(self, source: Any, path: Any, source_folder: int, folder: int) -> None:
        self._change(source, source_folder)  # two names of one file: a write to the new one would change the old
        self._entry(path, folder)

    def _tree(self, path: Any) -> None:
        absolute = self._absolute(path, -1)
        if absolute is not None:  # its contents are judged one by one; a link itself would not be taken
            self._mirror.prepare_folder(absolute)

    def _database(self, path: Any) -> None:
        text = os.fsdecode(path)
        if text in ("", ":memory:"):
            return
        if text.startswith("file:"):
            if "mode=ro" in text or "immutable=1" in text or ":memory:" in text or "mode=memory" in text:
                return
            text = text.removeprefix("file:").partition("?")[0]
        self.allow_write(text, content=True)

    def _absolute(self, path: Any, folder: int) -> str | None:
        """The absolute path that an argument means; None where it is that of a device or a pipe."""
        if isinstance(path, int):
            text = os.readlink(f"/proc/self/fd/{path}") if os.path.exists("/proc/self/fd") else "/dev/fd"
        else:
            text = os.fsdecode(path)
        if not os.path.isabs(text):
            base = os.getcwd() if folder in (-1, None) else os.readlink(f"/proc/self/fd/{folder}")
            text = os.path.join(base, text)
        return None if within(os.path.abspath(text), _FREE) or not text.startswith("/") else text

    def _require(self, real: str, path: Any) -> None:
        if not self._mirror.contains(real) and not within(real, _FREE):
            raise PermissionError(
                errno.EACCES,
                "the check of the script lets it write only in the copy of its folder, in the folder for temporary "
                "files and in /dev/shm; the file would be",
                os.fsdecode(path) if not isinstance(path, int) else real,
            )

    def _connect(self, _: Any, address: Any) -> None:
        if isinstance(address, tuple) and address and not _is_here(address[0]):
            raise OSError(
                errno.ENETUNREACH, f"the check of the script lets it connect to this machine alone, not to {address[0]}"
            )

    def _look_up(self, host: Any) -> None:
        if not _is_here(host):
            name = os.fsdecode(host)
            raise socket.gaierror(
                socket.EAI_AGAIN, f"the check of the script lets it connect to this machine alone, not to {name}"
            )


def _is_here(host: Any) -> bool:
    if not host:
        return True
    name = os.fsdecode(host)
    if name in ("localhost", "localhost.localdomain", "ip6-localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


_WRITERS = {"torch.serialization": "save", "safetensors": "serialize_file"}
"""The function of each module whose second argument is the file to write."""


def wrap_compiled_writers(guard: Guard) -> None:
    """Wrap those functions as their modules are imported."""
    ImportedModules({module: _wrapping(guard, function) for module, function in _WRITERS.items()}).install()


def _wrapping(guard: Guard, function: str) -> Callable[[ModuleType], None]:
    def wrap(module: ModuleType) -> None:
        write = getattr(module, function)

        @wraps(write)
        def asking(*args: Any, **kwargs: Any) -> Any:
            file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            if isinstance(file, str | os.PathLike):
                guard.allow_write(file)
            return write(*args, **kwargs)

        setattr(module, function, asking)

    return wrap


if __name__ == "__main__":
    main()
