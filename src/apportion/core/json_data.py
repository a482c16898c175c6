"""Dataclasses from JSON that a person may have written: what is wrong is named with its place.

Settings go to plain JSON and back: what JSON has no word for (tuples, counters, keys that are no text) is tagged. What
one run keeps for the next is JSON in a cache.
"""

from __future__ import annotations

import atexit
import dataclasses
import difflib
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Read = TypeVar("Read")

_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def read(cls: type[Read], data: Any, place: str = "") -> Read:
    """An object of JSON as a dataclass, and what it holds. ValueError names the field that is missing, unknown, or not
    of its type (``devices[0].cores=2.5: a whole number is wanted``)."""
    if not isinstance(data, dict):
        raise ValueError(f"{place or 'it'} is {_shown(data)}: an object is wanted, with {_listed(cls)}")
    hints: dict[str, Any] = _hints(cls)  # type: ignore[arg-type]
    given = {}
    for name, value in data.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {_listed(cls)}"
            raise ValueError(f"{_of(place)}unknown field {name!r}: {hint}")
        given[name] = _value(hints[name], value, f"{place}.{name}" if place else name)
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]  # type: ignore[arg-type]
    if missing := [repr(name) for name in required if name not in given]:
        raise ValueError(f"{_of(place)}{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    return cls(**given)


@cache
def _hints(cls: type) -> dict[str, Any]:
    known = get_type_hints(cls)
    return {field.name: known[field.name] for field in dataclasses.fields(cls)}


def _value(hint: Any, value: Any, place: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return read(hint, value, place)  # type: ignore[arg-type]
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in inside:
            return None
        return _value(next(one for one in inside if one is not NoneType), value, place)
    if origin is tuple:
        return _tuple(inside, value, place)
    if origin is Literal:
        if value not in inside:
            raise ValueError(f"{place}={_shown(value)}: one of {', '.join(inside)} is wanted")
        return value
    return _plain(hint, value, place)


def _tuple(inside: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    many = None if inside[-1] is Ellipsis else len(inside)
    if not isinstance(value, list | tuple) or many not in (None, len(value)):
        raise ValueError(f"{place}={_shown(value)}: a list{'' if many is None else f' of {many}'} is wanted")
    return tuple(_value(inside[0], one, f"{place}[{i}]") for i, one in enumerate(value))


def _plain(kind: type, value: Any, place: str) -> Any:
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 8e9, as a person writes it
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (is_number and (kind is float or isinstance(value, int)) if kind in (int, float) else type(value) is kind):
        raise ValueError(f"{place}={_shown(value)}: {_WORDS[kind]} is wanted")
    return value


def _of(place: str) -> str:
    return f"{place}: " if place else ""


def _listed(cls: type) -> str:
    return ", ".join(field.name for field in dataclasses.fields(cls))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:38]}.."


# Caches


def cache_folder(kind: str) -> Path:
    """Return ``$XDG_CACHE_HOME/apportion/KIND``, or the same below ``~/.cache``; below a temporary folder of the user's
    where the user has no home, as in many containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apportion" / kind
    except RuntimeError:
        return _without_home() / kind


@cache
def _without_home() -> Path:
    """Return the folder of caches of a user without a home. Others may write to the folder of temporary files: what is
    not this user's alone is not trusted, and the caches then last as long as this process."""
    folder = Path(tempfile.gettempdir()) / f"apportion-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    except OSError:
        pass
    # Made by the first that keeps something there: a process that only reads, and ends at once, leaves nothing.
    own = Path(tempfile.gettempdir()) / f"apportion-{secrets.token_hex(16)}"
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own


def keep(path: Path, data: Any) -> None:
    """Write JSON to a file of a cache, which is whole or as it was. Where nothing can be written, nothing is: the next
    run finds out again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, suffix=".new") as draft:
            (Path(draft) / path.name).write_text(json.dumps(data, indent=1))
            os.replace(Path(draft) / path.name, path)
    except OSError:
        pass


# Settings


def to_plain(value: Any, where: str) -> Any:
    """JSON for a nest of numbers, texts, lists, tuples and dicts. ValueError naming the place of anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [to_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "pairs"
        return {kind: [[to_plain(k, where), to_plain(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a learning rate kept as a tensor
        return value.item()
    raise ValueError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: use numbers, texts, lists and dicts"
    )


def from_plain(value: Any) -> Any:
    """The nest that ``to_plain`` was given."""
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if isinstance(value, dict):
        ((kind, items),) = value.items()
        plain = [from_plain(v) for v in items]
        if kind == "tuple":
            return tuple(plain)
        return Counter(dict(plain)) if kind == "counter" else dict(plain)
    return value
