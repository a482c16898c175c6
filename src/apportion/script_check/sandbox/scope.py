"""Which folders a script may be expected to read and write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_OF_THE_SYSTEM = ("/proc", "/sys", "/dev")
_SHARED = "/dev/shm/"
_MOST_NAMED = 32


@dataclass(frozen=True)
class FileScope:
    """Folders, as absolute paths without symbolic links.

    ``folder``: the script's; ``current``: the one that it is run in; ``home``: the home directory. ``temporary``: those
    for temporary files. ``named``: those that a variable of the environment or an argument of the script names, such as
    a cache outside of the home directory, or the next existing one above it.
    """

    folder: str
    current: str
    home: str
    temporary: Sequence[str]
    named: Sequence[str] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The folders in which a script is sure to write, if they are any but the system's, each once."""
        return _folders([self.folder, self.current, self.home])


def scope_of(folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> FileScope:
    """Returns the scope of a script in ``folder`` that is called with ``arguments`` from the current folder."""
    home = environment.get("HOME") or os.path.expanduser("~")
    temporary = _folders([environment.get("TMPDIR", ""), "/tmp", "/var/tmp"])
    named = _folders([*_folders_in_environment(environment), *map(_existing, _paths_in_arguments(arguments))])
    return FileScope(os.path.realpath(folder), os.getcwd(), os.path.realpath(home), temporary, named[:_MOST_NAMED])


def argument_path(argument: str) -> tuple[str, str]:
    """Returns an argument in two parts, of which the second is an absolute path: ``("--out=", "/data/run")``; the
    second is empty where the argument does not hold one."""
    name, sign, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    path = os.path.expanduser(value)
    return (name + sign, path) if os.path.isabs(path) else (argument, "")


def _folders_in_environment(environment: Mapping[str, str]) -> Iterator[str]:
    for value in environment.values():
        if os.path.isabs(value) and os.path.isdir(value) and os.access(value, os.W_OK):
            yield value


def _paths_in_arguments(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        _, path = argument_path(argument)
        if path:
            yield path
        elif ".." in argument:
            yield os.path.abspath(argument.partition("=")[2] or argument)


def _existing(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _folders(paths: Iterable[str]) -> tuple[str, ...]:
    """The folders among these, each once, without those that belong to the system."""
    real = dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isdir(path))
    ordinary = (path for path in real if path.startswith(_SHARED) or not within(path, _OF_THE_SYSTEM))
    return tuple(path for path in ordinary if path != "/")


def within(path: str, folders: Iterable[str]) -> bool:
    """Whether an absolute path is one of some folders or in one of them."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)
